import pytest
import torch
from peft import LoraConfig, get_peft_model
from rig import make_model

from trl_pods.merged_weights import base_weights_untouched


def adapted(dtype=torch.bfloat16, **settings):
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | settings
    model = get_peft_model(make_model().to(dtype), LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sync(model):
    """As TRL does it."""
    model.merge_adapter()
    sent = copies(model)
    model.unmerge_adapter()
    return sent


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"target_modules": ["embed_tokens", "q_proj"]}])
def test_merged_weights_are_read_and_the_base_stays_to_the_last_bit(settings):
    model, reference = adapted(**settings), adapted(**settings)
    before, expected = copies(model), sync(reference)
    assert any(not torch.equal(before[name], value) for name, value in copies(reference).items())  # the fault
    for _ in range(3):
        with base_weights_untouched(model):
            listed = list(model.parameters())  # what TRL gathers before it merges
            sent = sync(model)
        assert all(value is parameter for value, parameter in zip(listed, model.parameters(), strict=True))
        assert sent.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(sent[name], value), name
            assert torch.equal(model.get_parameter(name), before[name]), name
    assert not any("merge" in name or "named" in name for name in vars(model))


def fail_to_sync(model):
    model.merge_adapter()
    raise ConnectionError


def test_a_failed_sync_leaves_no_trace():
    model = adapted()
    with pytest.raises(ConnectionError), base_weights_untouched(model):
        fail_to_sync(model)
    assert {"merge_adapter", "unmerge_adapter", "named_parameters"}.isdisjoint(vars(model))


def test_a_policy_without_an_adapter_is_left_alone():
    model = make_model()
    with base_weights_untouched(model):
        assert "named_parameters" not in vars(model)
