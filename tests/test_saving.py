"""Adapters, saved models, model card."""

import re

import pytest
import torch
from peft import LoraConfig, PeftModel
from rig import F1, N8_M4, Script, make_config, make_model, make_trainer, only_log, train, weights
from transformers import Qwen2ForCausalLM
from trl import GRPOTrainer

from trl_pods import PODSGRPOTrainer, PODSMixin


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora(tmp_path, beta, gradient_checkpointing):
    def run(learning_rate):
        return train(
            tmp_path,
            Script([F1]),
            trainer_kwargs={"peft_config": LoraConfig(r=4, target_modules="all-linear")},
            beta=beta,
            gradient_checkpointing=gradient_checkpointing,
            learning_rate=learning_rate,
            **N8_M4,
        )

    assert only_log(run(0.0))["loss"] == pytest.approx(-0.19124, abs=1e-5)  # the KL is 0 at step one
    trainer = run(1e-2)
    changed = {name for name, weight in weights(trainer).items() if "lora_B" in name and weight.any()}
    assert changed
    base = dict(make_model().named_parameters())
    for name, weight in weights(trainer).items():
        if "lora" not in name:
            assert torch.equal(weight, base[name.removeprefix("base_model.model.").replace(".base_layer", "")]), name
    trainer.save_model(str(tmp_path / "saved"))
    reloaded = PeftModel.from_pretrained(make_model(), tmp_path / "saved")
    tokens = torch.tensor([[5, 6, 7]])
    ours = logits(trainer.model.get_base_model(), tokens)
    assert torch.equal(logits(reloaded.get_base_model(), tokens), ours)
    assert not torch.allclose(logits(make_model(), tokens), ours, atol=1e-3)
    assert torch.allclose(logits(reloaded.merge_and_unload(), tokens), ours, atol=1e-5)
    # In place, as for an export at the end of a run.
    assert torch.allclose(logits(trainer.model.merge_and_unload(), tokens), ours, atol=1e-5)


def logits(model, tokens):
    # TRL replaces `forward` of the model that it trains by one for log-probs.
    with torch.no_grad():
        return model.lm_head(model.eval().model(tokens).last_hidden_state)


def test_a_saved_model_loads_and_the_card_names_pods_and_grpo(tmp_path):
    trainer = train(
        tmp_path, Script([F1]), learning_rate=1e-2, selector=lambda r, m: torch.tensor([[0, 1, 4, 5]]), **N8_M4
    )
    trainer.save_model()
    assert torch.equal(Qwen2ForCausalLM.from_pretrained(tmp_path).lm_head.weight, trainer.model.lm_head.weight)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert "PODS" in card
    assert "2504.13818" in card
    assert "xu2025not" in card
    assert "shao2024deepseekmath" in card
    assert "- pods" in card
    assert "- grpo" in card


class Mine(GRPOTrainer):
    _tag_names = ["trl", "mine"]
    _name = "Mine"
    _paper = {"title": "Of mine", "id": "1234.56789", "citation": "@misc{mine}"}


MyPODS = type("MyPODS", (PODSMixin, Mine), {})


@pytest.mark.parametrize(
    ("trainer_class", "num_rollouts", "tags", "name", "paper"),
    [
        (PODSGRPOTrainer, 8, ["grpo", "pods", "trl"], "PODS", "2504.13818"),
        (PODSGRPOTrainer, 4, ["grpo", "trl"], "GRPO", "2402.03300"),
        (MyPODS, 8, ["mine", "pods", "trl"], "PODS", "2504.13818"),
        (MyPODS, None, ["mine", "trl"], "Mine", "1234.56789"),
    ],
)
def test_a_card_names_pods_where_it_was_used(tmp_path, trainer_class, num_rollouts, tags, name, paper):
    settings = N8_M4 | {"num_rollouts": num_rollouts}
    trainer = make_trainer(tmp_path, Script([F1]), trainer_class, **settings)
    assert sorted(trainer.model.model_tags) == tags
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert sorted(re.findall(r"^- (grpo|mine|pods|trl)$", card, flags=re.MULTILINE)) == tags
    assert f"This model was trained with {name}, a method introduced in" in card
    assert re.findall(r"arxiv.org/abs/([\d.]+)|huggingface.co/papers/([\d.]+)", card) == [("", paper)]


def test_a_trainer_needs_no_down_sampling_settings_to_be_pickled_with(tmp_path):
    config = make_config(tmp_path, selector=lambda r, m: None, num_generations=2, per_device_train_batch_size=2)
    torch.save(config, tmp_path / "training_args.bin")
    assert "lambda" in torch.load(tmp_path / "training_args.bin", weights_only=False).selector
