"""
Behaviour of PODSGRPOTrainer in one process, on prescribed rollouts.

Expected losses are exact: with learning rate 0 every step is on-policy, so the dapo loss is
- sum(A_i L_i) / sum(L_i) over the kept rows, whatever the model.
"""

import dataclasses
import math

import pandas as pd
import pytest
import torch
import trl
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig, PeftModel
from rig import (
    EOS,
    F1,
    LOGGED,
    N8_M4,
    VOCABULARY,
    ForwardCounter,
    Group,
    Script,
    assert_equal_weights,
    kept_rows,
    make_config,
    make_model,
    make_tokenizer,
    make_trainer,
    read_table,
    step_logs,
    train,
    weights,
)
from transformers import (
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer, PODSMixin
from trl_pods.reward_statistics import advantages_over_all


N4_M2 = {"num_rollouts": 4, "num_generations": 2, "per_device_train_batch_size": 2}
NAN, INF = float("nan"), float("inf")


def only_log(trainer):
    (logs,) = step_logs(trainer)
    return logs


# The loss


@pytest.mark.parametrize("batching", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}])
@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({"loss_type": "dapo"}, -0.19124),
        ({"loss_type": "grpo"}, 0.0),
        ({"loss_type": "dr_grpo"}, -0.10757),
        ({"loss_type": "dapo", "scale_rewards": "none"}, -0.10),
        ({"loss_type": "dapo", "scale_rewards": "batch"}, -0.19124),  # one group is the batch
        ({"loss_type": "dapo", "advantage_statistics": "all"}, -0.25346),
    ],
)
def test_f1_loss(tmp_path, settings, batching, loss):
    trainer = train(tmp_path, Script([F1]), **(N8_M4 | batching), **settings)
    assert only_log(trainer)["loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({"loss_type": "bnpo"}, -0.19124),
        ({"loss_type": "sapo"}, -0.04098),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, -0.86056),
    ],
)
def test_f1_loss_of_types_that_depend_on_the_slices(tmp_path, settings, loss):
    trainer = train(tmp_path, Script([F1]), **N8_M4, **settings)
    assert only_log(trainer)["loss"] == pytest.approx(loss, abs=1e-5)


def test_statistics_over_all_give_the_ablation_of_the_paper(tmp_path):
    trainer = train(tmp_path, Script([F1]), advantage_statistics="all", **N8_M4, **LOGGED)
    mean, std = 0.5125, 0.345119
    expected = [(reward - mean) / (std + 1e-4) for reward in (0.1, 0.9, 0.0, 1.0)]
    assert read_table(trainer)["advantage"].dropna().tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_statistics_over_all_are_trls_own_formula(tmp_path, scale_rewards):
    # With all rollouts kept, "all" must give what TRL computes; the function is called as with n > m.
    groups = [Group([0.1, 0.9, 0.5, None]), Group([1, 1, 0, 0.25])]
    trainer = train(
        tmp_path,
        Script(groups),
        GRPOTrainer,
        GRPOConfig,
        scale_rewards=scale_rewards,
        num_generations=4,
        per_device_train_batch_size=8,
        **LOGGED,
    )
    rewards = torch.tensor([[NAN if r is None else r] for group in groups for r in group.rewards])
    ours = advantages_over_all(rewards, torch.ones(1), 4, scale_rewards)
    assert ours.tolist() == read_table(trainer)["advantage"].tolist()


def test_several_optimizer_steps_from_one_round(tmp_path):
    def losses(accumulation):
        script = Script([F1])
        trainer = train(
            tmp_path,
            script,
            num_rollouts=8,
            num_generations=4,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=4,
            max_steps=4 // accumulation,
        )
        assert script.rounds == 1
        return [logs["loss"] for logs in step_logs(trainer)]

    assert sorted(losses(1)) == pytest.approx([-1.27491, -0.84994, 0.50996, 0.84994], abs=1e-5)
    assert sum(losses(2)) / 2 == pytest.approx(-0.19124, abs=1e-5)
    assert losses(4) == pytest.approx([-0.19124], abs=1e-5)


# The shadow: plain GRPO that is given the kept rollouts alone must train alike


