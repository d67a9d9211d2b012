"""What comes from libraries beneath TRL: 4-bit base models, Liger's loss, continuous batching of transformers."""

import importlib.util

import pytest
import torch
import trl
from packaging.version import Version
from peft import LoraConfig
from rig import (
    F1,
    LOGGED,
    N8_M4,
    Script,
    assert_equal_weights,
    kept_rows,
    make_model,
    make_trainer,
    step_logs,
    train,
    weights,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer


LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


REWARDS = F1.rewards


def needs(library):
    return pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=f"{library} is not installed")


def shadow(folder, **settings):
    """Plain GRPO on the rollouts of F1 that are kept."""
    settings = {**settings, "num_generations": 4, "per_device_train_batch_size": 4}
    return train(folder, Script([F1], only={0: [0, 1, 4, 5]}), GRPOTrainer, GRPOConfig, **settings)


@needs("bitsandbytes")
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_adapters_on_a_four_bit_base_train_as_plain_grpo_on_the_kept_rollouts(tmp_path, beta):
    make_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")

    def load():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", quantization_config=quantization, dtype=torch.float32
        )

    settings = {"beta": beta, "learning_rate": 1e-2, "max_steps": 2}
    before = dict(load().named_parameters())
    torch.manual_seed(0)
    pods = train(tmp_path, Script([F1]), model=load(), trainer_kwargs={"peft_config": LORA}, **N8_M4, **settings)
    torch.manual_seed(0)
    plain = shadow(tmp_path, model=load(), trainer_kwargs={"peft_config": LORA}, **settings)
    assert step_logs(pods)[0]["loss"] == pytest.approx(-0.19124, abs=1e-5)
    assert [logs["loss"] for logs in step_logs(pods)] == [logs["loss"] for logs in step_logs(plain)]
    assert_equal_weights(pods, plain)
    base = {
        name.replace("base_model.model.", "").replace(".base_layer", ""): weight
        for name, weight in weights(pods).items()
    }
    assert base["model.layers.0.self_attn.q_proj.weight"].dtype == torch.uint8
    for name, weight in before.items():
        assert torch.equal(base[name], weight), name
    assert any(name.endswith("lora_B.default.weight") and weight.any() for name, weight in base.items())


@needs("liger_kernel")
@pytest.mark.skipif(
    Version(trl.__version__) >= Version("1.15"), reason=f"trl {trl.__version__} has no loss of Liger's"
)
@pytest.mark.parametrize(
    "settings", [{}, {"loss_type": "grpo", "beta": 0.1}, {"importance_sampling_level": "sequence"}]
)
def test_the_loss_of_liger_trains_as_plain_grpo_on_the_kept_rollouts(tmp_path, settings):
    make_model().save_pretrained(tmp_path / "model")  # from which TRL loads the reference model
    # Liger's layers need a GPU, its loss does not.
    layers = ["rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy"]
    settings = {
        "use_liger_kernel": True,
        "liger_kernel_config": dict.fromkeys(layers, False),
        "model_init_kwargs": {"dtype": "float32"},
        "learning_rate": 1e-2,
        "max_steps": 2,
    } | settings
    model = {"model": str(tmp_path / "model")}
    pods = train(tmp_path, Script([F1]), trainer_kwargs=model, **N8_M4, **settings)
    plain = shadow(tmp_path, trainer_kwargs=model, **settings)
    assert [logs["loss"] for logs in step_logs(pods)] == [logs["loss"] for logs in step_logs(plain)]
    assert_equal_weights(pods, plain)
    assert not torch.equal(weights(pods)["lm_head.weight"], make_model().lm_head.weight)


@pytest.mark.slow
def test_continuous_batching_gives_rollouts_to_select_from(tmp_path):
    seen = []
    by_gradient = {"optim": "sgd", "learning_rate": 1.0}  # Adam would make steps out of rounding errors of no gradient

    def reward(completion_ids, **kwargs):
        seen.extend(completion_ids)
        return REWARDS[: len(completion_ids)]

    sampled = {"rollout_func": None, "reward_funcs": [reward], "eval_dataset": Script([F1] * 2).dataset()}
    settings = {"use_transformers_continuous_batching": True, "per_device_eval_batch_size": 4, **by_gradient}
    settings["transformers_continuous_batching_config"] = {
        "num_blocks": 16,
        "max_batch_tokens": 64,
    }  # else for all memory
    pods = make_trainer(tmp_path, Script([F1]), trainer_kwargs=sampled, **N8_M4, **LOGGED, **settings)
    evaluation = pods.evaluate()
    assert len(seen) == 2 * 4  # nothing is down-sampled in the second batch of an evaluation either
    assert evaluation["eval_reward"] == pytest.approx(sum(REWARDS[:4]) / 4)
    assert not [key for key in evaluation if key.startswith(("pods/", "rewards/"))]
    seen.clear()
    pods.train()
    kept = kept_rows(pods)
    assert (len(seen), kept) == (8, [0, 1, 4, 5])

    def replay(prompts, trainer):
        ids = [seen[i] for i in kept]
        prompt_ids = [[int(word[1:]) for word in prompt.split()] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [[-0.1] * len(i) for i in ids]}

    def kept_reward(completion_ids, **kwargs):
        return [REWARDS[i] for i in kept]

    plain = shadow(tmp_path, trainer_kwargs={"rollout_func": replay, "reward_funcs": [kept_reward]}, **by_gradient)
    assert step_logs(pods)[0]["loss"] == pytest.approx(step_logs(plain)[0]["loss"], abs=1e-6)
    for name, weight in weights(pods).items():
        assert torch.allclose(weight, weights(plain)[name], atol=1e-6), name
    assert not torch.allclose(weights(pods)["lm_head.weight"], make_model().lm_head.weight, atol=1e-3)
