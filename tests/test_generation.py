"""Generation: engines, `rollout_func`, parts of a round, and shapes that are not known."""

import math

import pytest
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from rig import (
    EOS,
    F1,
    FIRST_WORD,
    LOGGED,
    N4_M2,
    N8_M4,
    ForwardCounter,
    Group,
    Script,
    kept_rows,
    make_model,
    make_tokenizer,
    make_trainer,
    number_of_distinct_words,
    only_log,
    read_table,
    train,
    weights,
)
from transformers import Qwen2ForSequenceClassification
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOTrainer, PODSMixin


class EngineStub:
    """Stands for TRL's vLLM engine: records how it is built and called."""

    built: list[dict] = []

    def __init__(self, **kwargs):
        self.kwargs, self.generated, self.synced = kwargs, [], 0
        EngineStub.built.append(kwargs)

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images, num_generations, profiler=None):
        self.generated.append((len(prompts), num_generations))
        completions = [[5 + i % 7, 6, EOS] for i in range(len(prompts))]
        return prompts, completions, [[[-0.1]] * 3 for _ in completions], None


@pytest.fixture
def engine(monkeypatch):
    EngineStub.built = []
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", EngineStub)
    return EngineStub


def test_no_forward_pass_sees_a_dropped_rollout(tmp_path, engine):
    make_model().save_pretrained(tmp_path / "reference")
    # One dropped rollout has 8 tokens; the kept ones, 0.0 and 1.0, at most 5.
    rewards, lengths = [0.0, 1.0, 0.0, 1.0] + [0.5] * 12, [3, 5, 4, 2] + [8] + [6] * 11
    script = Script([Group(rewards, lengths)])
    model = make_model()
    model.config._name_or_path = str(tmp_path / "reference")
    trainer = make_trainer(
        tmp_path,
        script,
        model=model,
        num_rollouts=16,
        num_generations=4,
        per_device_train_batch_size=4,
        beta=0.1,
        use_vllm=True,
        vllm_mode="colocate",
    )
    policy, reference = ForwardCounter(trainer.model), ForwardCounter(trainer.ref_model)
    trainer.train()
    assert policy.rows(with_grad=True) == [4]
    assert policy.rows(with_grad=False) == [4]  # old log-probs, for the importance-sampling correction
    assert reference.rows(with_grad=False) == [4]
    assert policy.widths() == reference.widths() == {3 + 5}  # prompt and the longest kept completion
    for phase in ("generate", "reward", "select", "score", "update"):
        assert only_log(trainer)[f"time/{phase}"] > 0, phase


def test_the_engine_is_sized_for_all_rollouts_and_called_once_a_round(tmp_path, engine):
    for b, a in ((4, 1), (1, 4)):
        script = Script([F1])
        trainer = train(
            tmp_path,
            script,
            num_rollouts=8,
            num_generations=4,
            per_device_train_batch_size=b,
            gradient_accumulation_steps=a,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.4,
            vllm_max_model_length=96,
            vllm_enable_sleep_mode=True,
            vllm_tensor_parallel_size=1,
            trainer_kwargs={"rollout_func": None, "reward_funcs": [number_of_distinct_words]},
        )
        assert trainer.vllm_generation.generated == [(8, 8)]  # 8 rows, in groups of 8
        assert trainer.vllm_generation.synced == 1
        assert trainer.num_generations == 4
    given = {
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.4,
        "max_model_length": 96,
        "enable_sleep_mode": True,
        "tensor_parallel_size": 1,
    }
    assert [{name: built[name] for name in given} for built in engine.built] == [given, given]


CLIP_MAX = 0.008  # about what tokens of a random model get, so that some are above
SAMPLED_BY_VLLM = {
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_clip_max": CLIP_MAX,
}
NO_LOGPROB = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.11"), reason="before 1.11 TRL itself takes no token without a log-prob"
)


class SpyOnTheLoss(PODSGRPOTrainer):
    def _compute_loss(self, model, inputs):
        self.trained_on = inputs
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(("kept", "max_num_seqs"), [(1024, 4096), (2048, 4096), (8192, 8192)])
def test_the_engine_is_not_sized_beyond_what_vllm_takes(tmp_path, engine, kept, max_num_seqs):
    # TRL gives a step of the engine 4096 tokens; more sequences than that are an error, unless TRL itself asks for it.
    settings = {"num_rollouts": 16, "num_generations": 4, "per_device_train_batch_size": kept}
    make_trainer(tmp_path, Script([F1]), use_vllm=True, vllm_mode="colocate", **settings)
    assert [built["max_num_seqs"] for built in engine.built] == [max_num_seqs]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off"])