SHADOW_GROUPS = [
    F1,
    Group([0, 0, 0, 0, 0, 0, 0.1, 1], [2, 8, 3, 4, 5, 6, 7, 8]),
    Group([1, 0, 1, 0, 1, 1, 1, 1], [8, 7, 6, 5, 4, 3, 2, 3], ends=[False] + [True] * 7),
    Group([0.5] * 8, [4, 5, 6, 2, 3, 4, 5, 6]),
]
SHADOW_KEPT = {0: [0, 1, 4, 5], 1: [0, 1, 2, 7], 2: [0, 1, 2, 3], 3: [0, 1, 2, 3]}


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "scale_rewards": "batch"},
        {"loss_type": "bnpo", "scale_rewards": "none"},
        {"loss_type": "dr_grpo", "num_iterations": 2},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"beta": 0.1},
        {"steps_per_generation": 4, "per_device_train_batch_size": 2},
        {"top_entropy_quantile": 0.5},
        {"mask_truncated_completions": True},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"delta": 2.0, "num_iterations": 2},
        {"entropy_coef": 0.05},
        {"use_adaptive_entropy": True, "entropy_target": 9.0, "entropy_coef": 0.01},
        {"off_policy_mask_threshold": 0.01, "num_iterations": 2},
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2},
        {"reward_weights": [-2.0]},
        {"gradient_checkpointing": True},
        {"pad_to_multiple_of": 8},
    ],
    ids=str,
)
def test_training_equals_plain_grpo_on_the_kept_rollouts(tmp_path, settings):
    missing = set(settings) - {field.name for field in dataclasses.fields(GRPOConfig)}
    if missing:
        pytest.skip(f"trl {trl.__version__} has no {missing}")
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_steps": 6,
    } | settings
    if "beta" in settings:
        make_model().save_pretrained(tmp_path / "reference")
        settings["model_init_kwargs"] = {}
    kept = SHADOW_KEPT | ({2: [1, 2, 3, 4]} if settings.get("mask_truncated_completions") else {})

    def run(name, script, trainer_class, config_class, **extra):
        model = make_model(seed=1)
        model.config._name_or_path = str(tmp_path / "reference")
        return train(tmp_path / name, script, trainer_class, config_class, model=model, **settings, **extra)

    pods = run("pods", Script(SHADOW_GROUPS), PODSGRPOTrainer, PODSGRPOConfig, num_rollouts=8)
    shadow = run("shadow", Script(SHADOW_GROUPS, only=kept), GRPOTrainer, GRPOConfig)
    for ours, theirs in zip(step_logs(pods), step_logs(shadow), strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours["grad_norm"] == theirs["grad_norm"]
        assert ours.get("kl") == theirs.get("kl")
        assert ours["entropy"] == theirs["entropy"]
    assert_equal_weights(pods, shadow)
    assert any(
        not torch.equal(a, b) for a, b in zip(weights(pods).values(), make_model(seed=1).parameters(), strict=True)
    )


def mixture_of_experts():
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        eos_token_id=EOS,
    )
    return Qwen2MoeForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "settings", "adapter", "logged"),
    [
        (make_model, {"beta": 0.1}, True, "kl"),
        (make_model, {"beta": 0.1, "num_iterations": 2, "gradient_checkpointing": True}, True, "kl"),
        (mixture_of_experts, {}, False, "aux_loss"),
    ],
)
def test_adapters_and_experts_train_as_plain_grpo_on_the_kept_rollouts(tmp_path, make, settings, adapter, logged):
    def run(name, script, trainer_class, config_class, **extra):
        adapter_config = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if adapter else {}
        return train(
            tmp_path / name,
            script,
            trainer_class,
            config_class,
            model=make(),
            trainer_kwargs=adapter_config,
            num_generations=4,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            max_steps=3,
            **settings,
            **extra,
        )

    pods = run("pods", Script(SHADOW_GROUPS), PODSGRPOTrainer, PODSGRPOConfig, num_rollouts=8)
    shadow = run("shadow", Script(SHADOW_GROUPS, only=SHADOW_KEPT), GRPOTrainer, GRPOConfig)
    for ours, theirs in zip(step_logs(pods), step_logs(shadow), strict=True):
        for key in ("loss", "grad_norm", logged):
            assert ours[key] == theirs[key], key
    assert step_logs(pods)[-1][logged] > 0
    assert_equal_weights(pods, shadow)


# n = m is plain GRPO


@pytest.mark.parametrize("num_iterations", [1, 2])
@pytest.mark.parametrize("num_rollouts", [None, 4])
def test_without_down_sampling_it_is_grpo_to_the_last_bit(tmp_path, num_rollouts, num_iterations):
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "num_iterations": num_iterations,
        "learning_rate": 1e-2,
        "max_steps": 6,
        "shuffle_dataset": True,
    }
    sampled = {"rollout_func": None, "reward_funcs": [number_of_distinct_words]}
    script = Script([F1, F1, F1])
    pods = train(
        tmp_path / "pods",
        script,
        trainer_kwargs=sampled.copy(),
        num_rollouts=num_rollouts,
        selector="random",
        **settings,
    )
    grpo = train(tmp_path / "grpo", script, GRPOTrainer, GRPOConfig, trainer_kwargs=sampled.copy(), **settings)
    ours, theirs = step_logs(pods), step_logs(grpo)
    assert len(ours) == len(theirs) == 6
    for ours_step, theirs_step in zip(ours, theirs, strict=True):
        assert set(ours_step) - set(theirs_step) <= {
            f"time/{p}" for p in ("generate", "reward", "select", "score", "update")
        }
        for key in set(theirs_step) - {"step_time"}:
            assert ours_step[key] == theirs_step[key], key
    assert_equal_weights(pods, grpo)


def number_of_distinct_words(completion_ids, **kwargs):
    return [float(len(set(ids))) for ids in completion_ids]


