"""Micro-batches are no wider than their longest row, and the results stay what they are."""

from types import SimpleNamespace

import pytest
import torch
from peft import PromptTuningConfig
from rig import F1, ForwardCounter, Group, Script, make_model, make_trainer, step_logs, weights
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Phi3Config

from trl_pods import padding
from trl_pods.padding import PaddingCutter


LLAMA = SimpleNamespace(config=LlamaConfig())


def make_batch(prompts=(1, 3), completions=(4, 2), prompt_width=4, completion_width=6, **fields):
    """Two rows of so many tokens, 5 and up, and padding of 0."""
    ids = torch.arange(5, 5 + prompt_width).repeat(2, 1), torch.arange(15, 15 + completion_width).repeat(2, 1)
    prompt_mask = torch.tensor([[0] * (prompt_width - tokens) + [1] * tokens for tokens in prompts])
    completion_mask = torch.tensor([[1] * tokens + [0] * (completion_width - tokens) for tokens in completions])
    return {
        "prompt_ids": ids[0] * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": ids[1] * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([-1.0, 1.0]),
        "num_items_in_batch": torch.tensor(6),
    } | fields


def widths(batch, model=LLAMA, **settings):
    cut = PaddingCutter(model, pad_token_id=0, **settings).cut(batch)
    return cut["prompt_ids"].shape[1], cut["completion_ids"].shape[1]


def test_every_field_is_cut_to_the_longest_row():
    per_token = torch.arange(12.0).view(2, 6)
    kinds = torch.arange(20).view(2, 10)  # of prompts and completions
    ratio = torch.tensor([[0.5, 0.5, 2, 2, 1, 1], [0.7, 0.7, 1, 1, 1, 1]])
    batch = make_batch(
        old_per_token_logps=per_token,
        ref_per_token_logps=per_token,
        sampling_per_token_logps=per_token,
        tool_mask=torch.ones(2, 6, dtype=torch.long),
        importance_sampling_ratio=ratio,
        token_type_ids=kinds,
        mm_token_type_ids=kinds,
        pixel_values=torch.zeros(7, 6),
        num_images=[1, 0],
    )
    before = dict(batch)
    cut = PaddingCutter(LLAMA, pad_token_id=0, full_precision=True).cut(batch)
    assert cut["completion_ids"].tolist() == [[15, 16, 17, 18], [15, 16, 0, 0]]
    assert cut["completion_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    for name in ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps"):
        assert cut[name].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]], name
    assert cut["importance_sampling_ratio"].tolist() == ratio[:, :4].tolist()
    assert cut["tool_mask"].shape == (2, 4)
    for name in ("token_type_ids", "mm_token_type_ids"):
        assert cut[name].tolist() == [list(range(8)), list(range(10, 18))], name
    for name in ("prompt_ids", "prompt_mask", "pixel_values", "num_images", "advantages", "num_items_in_batch"):
        assert cut[name] is batch[name] or torch.equal(cut[name], batch[name]), name
    assert all(batch[name] is value for name, value in before.items())


def test_prompts_are_cut_on_the_left_but_not_where_pictures_stand_in_them():
    cut = PaddingCutter(LLAMA, pad_token_id=0).cut(make_batch())
    assert cut["prompt_ids"].tolist() == [[0, 0, 8], [6, 7, 8]]
    assert cut["prompt_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert widths(make_batch(pixel_values=torch.zeros(2, 3))) == (4, 4)


@pytest.mark.parametrize("name", ["old_per_token_logps", "ref_per_token_logps"])
def test_in_half_precision_nothing_is_cut_beside_log_probs_of_the_whole_width(name):
    batch = make_batch(**{name: torch.zeros(2, 6)})
    assert widths(batch) == (4, 6)
    assert widths(batch, full_precision=True) == (3, 4)
    assert widths(make_batch(sampling_per_token_logps=torch.zeros(2, 6))) == (3, 4)  # an engine pads nothing


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (make_batch(prompts=(4, 3), completions=(6, 1)), (4, 6)),
        (make_batch(completions=(1, 1)), (3, 2)),  # a width of 1 has another meaning for TRL
        (make_batch(completions=(0, 2), completion_ids=torch.tensor([[7] * 5 + [0], [7, 8, 0, 0, 0, 0]])), (3, 5)),
        (make_batch(importance_sampling_ratio=torch.tensor([[1.0], [0.9]])), (3, 4)),
        (make_batch(importance_sampling_ratio=torch.full((2, 6), 0.5)), (3, 6)),
        (make_batch(advantages=torch.zeros(2, 6)), (3, 4)),
        (make_batch(weight_of_each_token=torch.zeros(2, 6)), (4, 6)),
        (make_batch(weight_of_each_row=torch.zeros(2)), (3, 4)),
    ],
    ids=[
        "no padding",
        "one token",
        "masked tokens",
        "ratio by row",
        "ratio in padding",
        "advantages by token",
        "unknown field",
        "unknown field by row",
    ],
)
def test_what_is_needed_or_not_known_stays(batch, expected):
    assert widths(batch) == expected


def rope(kind):
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}


