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


@pytest.mark.parametrize("selection_matters_for", ["width", "rows"])
def test_no_forward_pass_sees_a_dropped_rollout(tmp_path, engine, selection_matters_for):
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
    assert only_log(trainer)["time/score"] > 0


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
            trainer_kwargs={"rollout_func": None, "reward_funcs": [number_of_distinct_words]},
        )
        assert trainer.vllm_generation.generated == [(8, 8)]  # 8 rows, in groups of 8
        assert trainer.vllm_generation.synced == 1
        assert trainer.num_generations == 4
    assert [built["max_num_seqs"] for built in engine.built] == [8, 8]
    assert engine.built[0]["gpu_memory_utilization"] == 0.4


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_sampling_log_probs_follow_their_rows(tmp_path, engine, mode):
    # Before 1.11 TRL itself cannot take a token without a log-prob.
    knows_none = Version(trl.__version__) >= Version("1.11")

    def logprobs(index):
        return None if index == 4 and knows_none else -0.01 * (index + 1)

    groups = [Group(F1.rewards, F1.lengths, logprob=logprobs)]
    settings = {"num_generations": 4, "per_device_train_batch_size": 4, "use_vllm": True, "vllm_mode": "colocate"}
    settings |= {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 2.0}
    seen = []

    class Spy(PODSGRPOTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs)
            return super()._compute_loss(model, inputs)

    pods = train(tmp_path / "pods", Script(groups), Spy, num_rollouts=8, **settings)
    shadow = train(tmp_path / "shadow", Script(groups, only={0: [0, 1, 4, 5]}), GRPOTrainer, GRPOConfig, **settings)
    first_token = sorted(seen[0]["sampling_per_token_logps"][:, 0].nan_to_num(nan=9.0).tolist())
    assert first_token == pytest.approx([-0.06, -0.02, -0.01, 9.0] if knows_none else [-0.06, -0.05, -0.02, -0.01])
    assert math.isfinite(only_log(pods)["loss"])
    assert only_log(pods)["loss"] == only_log(shadow)["loss"]


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


def test_generation_of_an_unknown_shape_is_refused_loudly(tmp_path):
    class OtherGeneration(GRPOTrainer):
        def _generate(self, prompts):
            outputs = super()._generate(prompts)
            return (*outputs[:1], outputs[1][:-1], *outputs[2:])

    class OtherPODS(PODSMixin, OtherGeneration):
        pass

    def constant(prompts, **kwargs):
        return [0.0] * len(prompts)

    with pytest.raises(RuntimeError, match="`completion_ids` has 7 entries for 8 rollouts"):
        train(tmp_path, Script([F1]), OtherPODS, trainer_kwargs={"reward_funcs": [constant]}, **N8_M4)


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


def test_chunks_are_refused_where_image_tensors_would_have_to_be_cut(tmp_path):
    class VisionLanguage(GRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._is_vlm = True

    class VisionLanguagePODS(PODSMixin, VisionLanguage):
        pass

    with pytest.raises(NotImplementedError, match="rollout_chunk_size=2 cannot be had with a vision-language model"):
        make_trainer(tmp_path, Script([F1]), VisionLanguagePODS, rollout_chunk_size=2, **N8_M4)


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