def test_a_plain_grpo_config_gives_plain_grpo(tmp_path):
    trainer = train(tmp_path, Script([F1]), config_class=GRPOConfig, num_generations=8, per_device_train_batch_size=8)
    assert only_log(trainer)["loss"] == pytest.approx(-0.14777, abs=1e-5)
    assert trainer.num_rollouts == 8


def test_no_config_at_all_means_what_it_means_for_grpo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Script([F1])

    def outcome(trainer_class):
        try:
            trainer = trainer_class(
                model=make_model(),
                reward_funcs=script.reward_functions(),
                train_dataset=script.dataset(),
                processing_class=make_tokenizer(),
            )
        except ValueError as error:  # TRL's default asks for bf16, which a machine without a GPU refuses
            return str(error)
        return trainer.num_generations, trainer.args.learning_rate

    assert outcome(PODSGRPOTrainer) == outcome(GRPOTrainer)


def test_the_mixin_adds_pods_to_a_subclass_of_grpo_trainer(tmp_path):
    class HalvedLoss(GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) / 2

    class HalvedPODS(PODSMixin, HalvedLoss):
        pass

    trainer = train(tmp_path, Script([F1]), HalvedPODS, **N8_M4)
    assert only_log(trainer)["loss"] == pytest.approx(-0.19124 / 2, abs=1e-5)


# What enters reward functions and the model


@pytest.mark.parametrize(("b", "a", "n", "m"), [(4, 1, 64, 4), (2, 2, 8, 2), (1, 4, 16, 4), (4, 1, 7, 4)])
def test_every_rollout_is_scored_once_and_the_model_sees_no_more_than_a_batch(tmp_path, b, a, n, m):
    num_groups = b * a // m
    script = Script([Group([i % 3 for i in range(n)]) for _ in range(num_groups)])
    trainer = make_trainer(
        tmp_path,
        script,
        num_rollouts=n,
        num_generations=m,
        per_device_train_batch_size=b,
        gradient_accumulation_steps=a,
    )
    counter = ForwardCounter(trainer.model)
    trainer.train()
    (call,) = script.calls
    assert sorted(call) == [(group, i) for group in range(num_groups) for i in range(n)]
    assert counter.rows(with_grad=True) == [b] * a
    assert counter.rows(with_grad=False) == []


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


@pytest.mark.parametrize(("kept", "max_num_seqs"), [(1024, 4096), (2048, 4096), (8192, 8192)])
def test_the_engine_is_not_sized_beyond_what_vllm_takes(tmp_path, engine, kept, max_num_seqs):
    # TRL gives a step of the engine 4096 tokens; more sequences than that are an error, unless TRL itself asks for it.
    settings = {"num_rollouts": 16, "num_generations": 4, "per_device_train_batch_size": kept}
    make_trainer(tmp_path, Script([F1]), use_vllm=True, vllm_mode="colocate", **settings)
    assert [built["max_num_seqs"] for built in engine.built] == [max_num_seqs]


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


# Steps and data


@pytest.mark.parametrize(("num_iterations", "num_steps"), [(1, 4), (2, 8)])
def test_an_epoch_has_as_many_steps_as_with_grpo(tmp_path, num_iterations, num_steps):
    script = Script([Group([0, 1, 0, 1, 0, 0, 1, 1])] * 8)
    trainer = train(
        tmp_path,
        script,
        num_rollouts=8,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_iterations=num_iterations,
        max_steps=-1,
        num_train_epochs=1,
    )
    assert [len(call) for call in script.calls] == [16] * 4
    assert sorted(row for call in script.calls for row in call) == [(p, i) for p in range(8) for i in range(8)]
    assert trainer.state.global_step == trainer.state.max_steps == num_steps
    assert trainer.state.epoch == 1.0


def test_streamed_data_keep_their_groups(tmp_path):
    script = Script([Group([0, 1, 0.2, 0.9])] * 7)
    stream = {"train_dataset": script.dataset().to_iterable_dataset()}
    settings = {"num_rollouts": 4, "num_generations": 2, "per_device_train_batch_size": 4}
    train(tmp_path, script, trainer_kwargs=stream, max_steps=4, dataloader_num_workers=2, **settings)
    rounds = [[number for number, _ in call] for call in script.calls]
    assert rounds == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4, [4] * 4 + [5] * 4, [0] * 4 + [1] * 4]
    with pytest.raises(ValueError, match="max_steps"):
        train(tmp_path, script, trainer_kwargs=stream, max_steps=-1, **settings)