@pytest.mark.parametrize("missing", [pytest.param(True, marks=NO_LOGPROB), False])
def test_sampling_log_probs_follow_their_rows(tmp_path, engine, mode, missing):
    # Every token of row i was sampled with -0.01 * (i + 1); with `missing`, one token of row 4 has no log-prob.
    def logprobs(row):
        values = [-0.01 * (row + 1)] * F1.lengths[row]
        return [values[0], None, *values[2:]] if missing and row == 4 else values

    groups = [Group(F1.rewards, F1.lengths, logprob=logprobs)]
    correction = {"vllm_importance_sampling_mode": mode}
    settings = SAMPLED_BY_VLLM | (correction if mode != "off" else {"vllm_importance_sampling_correction": False})
    pods = train(tmp_path / "pods", Script(groups), SpyOnTheLoss, num_rollouts=8, **settings)
    shadow = train(tmp_path / "shadow", Script(groups, only={0: [0, 1, 4, 5]}), GRPOTrainer, GRPOConfig, **settings)

    inputs = pods.trained_on
    rows = (inputs["completion_ids"][:, 0] - FIRST_WORD) // 7
    assert sorted(rows.tolist()) == [0, 1, 4, 5]
    assert inputs["sampling_per_token_logps"][:, 0].tolist() == pytest.approx((-0.01 * (rows + 1)).tolist())
    if mode == "off":
        assert "importance_sampling_ratio" not in inputs
        assert only_log(pods)["loss"] == pytest.approx(-0.19124, abs=1e-5)
    else:
        expected = ratios(inputs, missing, sequences="sequence" in mode, mask="mask" in mode)
        assert inputs["importance_sampling_ratio"].shape == expected.shape
        assert torch.allclose(inputs["importance_sampling_ratio"], expected)
    assert math.isfinite(only_log(pods)["loss"])
    for key in ("loss", "grad_norm", *(k for k in only_log(shadow) if k.startswith("sampling/"))):
        assert only_log(pods)[key] == only_log(shadow)[key], key


def ratios(inputs, missing, sequences, mask):
    """Importance-sampling ratios row by row; a token without a log-prob is neutral."""
    rows = (inputs["completion_ids"][:, 0] - FIRST_WORD) // 7
    difference = (inputs["old_per_token_logps"] + 0.01 * (rows[:, None] + 1)) * inputs["completion_mask"]
    if missing:
        difference[rows == 4, 1] = 0
    ratio = (difference.sum(dim=1, keepdim=True) if sequences else difference).exp()
    return ratio.masked_fill(ratio > CLIP_MAX, 0) if mask else ratio.clamp(max=CLIP_MAX)


def test_masks_of_a_rollout_func_follow_their_rows(tmp_path):
    group = Group([0, 1, 0.4, 0.6], [4, 6, 5, 3], masks=[1, 2, 2, 0])
    assert only_log(train(tmp_path, Script([group]), **N4_M2))["loss"] == pytest.approx(-0.10100, abs=1e-5)


@pytest.mark.parametrize("as_batch", [False, True])
def test_a_rollout_func_may_return_tensors(tmp_path, as_batch):
    script = Script([Group([0, 1, 0.4, 0.6], [4] * 4, ends=[False, True, True, True])])

    def rollout_func(prompts, trainer):
        output = script.rollout_func(prompts, trainer)
        for key in ("prompt_ids", "completion_ids", "logprobs"):
            tensors = [torch.tensor(values) for values in output[key]]
            output[key] = torch.stack(tensors) if as_batch else tensors
        return output

    trainer = train(
        tmp_path,
        script,
        trainer_kwargs={"rollout_func": rollout_func},
        mask_truncated_completions=True,
        **N4_M2,
        **LOGGED,
    )
    assert only_log(trainer)["pods/ineligible"] == 0.25
    assert kept_rows(trainer) == [1, 2]


@pytest.mark.parametrize("num_rollouts", [None, 4])
@pytest.mark.parametrize("name", ["prompt_ids", "completion_ids", "logprobs"])
def test_a_rollout_func_that_returns_too_few_rows_is_named(tmp_path, num_rollouts, name):
    script = Script([Group([0, 1, 0.4, 0.6])] * 2)

    def rollout_func(prompts, trainer):
        output = script.rollout_func(prompts, trainer)
        return {**output, name: output[name][1:]}

    settings = {"num_rollouts": num_rollouts, "num_generations": 2, "per_device_train_batch_size": 4}
    num_prompts = 4 if num_rollouts is None else 8
    with pytest.raises(
        RuntimeError, match=f"rollout_func returned {num_prompts - 1} `{name}` for {num_prompts} prompts"
    ):
        train(tmp_path, script, trainer_kwargs={"rollout_func": rollout_func}, **settings)


def test_rollouts_of_a_prompt_share_no_objects(tmp_path):
    lengths = []

    def converse(prompts, trainer):
        for prompt in prompts:
            prompt.append({"role": "assistant", "content": "w9"})
            lengths.append(len(prompt))
        return {
            "prompt_ids": [[5, 6]] * len(prompts),
            "completion_ids": [[7, EOS]] * len(prompts),
            "logprobs": [[-0.1, -0.1]] * len(prompts),
        }

    def note(completions, notes, **kwargs):
        for i, row_notes in enumerate(notes):
            row_notes.append(i)
        assert [len(row_notes) for row_notes in notes] == [2] * len(completions)
        return [float(i) for i in range(len(completions))]

    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "w5"}]], "notes": [[7]]})
    train(
        tmp_path,
        Script([Group([0] * 4)]),
        trainer_kwargs={"rollout_func": converse, "reward_funcs": [note], "train_dataset": dataset},
        **N4_M2,
    )
    assert lengths == [2, 2, 2, 2]


