"""The table of memory in recipes/README.md, computed anew from the shapes of the models, without their weights."""

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM


SHAPES = {  # vocabulary, width, width of the MLP, layers, heads, heads of keys and values, tied embeddings
    "Qwen2.5-0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": (151936, 1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B": (151936, 2048, 11008, 36, 16, 2, True),
    "Qwen2.5-7B": (152064, 3584, 18944, 28, 28, 4, False),
}
LORA = LoraConfig(r=64, target_modules="all-linear")
ROLLOUTS, ROWS, PROMPT, COMPLETION = 64, 16, 200, 512
OF_A_LAYER = 70  # bytes kept for the backward pass of a layer, by token and width
BF16, FLOAT32 = 2, 4
NF4_NESTED = 0.5 + (1 + 4 / 256) / 64  # a scale of one byte to 64 weights, and one of four to 256 scales


def make_model(vocabulary, width, mlp_width, layers, heads, kv_heads, tied):
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def gigabytes(vocabulary, width, mlp_width, layers, heads, kv_heads, tied):
    """The columns of the table."""
    with torch.device("meta"):
        model = make_model(vocabulary, width, mlp_width, layers, heads, kv_heads, tied)
        parameters = model.num_parameters()
        in_layers = sum(p.numel() for name, p in model.named_parameters() if name.endswith("proj.weight"))
        model = get_peft_model(model, LORA)
    adapters, _ = model.get_nb_trainable_parameters()
    tokens = PROMPT + COMPLETION
    weights = parameters * BF16
    packed = (parameters - in_layers) * BF16 + in_layers * NF4_NESTED
    cache = 2 * layers * kv_heads * (width // heads) * BF16 * ROLLOUTS * tokens
    activations = (layers * BF16 + OF_A_LAYER) * width * ROWS * tokens
    logits = vocabulary * ROWS * COMPLETION * FLOAT32
    # Each trained weight with its gradient and two states of AdamW.
    columns = (weights, packed, 4 * FLOAT32 * adapters, 4 * BF16 * adapters, cache, activations, logits)
    return [f"{column / 1e9:.1f}" for column in columns]


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_memory_says_what_the_shapes_give(name):
    readme = (Path(__file__).parents[1] / "recipes" / "README.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", readme, re.MULTILINE)
    assert row.split(" | ") == gigabytes(*SHAPES[name])


def test_a_layer_keeps_about_as_much_for_its_backward_pass_as_the_table_counts():
    vocabulary, width, mlp_width, _, *heads_and_ties = SHAPES["Qwen2.5-0.5B"]
    model = get_peft_model(make_model(128, width, mlp_width, 1, *heads_and_ties), LORA).base_model.model.model
    num_tokens, kept = 48, {}  # a size that no weight has
    of_weights = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        # Weights cast to bfloat16 are kept too, however many tokens there are.
        if tensor.data_ptr() not in of_weights and num_tokens in tensor.shape:
            kept[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    hidden = torch.randn(1, num_tokens, width, dtype=torch.bfloat16, requires_grad=True)
    positions = model.rotary_emb(hidden, torch.arange(num_tokens)[None])
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.autocast("cpu", dtype=torch.bfloat16), hooks:
        model.layers[0](hidden, position_embeddings=positions, attention_mask=None)
    size = sum(nbytes for _, nbytes in kept.values())
    assert size / num_tokens / width == pytest.approx(OF_A_LAYER, rel=0.05)