@pytest.mark.parametrize("selector", ["max_variance", "random"])
def test_a_resumed_run_ends_with_the_weights_of_the_straight_run(tmp_path, selector):
    settings = {
        "num_rollouts": 4,
        "num_generations": 2,
        "per_device_train_batch_size": 1,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": -1,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 4,
        "selector": selector,
    }
    groups = [Group([0, 1, 0.5, 0.25], [2, 3, 4, 5])] * 6
    straight = train(tmp_path, Script(groups), **settings)
    assert straight.state.global_step == 12
    script = Script(groups)
    resumed = make_trainer(tmp_path, script, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [sorted({number for number, _ in call}) for call in script.calls] == [[2, 3], [4, 5]]
    assert_equal_weights(resumed, straight)


def test_the_random_rule_draws_anew_in_each_round_and_depends_on_the_seed(tmp_path):
    def drawn(seed, **settings):
        trainer = train(
            tmp_path, Script([F1]), selector="random", seed=seed, max_steps=6, **(N8_M4 | settings), **LOGGED
        )
        return [read_table(trainer, step)["kept"].tolist() for step in range(1, 7)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert len({tuple(row) for row in drawn(0)}) > 1
    # Two rounds in one optimizer step draw differently too.
    seen = []

    def rule(rewards, num_selected, generator):
        seen.append(generator.initial_seed())
        return torch.arange(num_selected)[None]

    script = Script([F1] * 4)
    train(tmp_path, script, selector=rule, gradient_accumulation_steps=2, steps_per_generation=1, max_steps=2, **N8_M4)
    assert len(set(seen)) == 4


# Rewards


def test_groups_without_signal_count_in_the_denominator_as_in_grpo(tmp_path):
    trainer = train(tmp_path / "a", Script([Group([1, 1, 1, 1])]), **N4_M2)
    logs = only_log(trainer)
    assert (logs["loss"], logs["grad_norm"], logs["frac_reward_zero_std"]) == (0.0, 0.0, 1.0)

    groups = [Group([1, 1, 1, 1], [5] * 4), Group([0, 1, 0.25, 0.5], [2, 6, 3, 3])]
    trainer = train(tmp_path / "b", Script(groups), **(N4_M2 | {"per_device_train_batch_size": 4}), **LOGGED)
    assert only_log(trainer)["frac_reward_zero_std"] == 0.5
    assert only_log(trainer)["loss"] == pytest.approx(-0.15711, abs=1e-5)
    assert kept_rows(trainer) == [0, 1, 4, 5]


@pytest.mark.parametrize("unscored", [None, NAN])
def test_a_rollout_without_a_score_is_kept_last(tmp_path, unscored):
    script = Script([Group([unscored, 0.4, 0.9, 0.6], [4, 2, 6, 3])])
    trainer = train(tmp_path, script, **N4_M2, **LOGGED)
    logs = only_log(trainer)
    assert kept_rows(trainer) == [1, 2]
    assert logs["loss"] == pytest.approx(-0.35345, abs=1e-5)
    assert logs["reward"] == pytest.approx(0.6333, abs=1e-4)
    assert logs["pods/ineligible"] == 0.25


def test_functions_for_different_tasks_leave_no_rollout_without_a_score(tmp_path):
    script = Script([Group([(1, None), (None, 0.5), (0, None), (None, 0)])], num_functions=2)
    trainer = train(tmp_path, script, **N4_M2, **LOGGED)
    assert kept_rows(trainer) == [0, 2]
    assert only_log(trainer)["pods/ineligible"] == 0.0
    assert only_log(trainer)["rewards/f1/mean"] == 0.5


def test_nothing_scored_at_all_pushes_nothing(tmp_path):
    trainer = train(tmp_path, Script([Group([None] * 4)]), learning_rate=1e-2, **N4_M2)
    assert only_log(trainer)["loss"] == 0.0
    assert only_log(trainer)["pods/ineligible"] == 1.0


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("extremes", [(INF,), (-INF,), (INF, -INF)])
def test_an_infinite_reward_counts_as_no_score(tmp_path, caplog, extremes, scale_rewards):
    group = Group([*extremes, *[0.0] * (3 - len(extremes)), 1.0])
    trainer = train(
        tmp_path,
        Script([group, Group([0, 1, 0, 1])]),
        scale_rewards=scale_rewards,
        learning_rate=1e-2,
        **(N4_M2 | {"per_device_train_batch_size": 4}),
        **LOGGED,
    )
    assert kept_rows(trainer) == [len(extremes), 3, 4, 5]
    assert math.isfinite(only_log(trainer)["loss"])
    assert all(weight.isfinite().all() for weight in weights(trainer).values())
    if scale_rewards == "group":
        assert read_table(trainer)["advantage"].dropna().tolist() == pytest.approx([-0.70701, 0.70701] * 2, abs=1e-5)
    assert "['f1'] returned an infinite reward" in caplog.text


def test_weights_decide_what_is_kept(tmp_path):
    rewards = list(zip([1, 0, 1, 0], [0, 1, 1, 0.5], strict=True))
    script = Script([Group(rewards, [3, 5, 4, 2])], num_functions=2)
    trainer = train(tmp_path, script, reward_weights=[1, -0.5], **N4_M2, **LOGGED)
    logs = only_log(trainer)
    assert kept_rows(trainer) == [0, 1]
    assert logs["loss"] == pytest.approx(0.17676, abs=1e-5)
    assert logs["reward"] == pytest.approx(0.1875)
    assert logs["rewards/f1/mean"] == pytest.approx(0.5)
    assert logs["rewards/f2/mean"] == pytest.approx(0.625)


def test_shaping_in_an_all_wrong_group_is_visible_in_the_logs(tmp_path):
    def run(**settings):
        trainer = train(tmp_path, Script([Group([0.01 * i for i in range(8)])]), **N8_M4, **settings, **LOGGED)
        assert kept_rows(trainer) == [0, 1, 6, 7]
        return read_table(trainer)["advantage"].dropna().tolist(), only_log(trainer)

    advantages, logs = run()
    assert advantages == pytest.approx([-0.9938, -0.7098, 0.7098, 0.9938], abs=1e-4)
    assert logs["reward_std"] == pytest.approx(0.0245, abs=1e-4)
    assert logs["pods/kept_reward_std"] == pytest.approx(0.0351, abs=1e-4)
    assert run(scale_rewards="none")[0] == pytest.approx([-0.035, -0.025, 0.025, 0.035], abs=1e-6)


SHAPED = Group([(0, 0.01 * i) for i in range(8)])  # all wrong; shaping differs by a hundredth


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "settings",
    [{"min_reward_std": 0.05}, {"selection_reward_funcs": ["f1"]}, {"min_reward_std": 0.05, "num_rollouts": 4}],
)
def test_a_group_without_signal_pushes_nothing_on_demand(tmp_path, settings, scale_rewards):
    groups = [SHAPED, Group([(i % 2, 0.01 * i) for i in range(8)])]
    settings = N8_M4 | {"per_device_train_batch_size": 8, "scale_rewards": scale_rewards} | settings
    trainer = train(tmp_path, Script(groups, num_functions=2), **settings, **LOGGED)
    advantages = read_table(trainer)["advantage"].dropna()
    assert advantages[:4].tolist() == [0, 0, 0, 0]
    assert (advantages[4:].abs() > 0.1).all()
    assert only_log(trainer)["pods/no_signal"] == 0.5
    assert only_log(trainer)["grad_norm"] > 0


def test_signal_is_demanded_of_all_advantages_over_all_too(tmp_path):
    script = Script([SHAPED], num_functions=2)
    trainer = train(tmp_path, script, advantage_statistics="all", min_reward_std=0.05, **N8_M4)
    assert (only_log(trainer)["loss"], only_log(trainer)["grad_norm"]) == (0, 0)


def test_without_a_demand_groups_without_signal_are_counted_only(tmp_path):
    trainer = train(tmp_path, Script([SHAPED], num_functions=2), **N8_M4)
    assert only_log(trainer)["pods/no_signal"] == 0
    assert only_log(trainer)["grad_norm"] > 0
    assert only_log(train(tmp_path, Script([Group([1] * 8)]), **N8_M4))["pods/no_signal"] == 1


def test_selection_may_look_at_some_reward_functions_and_training_at_all(tmp_path):
    group = Group([(0, 9), (1, 0), (0.5, 5), (0.4, 0), (None, 8), (0.6, 0), (0.5, 7), (0.5, 0)])
    trainer = train(
        tmp_path,
        Script([group], num_functions=2),
        selection_reward_funcs=["f1"],
        **(N8_M4 | N4_M2 | {"num_rollouts": 8}),
        **LOGGED,
    )
    assert kept_rows(trainer) == [0, 1]  # the extremes of f1, not of the sum
    assert read_table(trainer)["advantage"].dropna().tolist() == pytest.approx([0.707, -0.707], abs=1e-3)
    assert only_log(trainer)["pods/ineligible"] == 1 / 8


def test_an_unknown_reward_function_to_look_at_is_refused_at_construction(tmp_path):
    with pytest.raises(ValueError, match=r"names \['accuracy'\].*Use some of \['f1'\]"):
        make_trainer(tmp_path, Script([F1]), selection_reward_funcs=["accuracy", "f1"], **N8_M4)


@pytest.mark.parametrize(("selector", "kept"), [("shortest", [0, 2, 4, 6]), ("token_efficiency", [1, 2, 5, 6])])
def test_rules_of_gfpo_in_the_trainer(tmp_path, selector, kept):
    trainer = train(tmp_path, Script([F1]), selector=selector, **N8_M4, **LOGGED)
    assert kept_rows(trainer) == kept


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_truncated_rollouts_are_kept_last_when_they_are_masked(tmp_path, loss_type):
    settings = N8_M4 | {"mask_truncated_completions": True, "loss_type": loss_type, "learning_rate": 1e-2}
    nothing_ends = train(tmp_path, Script([Group(F1.rewards, F1.lengths, ends=[False] * 8)]), **settings)
    logs = only_log(nothing_ends)
    assert (logs["loss"], logs["grad_norm"], logs["pods/ineligible"]) == (0.0, 0.0, 1.0)
    assert all(weight.isfinite().all() for weight in weights(nothing_ends).values())

    ends = [i in (1, 2, 5, 6) for i in range(8)]
    some_end = train(
        tmp_path, Script([Group([0, 1, 0.2, 0, 0, 0.9, 0.3, 0], F1.lengths, ends=ends)]), **settings, **LOGGED
    )
    assert kept_rows(some_end) == [1, 2, 5, 6]


def test_a_tied_group_keeps_its_kl_term(tmp_path):
    make_model(seed=3).save_pretrained(tmp_path / "reference")
    model = make_model()
    model.config._name_or_path = str(tmp_path / "reference")
    trainer = train(tmp_path, Script([Group([1, 1, 1, 1])]), model=model, beta=0.1, **N4_M2)
    logs = only_log(trainer)
    assert logs["kl"] > 0
    assert logs["loss"] == pytest.approx(0.1 * logs["kl"], rel=1e-5)


def test_reward_functions_get_all_columns_and_may_return_any_numbers(tmp_path):
    import asyncio
    import threading

    import numpy as np

    received = {}

    def integers(completions, answer, meta, kept, advantages, tags, trainer_state, **kwargs):
        assert threading.current_thread() is threading.main_thread()
        columns = {"answer": answer, "meta": meta, "kept": kept, "advantages": advantages, "tags": tags} | kwargs
        assert {len(columns[key]) for key in ("answer", "meta", "kept", "advantages", "tags", "rollout")} == {8}
        received.update(columns)
        return list(range(8))

    def booleans(completions, **kwargs):
        return [i % 2 == 0 for i in range(len(completions))]

    def numpy_numbers(completions, **kwargs):
        return list(np.zeros(len(completions), dtype=np.float32))

    async def in_reverse(completions, **kwargs):
        async def one(i):
            await asyncio.sleep(0.001 * (len(completions) - i))
            return i / 100

        return await asyncio.gather(*map(one, range(len(completions))))

    script = Script([Group([0] * 4)] * 2)
    columns = {
        "answer": ["a", "b"],
        "meta": [{"x": 1}, {"x": 2}],
        "kept": [7, 8],
        "advantages": [1, 2],
        "tags": [["t"], []],
    }
    dataset = script.dataset()
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    trainer = train(
        tmp_path,
        script,
        num_rollouts=4,
        num_generations=2,
        per_device_train_batch_size=4,
        trainer_kwargs={"reward_funcs": [integers, booleans, numpy_numbers, in_reverse], "train_dataset": dataset},
        **LOGGED,
    )
    assert received["answer"] == ["a"] * 4 + ["b"] * 4
    assert received["kept"] == [7] * 4 + [8] * 4
    table = read_table(trainer)
    assert table["in_reverse"].tolist() == pytest.approx([i / 100 for i in range(8)])
    assert table["booleans"].tolist() == [1.0, 0.0] * 4


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda completions, **kwargs: [1.0] * (len(completions) - 1), ValueError, "returned 3 rewards, but 4"),
        (lambda completions, **kwargs: {}["missing"], KeyError, "missing"),
    ],
)
def test_errors_of_reward_functions_surface_unchanged(tmp_path, function, error, message):
    with pytest.raises(error, match=message):
        train(tmp_path, Script([Group([0] * 4)]), trainer_kwargs={"reward_funcs": [function]}, **N4_M2)


