"""What an engine gets of a policy with an adapter, without a trace in the policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer


@contextmanager
def base_weights_untouched(model: Any) -> Iterator[None]:
    """
    Within this, `model.merge_adapter()` changes no weight, and `model.named_parameters()` yields the merged ones.

    TRL adds the adapter to the base weights to send them to vLLM and takes it off again, and the rounding errors of
    both stay: after some hundred syncs a base in bfloat16 is another one (huggingface/trl#6688). Here the sum is made
    in copies, for one layer at a time. Quantised bases, and layers with several adapters inside one another, are
    merged as TRL does.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The policy; one without an adapter is left alone.

    Example:

    ```python
    >>> from peft import LoraConfig, get_peft_model
    >>> policy = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False))
    >>> policy = get_peft_model(policy, LoraConfig(r=1, lora_alpha=1, target_modules=["0"]))
    >>> for parameter in policy.parameters():
    ...     _ = parameter.data.fill_(1.0)
    >>> with base_weights_untouched(policy):
    ...     policy.merge_adapter()
    ...     merged = next(value for name, value in policy.named_parameters() if "base_layer" in name)
    ...     policy.unmerge_adapter()
    >>> merged.tolist(), policy.base_model.model[0].base_layer.weight.tolist()
    ([[2.0, 2.0]], [[1.0, 1.0]])

    ```
    """
    layers = _adapted_layers(model) if is_peft_model(model) else None
    if layers is None:
        yield
        return
    parameters = model.named_parameters

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in parameters(*args, **kwargs):
            layer = layers.get(parameter)
            yield name, parameter if layer is None else _merged(layer, parameter)

    def merge_adapter() -> None:
        model.base_model._check_merge_allowed()
        model.named_parameters = named_parameters

    def unmerge_adapter() -> None:
        model.__dict__.pop("named_parameters", None)

    model.merge_adapter, model.unmerge_adapter = merge_adapter, unmerge_adapter
    try:
        yield
    finally:
        unmerge_adapter()
        del model.merge_adapter, model.unmerge_adapter


def _adapted_layers(model: Any) -> dict[torch.nn.Parameter, BaseTunerLayer] | None:
    """By base weight the layer that adapts it; `None` if there are some that cannot be merged by themselves."""
    layers: dict[torch.nn.Parameter, BaseTunerLayer] = {}
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        weights = list(layer.get_base_layer().parameters())
        if any(weight in layers or not weight.is_floating_point() for weight in weights):
            return None
        layers |= dict.fromkeys(weights, layer)
    return layers


@torch.no_grad()
def _merged(layer: Any, weight: torch.nn.Parameter) -> torch.Tensor:
    originals = {name: (p, p.detach().clone()) for name, p in layer.get_base_layer().named_parameters()}
    name = next(name for name, (parameter, _) in originals.items() if parameter is weight)
    layer.merge()
    merged = layer.get_base_layer().get_parameter(name).detach().clone()  # some put another layer in its place
    layer.unmerge()
    for parameter, original in originals.values():
        parameter.copy_(original)
    return merged
