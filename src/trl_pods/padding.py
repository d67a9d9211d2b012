"""
Micro-batches no wider than their longest row.

TRL pads the rows of a round to the longest of them and slices the round into micro-batches, which keep that width:

    prompt_ids       . . a b      completion_ids  c d e . . .           prompt_ids  a b      completion_ids  c d e
                     . . a b                      f g . . . .    ->                 a b                      f g .

Columns of padding alone add nothing to a loss: no token attends to them and all masks are 0 there. What is left gives
the same loss up to rounding, as sums are made of fewer zeros.
"""

from collections.abc import Iterator
from typing import Any

import torch


# What TRL returns of a round with one entry per image, tile or patch; everything else has one entry per row.
PER_IMAGE = frozenset(
    {
        "image_grid_thw",
        "image_position_ids",
        "image_sizes",
        "pixel_attention_mask",
        "pixel_values",
        "spatial_shapes",
    }
)

# Fields as wide as the prompts, as the completions (some may have one value per row instead), and as both together.
_PROMPTS = frozenset({"prompt_ids", "prompt_mask"})
_PADDED_LOG_PROBS = frozenset({"old_per_token_logps", "ref_per_token_logps"})  # computed before the cut
_COMPLETIONS = _PADDED_LOG_PROBS | {
    "advantages",
    "completion_ids",
    "completion_mask",
    "importance_sampling_ratio",
    "sampling_per_token_logps",
    "tool_mask",
}
_SEQUENCES = frozenset({"mm_token_type_ids", "token_type_ids"})
WIDE_FIELDS = _PROMPTS | _COMPLETIONS | _SEQUENCES | PER_IMAGE

# Kinds of rotary embeddings by which a token sees another one alike wherever both stand, and those that depend on how
# wide a batch is.
_RELATIVE = {"default", "linear", "llama3", "yarn"}
_BY_WIDTH = {"dynamic", "longrope"}


class PaddingCutter:
    """
    Cuts columns of padding off micro-batches, where that changes a loss by no more than rounding.

    Completions are cut on the right, and prompts on the left if rotary embeddings see relative positions alone, since
    that moves all tokens. Left as they are: batches of models whose embeddings depend on the width, batches with wide
    fields that are not known, and in half precision batches with old or reference log-probs. These were computed at
    the former width, and in bfloat16 another one moves log-probs by hundredths: ratios would no longer be 1.

    Args:
        model (`torch.nn.Module`):
            The policy; its `config` tells how positions enter.
        pad_token_id (`int`):
            The token that fills rows up.
        multiple_of (`int`, *optional*):
            Prompts and completions stay multiples of so many columns wide, as `pad_to_multiple_of` makes them.
        full_precision (`bool`, *optional*, defaults to `False`):
            Whether the policy computes in float32.

    Example:

    ```python
    >>> from types import SimpleNamespace
    >>> from transformers import LlamaConfig

    >>> cutter = PaddingCutter(SimpleNamespace(config=LlamaConfig()), pad_token_id=0)
    >>> batch = {
    ...     "prompt_ids": torch.tensor([[0, 5, 6], [0, 0, 7]]),
    ...     "prompt_mask": torch.tensor([[0, 1, 1], [0, 0, 1]]),
    ...     "completion_ids": torch.tensor([[8, 0, 0, 0], [8, 9, 0, 0]]),
    ...     "completion_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]]),
    ...     "advantages": torch.tensor([-1.0, 1.0]),
    ... }
    >>> cut = cutter.cut(batch)
    >>> cut["prompt_ids"].tolist(), cut["completion_ids"].tolist()
    ([[5, 6], [0, 7]], [[8, 0], [8, 9]])

    ```
    """

    def __init__(
        self, model: Any, pad_token_id: int, multiple_of: int | None = None, full_precision: bool = False
    ) -> None:
        rotary = set(_rotary_types(model.config))
        self._cuts_prompts = bool(rotary) and rotary <= _RELATIVE and not _has_virtual_tokens(model)
        self._cuts = not rotary & _BY_WIDTH
        self._pad_token_id = pad_token_id
        self._multiple_of = multiple_of or 1
        self._full_precision = full_precision

    def cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        """
        The batch without needless columns.

        Args:
            batch (`dict[str, Any]`):
                A micro-batch as `GRPOTrainer._prepare_inputs` returns it. It is not changed.
        """
        if not (self._cuts and _is_known(batch) and (self._full_precision or not _has(batch, _PADDED_LOG_PROBS))):
            return batch
        left, right = self._excess_of_prompts(batch), self._excess_of_completions(batch)
        if not left and not right:
            return batch
        completion_width = batch["completion_ids"].shape[1]
        cut = dict(batch)
        for name, value in batch.items():
            if name in _PROMPTS:
                cut[name] = value[:, left:].contiguous()
            elif name in _SEQUENCES and value is not None:  # with these no prompt is cut
                cut[name] = value[:, : value.shape[1] - right].contiguous()
            elif name in _COMPLETIONS and _width(value) == completion_width:
                cut[name] = value[:, : completion_width - right].contiguous()
        return cut

    def _excess_of_prompts(self, batch: dict[str, Any]) -> int:
        if not self._cuts_prompts or _has(batch, _SEQUENCES | PER_IMAGE):
            return 0
        width = batch["prompt_ids"].shape[1]
        needed = batch["prompt_mask"].any(dim=0).flip(0)
        return width - self._rounded(_last(needed), width)

    def _excess_of_completions(self, batch: dict[str, Any]) -> int:
        # Not by the mask alone: tokens of a truncated completion that is masked stay, as images may belong to them.
        needed = batch["completion_mask"].bool() | (batch["completion_ids"] != self._pad_token_id)
        ratio = batch.get("importance_sampling_ratio")
        if ratio is not None and ratio.shape == needed.shape:
            needed |= ratio != 1  # the vespo loss sums over padding too, where clipping may leave another ratio
        width = needed.shape[1]
        # In a width of 1 TRL sees one value for each sequence.
        return width - self._rounded(max(_last(needed.any(dim=0)), 2), width)

    def _rounded(self, columns: int, width: int) -> int:
        return min(-(-columns // self._multiple_of) * self._multiple_of, width)


def _last(columns: torch.Tensor) -> int:
    """How many columns there are up to the last one that is needed; 1 if none is."""
    positions = columns.nonzero()
    return int(positions[-1]) + 1 if len(positions) else 1


def _width(value: Any) -> int | None:
    return value.shape[1] if isinstance(value, torch.Tensor) and value.ndim == 2 else None


def _has(batch: dict[str, Any], names: frozenset[str]) -> bool:
    return any(batch.get(name) is not None for name in names)


def _is_known(batch: dict[str, Any]) -> bool:
    wide = {name for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim > 1}
    return wide <= WIDE_FIELDS


def _rotary_types(config: Any) -> Iterator[str]:
    """The kinds of rotary embeddings of a model, of which layers may have different ones; nothing without any."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    # `rope_scaling` is that of transformers 4, where `None` stands for the default.
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if parameters is None:
        parameters = {"rope_type": "default"} if hasattr(text, "rope_theta") else {}
    by_layer = [value for value in parameters.values() if isinstance(value, dict)]
    for of_layers in by_layer or [parameters] * bool(parameters):
        yield of_layers.get("rope_type") or of_layers.get("type") or "default"


def _has_virtual_tokens(model: Any) -> bool:
    """Whether an adapter puts tokens before the prompts, which would move towards them."""
    adapters = getattr(model, "peft_config", None) or {}
    return any(adapter.is_prompt_learning for adapter in adapters.values())