def test_a_reward_function_may_hold_on_to_its_lists(tmp_path):
    held = []

    def hold(prompts, completions, completion_ids, number, **kwargs):
        held.append((prompts, completions, completion_ids, number))
        return [float(i) for i in range(len(prompts))]

    train(tmp_path, Script([Group([0] * 4)]), trainer_kwargs={"reward_funcs": [hold]}, **N4_M2)
    assert [len(values) for values in held[0]] == [4, 4, 4, 4]


# Rules of the user


def test_a_rule_of_the_user_sees_rewards_lengths_and_functions(tmp_path):
    seen = {}

    def shortest(rewards, num_selected, *, rewards_per_func, completion_lengths, generator, factor):
        seen.update(rewards=rewards, rewards_per_func=rewards_per_func, lengths=completion_lengths, factor=factor)
        assert isinstance(generator, torch.Generator)
        return completion_lengths.argsort(dim=1, stable=True)[:, :num_selected]

    groups = [Group([(0.5, 1), (None, 1), (0, 0), (None, None)], [5, 2, 4, 3])]
    trainer = train(
        tmp_path, Script(groups, num_functions=2), selector=shortest, selector_kwargs={"factor": 3}, **N4_M2, **LOGGED
    )
    assert kept_rows(trainer) == [0, 1]  # not 3, which has no score
    assert seen["rewards"].dtype == torch.float64
    assert seen["rewards"][0, :3].tolist() == [1.5, 1.0, 0.0]
    assert seen["rewards"][0, 3].isnan()
    assert seen["rewards_per_func"].shape == (1, 4, 2)
    assert seen["lengths"].tolist() == [[5, 2, 4, 3]]
    assert seen["factor"] == 3