LONG = {"short_factor": [1.0] * 48, "long_factor": [1.0] * 48, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (SimpleNamespace(config=GPT2Config()), (4, 4)),  # learned positions, counted from the left end
        (SimpleNamespace(config=LlamaConfig(rope_parameters=rope("linear"))), (3, 4)),
        (SimpleNamespace(config=LlamaConfig(rope_parameters=rope("dynamic"))), (4, 6)),
        (SimpleNamespace(config=Phi3Config(rope_parameters=rope("longrope") | LONG)), (4, 6)),
        (SimpleNamespace(config=Gemma3TextConfig()), (3, 4)),
        (SimpleNamespace(config=SimpleNamespace(rope_theta=1e4, rope_scaling=None)), (3, 4)),
        (SimpleNamespace(config=SimpleNamespace(rope_scaling={"type": "dynamic"})), (4, 6)),
        (SimpleNamespace(config=LlamaConfig(), peft_config={"default": PromptTuningConfig()}), (4, 4)),
    ],
    ids=["gpt2", "linear", "dynamic", "longrope", "by layer", "transformers 4", "dynamic, 4", "virtual tokens"],
)
def test_what_is_cut_depends_on_how_positions_enter_the_model(model, expected):
    assert widths(make_batch(), model) == expected


def test_widths_stay_multiples():
    assert widths(make_batch(prompts=(1, 5), prompt_width=8, completion_width=12), multiple_of=4) == (8, 4)
    assert widths(make_batch(prompts=(1, 3), prompt_width=8, completion_width=12), multiple_of=4) == (4, 4)


# In training

SMALL_BATCHES = {
    "num_rollouts": 8,
    "num_generations": 4,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
}


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_each_micro_batch_is_as_wide_as_its_own_rows_in_every_iteration(tmp_path, num_iterations):
    trainer = make_trainer(
        tmp_path, Script([F1]), **SMALL_BATCHES, num_iterations=num_iterations, max_steps=num_iterations
    )
    counter = ForwardCounter(trainer.model)
    trainer.train()
    seen = [width for grad, _, width in counter.calls if grad]
    kept = [3 + length for length in (3, 5, 4, 6)]  # a prompt of 3 tokens
    assert [sorted(seen[i : i + 4]) for i in range(0, len(seen), 4)] == [sorted(kept)] * num_iterations


@pytest.mark.parametrize(
    ("settings", "prompts"),
    [({}, [3, 5]), ({"beta": 0.1}, [3, 5]), ({"bf16": True}, [3, 5]), ({"beta": 0.1, "bf16": True}, [5, 5])],
    ids=str,
)
def test_prompts_of_other_lengths_do_not_widen_a_micro_batch(tmp_path, settings, prompts):
    make_model().save_pretrained(tmp_path / "reference")
    model = make_model()
    model.config._name_or_path = str(tmp_path / "reference")
    script = Script([Group([0, 1, 0.4, 0.6], [2, 2, 2, 2]), Group([0, 1, 0.4, 0.6], [2, 2, 2, 2])])
    dataset = script.dataset().remove_columns("prompt").add_column("prompt", ["w10 w3 w4", "w11 w3 w4 w5 w6"])
    trainer = make_trainer(
        tmp_path,
        script,
        model=model,
        num_rollouts=4,
        num_generations=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        **settings,
        trainer_kwargs={"train_dataset": dataset},
    )
    counter = ForwardCounter(trainer.model)
    trainer.train()
    seen = sorted(width for grad, _, width in counter.calls if grad)
    assert seen == sorted(2 + width for width in prompts * 2)


def test_without_down_sampling_every_micro_batch_keeps_the_width_of_the_round(tmp_path):
    script = Script([Group([0, 1, 0.4, 0.6], [2, 7, 3, 4])])
    trainer = make_trainer(tmp_path, script, **(SMALL_BATCHES | {"num_rollouts": 4}))
    counter = ForwardCounter(trainer.model)
    trainer.train()
    assert counter.widths() == {3 + 7}


MASKED = [
    Group(F1.rewards, F1.lengths, masks=[1, 2, 0, 1, 2, 3, 0, 1]),
    Group([1, 0, 1, 0, 1, 1, 1, 1], [8, 7, 6, 5, 4, 3, 2, 3], masks=[2, 0, 1, 1, 0, 2, 1, 1]),
]


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "beta": 0.1},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo", "num_iterations": 2},
        {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.1, "num_iterations": 2},
        {"loss_type": "sapo"},
        {"loss_type": "vespo", "num_iterations": 2},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"top_entropy_quantile": 0.5},
        {"mask_truncated_completions": True},
        {"pad_to_multiple_of": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_batches_that_are_not_cut(tmp_path, settings, monkeypatch):
    make_model().save_pretrained(tmp_path / "reference")

    def run(name):
        model = make_model(seed=1)
        model.config._name_or_path = str(tmp_path / "reference")
        trainer = make_trainer(
            tmp_path / name,
            Script(MASKED),
            model=model,
            **{
                "num_rollouts": 8,
                "num_generations": 4,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": 4,
                "optim": "sgd",  # Adam would divide gradients that are zero but for rounding by their size
                "learning_rate": 0.1,
                "max_steps": 2,
            }
            | settings,
        )
        counter = ForwardCounter(trainer.model)
        trainer.train()
        return trainer, {width for grad, _, width in counter.calls if grad}

    cut, narrow = run("cut")
    monkeypatch.setattr(padding.PaddingCutter, "cut", lambda self, batch: batch)
    whole, wide = run("whole")
    assert min(narrow) < min(wide)
    for ours, theirs in zip(step_logs(cut), step_logs(whole), strict=True):
        ours, theirs = ({k: v for k, v in logs.items() if "time" not in k} for logs in (ours, theirs))
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        assert ours["grad_norm"] > 0
    for (name, ours), theirs in zip(weights(cut).items(), weights(whole).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)
    start = make_model(seed=1).parameters()
    assert any((ours - before).abs().max() > 1e-4 for ours, before in zip(weights(cut).values(), start, strict=True))
