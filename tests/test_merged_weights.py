import pytest
import torch
from peft import (
    HRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    get_peft_model,
)
from rig import make_model

from trl_pods.merged_weights import base_weights_untouched


LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def adapted(config=LORA):
    torch.manual_seed(0)
    model = get_peft_model(make_model().bfloat16(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def sync(model):
    """As TRL does it: what is sent, under the names of the model without an adapter."""
    model.merge_adapter()
    sent = {}
    for name, value in copies(model).items():
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if model.prefix not in name and "original_module" not in name:
            sent[name.replace("modules_to_save.default.", "")] = value
    model.unmerge_adapter()
    return sent


def test_trl_itself_moves_the_base():
    model = adapted()
    before = copies(model)
    sync(model)
    assert any(not torch.equal(before[name], value) for name, value in copies(model).items())


IN_A_LAYER = {"target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.mark.parametrize(
    "config",
    [
        LORA,
        LoraConfig(r=4, use_dora=True, target_modules="all-linear"),
        LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
        LoraConfig(r=4, modules_to_save=["lm_head"], **IN_A_LAYER),
        LoraConfig(r=4, target_modules=[], target_parameters=["mlp.down_proj.weight"]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        LNTuningConfig(target_modules=["input_layernorm", "norm"]),
        LoHaConfig(r=4, **IN_A_LAYER),
        LoKrConfig(r=4, **IN_A_LAYER),
        OFTConfig(r=0, oft_block_size=4, **IN_A_LAYER),
        HRAConfig(r=4, **IN_A_LAYER),
        VBLoRAConfig(r=4, topk=2, vector_length=8, num_vectors=8, **IN_A_LAYER),
        TrainableTokensConfig(token_indices=[5, 6]),
    ],
    ids=lambda config: type(config).__name__.removesuffix("Config"),
)
def test_merged_weights_are_read_and_the_base_stays_to_the_last_bit(config):
    model, expected = adapted(config), sync(adapted(config))
    before, plain = copies(model), copies(make_model().bfloat16())
    assert expected.keys() == plain.keys()
    assert any(not torch.equal(expected[name], value) for name, value in plain.items())
    for _ in range(3):
        with base_weights_untouched(model):
            listed = list(model.parameters())  # what TRL gathers before it merges
            sent = sync(model)
        assert all(value is parameter for value, parameter in zip(listed, model.parameters(), strict=True))
        assert sent.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(sent[name], value), name
        for name, value in copies(model).items():
            assert torch.equal(value, before[name]), name
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