def test_a_rule_that_returns_nonsense_ends_training_with_its_name(tmp_path):
    def twice_the_first(rewards, num_selected):
        return torch.zeros(len(rewards), num_selected, dtype=torch.int64)

    with pytest.raises(ValueError, match="twice_the_first.*an index is repeated"):
        train(tmp_path, Script([F1]), selector=twice_the_first, **N8_M4)


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


# Metrics and logs


def test_rewards_and_lengths_are_logged_over_all_rollouts(tmp_path):
    logs = only_log(train(tmp_path, Script([F1]), **N8_M4))
    assert logs["reward"] == pytest.approx(0.5125)
    assert logs["reward_std"] == pytest.approx(0.34512, abs=1e-5)
    assert logs["rewards/f1/mean"] == pytest.approx(0.5125)
    assert logs["rewards/f1/std"] == pytest.approx(0.34512, abs=1e-5)
    assert logs["completions/mean_length"] == 4.625
    assert logs["num_tokens"] == 61
    assert logs["pods/kept_reward"] == pytest.approx(0.5)
    assert logs["pods/kept_reward_std"] == pytest.approx(0.52281, abs=1e-5)
    assert logs["pods/kept_length"] == 4.5
    assert logs["pods/ineligible"] == 0.0


def test_the_logged_reward_is_the_policys(tmp_path):
    script = Script([Group([0] * 11 + [1] + [0] * 4)])
    logs = only_log(train(tmp_path, script, num_rollouts=16, num_generations=4, per_device_train_batch_size=4))
    assert logs["reward"] == 0.0625
    assert logs["pods/kept_reward"] == 0.25