# What a later TRL, or a subclass, may add by row


class ShortColumn(GRPOTrainer):
    def _generate(self, prompts):
        outputs = super()._generate(prompts)
        return (*outputs[:1], outputs[1][:-1], *outputs[2:])


class NinthValue(GRPOTrainer):
    def _generate(self, prompts):
        return (*super()._generate(prompts), [0] * len(prompts))


class UnknownAttribute(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        self._budgets = [len(row) for row in inputs]
        return super()._generate_and_score_completions(inputs)


class UnknownTensor(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        values = torch.arange(len(inputs))
        return super()._generate_and_score_completions(inputs) | {"difficulty": values}


class UnknownList(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        values = list(range(len(inputs)))
        return super()._generate_and_score_completions(inputs) | {"difficulty": values}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ShortColumn, "`completion_ids` has 7 entries for 8 rollouts"),
        (NinthValue, "returns 9 values; trl_pods knows 8"),
        (UnknownAttribute, "`_budgets` of the trainer holds one entry for each of the 8 rollouts"),
        (UnknownTensor, "`difficulty` has 8 entries for 4 kept rollouts"),
        (UnknownList, "`difficulty` has 8 entries for 4 kept rollouts"),
    ],
)
def test_what_is_kept_by_row_in_an_unknown_way_is_refused_loudly(tmp_path, other, message):
    def constant(prompts, **kwargs):
        return [0.0] * len(prompts)

    pods = type("OtherPODS", (PODSMixin, other), {})
    with pytest.raises(RuntimeError, match=message):
        train(tmp_path, Script([F1]), pods, trainer_kwargs={"reward_funcs": [constant]}, **N8_M4)


def test_what_is_computed_by_row_of_the_kept_rollouts_follows_them(tmp_path):
    class Own(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self.rows_of_the_round = inputs  # shrinks with the rows
            output = super()._generate_and_score_completions(inputs)
            lengths = output["completion_mask"].sum(dim=1)
            return output | {"own_tensor": lengths, "own_list": lengths.tolist(), "own_number": torch.tensor(7)}

    trainer = train(tmp_path, Script([F1]), type("OwnPODS", (SpyOnTheLoss, Own), {}), **N8_M4)
    inputs = trainer.trained_on
    assert inputs["own_tensor"].tolist() == inputs["own_list"] == inputs["completion_mask"].sum(dim=1).tolist()
    assert sorted(inputs["own_list"]) == [3, 4, 5, 6]
    assert [row["rollout"] for row in trainer.rows_of_the_round] == [0, 1, 4, 5]


# Rollouts in parts


def count_generated_rows(trainer):
    rows, generate = [], trainer.model.generate

    def counting(input_ids, **kwargs):
        rows.append(len(input_ids))
        return generate(input_ids=input_ids, **kwargs)

    trainer.model.generate = counting
    return rows


@pytest.mark.parametrize("num_rollouts", [12, 4])
def test_generation_in_chunks_gives_the_same_without_sampling(tmp_path, num_rollouts):
    def run(chunk_size):
        script = Script([F1, F1])
        trainer = make_trainer(
            tmp_path,
            script,
            num_rollouts=num_rollouts,
            num_generations=4,
            per_device_train_batch_size=8,
            rollout_chunk_size=chunk_size,
            top_k=1,
            max_steps=2,
            learning_rate=1e-2,
            trainer_kwargs={"rollout_func": None, "reward_funcs": [by_position]},
        )
        rows = count_generated_rows(trainer)
        trainer.train()
        return trainer, rows

    whole, whole_rows = run(None)
    parts, parts_rows = run(5)
    num_rows = 2 * num_rollouts
    assert whole_rows == [num_rows] * 2
    assert parts_rows == ([5] * (num_rows // 5) + [num_rows % 5]) * 2
    for name, weight in weights(parts).items():
        assert torch.allclose(weight, weights(whole)[name], atol=1e-6), name


def by_position(completions, **kwargs):
    return [float(i % 3) for i in range(len(completions))]


def test_a_reward_model_scores_in_chunks(tmp_path):
    config = make_model().config
    config.num_labels = 1
    torch.manual_seed(0)
    reward_model = Qwen2ForSequenceClassification(config)

    def run(chunk_size):
        counter = ForwardCounter(reward_model)
        trainer = train(
            tmp_path,
            Script([F1]),
            rollout_chunk_size=chunk_size,
            trainer_kwargs={"reward_funcs": [reward_model], "reward_processing_classes": [make_tokenizer()]},
            **N8_M4,
            **LOGGED,
        )
        return [rows for _, rows, _ in counter.calls], read_table(trainer)

    whole_rows, whole = run(None)
    parts_rows, parts = run(3)
    assert whole_rows == [8]
    assert parts_rows == [3, 3, 2]
    (name,) = set(whole.columns) - {"step", "prompt", "completion", "kept", "advantage"}
    assert parts[name].tolist() == pytest.approx(whole[name].tolist(), abs=1e-6)
    assert whole[name].nunique() > 1