@pytest.mark.parametrize(
    "settings",
    [{}, {"scale_rewards": "batch"}, {"scale_rewards": "none"}, {"multi_objective_aggregation": "normalize_then_sum"}],
    ids=str,
)
def test_metrics_over_all_are_those_of_grpo_that_trains_on_all(tmp_path, settings):
    rewards = [[(0.1, 1), (0.9, 0), (None, 0.5), (0, 0)], [(1, 1)] * 4]
    groups = [Group(values, [2, 3, 4, 5]) for values in rewards]
    settings = {"reward_weights": [1, 0.5], **settings}
    pods = train(
        tmp_path / "pods", Script(groups, num_functions=2), **(N4_M2 | {"per_device_train_batch_size": 4}), **settings
    )
    grpo = train(
        tmp_path / "grpo",
        Script(groups, num_functions=2),
        GRPOTrainer,
        GRPOConfig,
        num_generations=4,
        per_device_train_batch_size=8,
        **settings,
    )
    ours, theirs = only_log(pods), only_log(grpo)
    described = [key for key in theirs if key.startswith(("reward", "completions/", "num_tokens", "frac_"))]
    assert len(described) >= 15
    for key in described:
        assert ours[key] == theirs[key], key


def test_functions_of_one_name_are_logged_as_in_grpo(tmp_path):
    script = Script([Group([(0, 1), (1, 1), (0.5, 0), (0.25, 0)])], num_functions=2)
    functions = script.reward_functions()
    functions[1].__name__ = "f1"
    logs = only_log(train(tmp_path, script, trainer_kwargs={"reward_funcs": functions}, **N4_M2))
    assert logs["rewards/f1/mean"] == pytest.approx((0.4375 + 0.5) / 2)


@pytest.mark.parametrize("settings", [N8_M4, {"num_generations": 8, "per_device_train_batch_size": 8}])
def test_the_times_of_a_round_are_logged(tmp_path, settings):
    trainer = train(tmp_path, Script([F1]), max_steps=3, **settings)
    for logs in step_logs(trainer):
        assert {key for key in logs if key.startswith("time/")} == {
            "time/generate",
            "time/reward",
            "time/select",
            "time/score",
            "time/update",
        }
        assert logs["time/generate"] > 0
        assert logs["time/update"] > 0
        assert (logs["time/select"] > 0) == ("num_rollouts" in settings)
        assert logs["time/score"] == 0


def test_update_time_is_logged_once_a_round(tmp_path):
    for accumulation, steps, rounds in ((1, 8, 2), (4, 3, 3), (8, 1, 2)):
        counts = {}

        class Spy(PODSGRPOTrainer):
            def log(self, logs, start_time=None, counts=counts):
                counts.update({key: len(values) for key, values in self._metrics["train"].items()})
                super().log(logs, start_time)

        train(
            tmp_path,
            Script([F1] * 4),
            Spy,
            num_rollouts=8,
            num_generations=4,
            per_device_train_batch_size=1,
            steps_per_generation=4,
            gradient_accumulation_steps=accumulation,
            max_steps=steps,
            logging_strategy="no",
        )
        assert counts["time/update"] == counts["time/generate"] == rounds, accumulation


def test_the_completions_table_shows_every_rollout(tmp_path):
    groups = [F1, Group([1, 0, 0, 0, 0, 0, 0, 0])]
    trainer = train(tmp_path, Script(groups), max_steps=3, **(N8_M4 | {"per_device_train_batch_size": 8}), **LOGGED)
    for step in (1, 2, 3):
        table = read_table(trainer, step)
        assert list(table.columns) == ["step", "prompt", "completion", "f1", "kept", "advantage"]
        assert table["f1"].tolist() == pytest.approx([*F1.rewards, *groups[1].rewards])
        assert table["kept"].dtype == bool
        assert table["kept"].tolist() == [i in (0, 1, 4, 5) for i in range(8)] + [i < 4 for i in range(8)]
        assert table["advantage"].isna().tolist() == (~table["kept"]).tolist()
        assert table["advantage"].dropna().tolist() == pytest.approx(
            [-0.76495, 0.76495, -0.95618, 0.95618, 1.4997, -0.4999, -0.4999, -0.4999], abs=1e-4
        )
        lengths = [len(text.split()) + 1 for text in table["completion"]]
        assert lengths == [*F1.lengths, *groups[1].lengths]


def test_printing_a_sample_of_completions_works(tmp_path, capsys):
    train(tmp_path, Script([F1]), log_completions=True, num_completions_to_print=2, **N8_M4)
    assert "kept" in capsys.readouterr().out


def test_extra_columns_and_metrics_of_reward_functions_are_logged(tmp_path):
    def logging(completions, rollout, log_extra, log_metric, **kwargs):
        log_extra("note", [f"rollout {i}" for i in rollout])
        log_metric("longest", 8.0)
        return [F1.rewards[i] for i in rollout]

    trainer = train(tmp_path, Script([F1]), trainer_kwargs={"reward_funcs": [logging]}, **N8_M4, **LOGGED)
    assert read_table(trainer)["note"].tolist() == [f"rollout {i}" for i in range(8)]
    assert only_log(trainer)["longest"] == 8.0


@pytest.mark.parametrize(
    ("column", "num_values", "message"),
    [("kept", 8, "takes a name that the completions table uses"), ("note", 7, "got 7 values for 8 completions")],
)
def test_extra_columns_that_would_spoil_the_table_are_refused(tmp_path, column, num_values, message):
    def logging(completions, log_extra, **kwargs):
        log_extra(column, [0] * num_values)
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=message):
        train(tmp_path, Script([F1]), trainer_kwargs={"reward_funcs": [logging]}, **N8_M4, **LOGGED)


# Evaluation


def evaluate(tmp_path, trainer_class, config_class, rewards, num_generations_eval, **settings):
    script = Script([Group(values) for values in rewards])
    trainer = make_trainer(
        tmp_path,
        script,
        trainer_class,
        config_class,
        trainer_kwargs={"eval_dataset": script.dataset()},
        num_generations=2,
        num_generations_eval=num_generations_eval,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        **settings,
        **LOGGED,
    )
    return trainer.evaluate(), script


@pytest.mark.parametrize("num_generations_eval", [1, 2, None, 4])
def test_evaluation_is_that_of_grpo(tmp_path, num_generations_eval):
    rewards = [[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1]]
    pods, pods_script = evaluate(
        tmp_path, PODSGRPOTrainer, PODSGRPOConfig, rewards, num_generations_eval, num_rollouts=8
    )
    grpo, grpo_script = evaluate(tmp_path, GRPOTrainer, GRPOConfig, rewards, num_generations_eval)
    assert pods_script.calls == grpo_script.calls
    varying = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time"}
    assert {k: v for k, v in pods.items() if k not in varying} == {k: v for k, v in grpo.items() if k not in varying}


def test_evaluation_does_not_select(tmp_path):
    metrics, script = evaluate(
        tmp_path, PODSGRPOTrainer, PODSGRPOConfig, [[1, 0, 0, 0], [1, 0, 0, 0]], 4, num_rollouts=8
    )
    assert metrics["eval_reward"] == 0.25  # selecting two of four would give 0.5
    assert [len(call) for call in script.calls] == [4, 4]
    table = pd.read_parquet(tmp_path / "completions" / "completions_00000.parquet")
    assert table["kept"].tolist() == [True] * 8


def test_training_goes_on_with_selection_after_evaluation(tmp_path):
    script = Script([F1])
    trainer = train(
        tmp_path,
        script,
        trainer_kwargs={"eval_dataset": script.dataset()},
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        per_device_eval_batch_size=4,
        max_steps=2,
        **N8_M4,
        **LOGGED,
    )
    assert [len(call) for call in script.calls] == [4, 8, 4, 8, 4]
    assert len(step_logs(trainer)) == 2
    assert all(logs["loss"] == pytest.approx(-0.19124, abs=1e-5) for logs in step_logs(trainer))


# Adapters, saving, model card


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
    trainer.model.eval()
    # `forward` of the trained model is patched by TRL for fused log-probs, so compare hidden states.
    ours = trainer.model.get_base_model().model(tokens).last_hidden_state
    theirs = reloaded.eval().get_base_model().model(tokens).last_hidden_state
    assert torch.allclose(ours, theirs)


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


def test_a_trainer_needs_no_down_sampling_settings_to_be_pickled_with(tmp_path):
    config = make_config(tmp_path, selector=lambda r, m: None, num_generations=2, per_device_train_batch_size=2)
    torch.save(config, tmp_path / "training_args.bin")
    assert "lambda" in torch.load(tmp_path / "training_args.bin", weights_only=False).selector
