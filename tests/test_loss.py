"""
Losses and gradients: closed forms, and plain GRPO on the kept rollouts as the shadow that must train alike.

Expected losses are exact: with learning rate 0 every step is on-policy, so the dapo loss is
- sum(A_i L_i) / sum(L_i) over the kept rows, whatever the model.
"""

import dataclasses
import itertools
import math

import pytest
import torch
import trl
from peft import LoraConfig
from rig import (
    EOS,
    F1,
    LOGGED,
    N4_M2,
    N8_M4,
    VOCABULARY,
    Group,
    NarrowGRPOTrainer,
    Script,
    assert_equal_weights,
    kept_rows,
    make_model,
    only_log,
    read_table,
    step_logs,
    train,
    weights,
)
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer, PODSMixin
from trl_pods.reward_statistics import advantages_over_all


NAN = float("nan")


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

    singles = losses(1)
    assert sorted(singles) == pytest.approx([-1.27491, -0.84994, 0.50996, 0.84994], abs=1e-5)
    pairs = losses(2)
    assert sum(pairs) / 2 == pytest.approx(-0.19124, abs=1e-5)
    splits = [((a + b) / 2, (c + d) / 2) for a, b, c, d in itertools.permutations(singles)]
    assert any(tuple(pairs) == pytest.approx(split, abs=1e-5) for split in splits)
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
    shadow = run("shadow", Script(SHADOW_GROUPS, only=kept), NarrowGRPOTrainer, GRPOConfig)
    for ours, theirs in zip(step_logs(pods), step_logs(shadow), strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours["grad_norm"] == theirs["grad_norm"]
        assert ours.get("kl") == theirs.get("kl")
        assert ours["entropy"] == theirs["entropy"]
    assert_equal_weights(pods, shadow)
    assert any(
        not torch.equal(a, b) for a, b in zip(weights(pods).values(), make_model(seed=1).parameters(), strict=True)
    )


LOSS_TYPES = {
    "dapo": {},
    "bnpo": {},
    "grpo": {},
    "dr_grpo": {},
    "cispo": {"epsilon_high": 5.0},
    "sapo": {},
    "luspo": {"importance_sampling_level": "sequence"},
    "vespo": {},
}


@pytest.mark.parametrize("batching", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_has_the_gradients_of_plain_grpo_on_the_kept_rollouts(tmp_path, loss_type, batching):
    settings = {"num_generations": 4, "per_device_train_batch_size": 4, "loss_type": loss_type}
    settings |= LOSS_TYPES[loss_type] | batching
    pods = train(tmp_path / "pods", Script([F1]), num_rollouts=8, **settings)
    only = {0: [0, 1, 4, 5]}
    shadow = train(tmp_path / "shadow", Script([F1], only=only), NarrowGRPOTrainer, GRPOConfig, **settings)
    assert only_log(pods)["loss"] == only_log(shadow)["loss"]
    assert only_log(pods)["grad_norm"] == only_log(shadow)["grad_norm"] > 0
    (ours,), (theirs,) = pods.recorder.gradients, shadow.recorder.gradients
    assert len(ours) == len(list(pods.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


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


def test_groups_without_signal_count_in_the_denominator_as_in_grpo(tmp_path):
    trainer = train(tmp_path / "a", Script([Group([1, 1, 1, 1])]), **N4_M2, **LOGGED)
    logs = only_log(trainer)
    assert kept_rows(trainer) == [0, 1]
    assert (logs["loss"], logs["grad_norm"], logs["frac_reward_zero_std"]) == (0.0, 0.0, 1.0)

    groups = [Group([1, 1, 1, 1], [5] * 4), Group([0, 1, 0.25, 0.5], [2, 6, 3, 3])]
    trainer = train(tmp_path / "b", Script(groups), **(N4_M2 | {"per_device_train_batch_size": 4}), **LOGGED)
    assert only_log(trainer)["frac_reward_zero_std"] == 0.5
    assert only_log(trainer)["loss"] == pytest.approx(-0.15711, abs=1e-5)
    assert kept_rows(trainer) == [0, 1, 4, 5]
    assert read_table(trainer)["advantage"].dropna().tolist() == pytest.approx([0, 0, -0.70701, 0.70701], abs=1e-5)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({}, [2, 2], [2 - 0.70701, 2 + 0.70701]),
        ({"min_reward_std": 0.1}, [0, 0], [2 - 0.70701, 2 + 0.70701]),
        # The mean of 0, 1, .25 and .5 is .4375, their standard deviation .42696.
        ({"advantage_statistics": "all"}, [0, 0], [-1.02446, 1.31716]),
    ],
)
def test_advantages_of_a_trainer_of_ones_own_stay_but_where_settings_put_others_in_their_place(
    tmp_path, by_token, settings, first, second
):
    class Own(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            own = output["advantages"] + 2
            return output | {"advantages": own[:, None] * output["completion_mask"] if by_token else own}

    class OwnPODS(PODSMixin, Own):
        def _generate_and_score_completions(self, inputs):
            self.output = super()._generate_and_score_completions(inputs)
            return self.output

    groups = [Group([1, 1, 1, 1], [5] * 4), Group([0, 1, 0.25, 0.5], [2, 6, 3, 3])]
    trainer = train(
        tmp_path, Script(groups), OwnPODS, **(N4_M2 | {"per_device_train_batch_size": 4}), **LOGGED, **settings
    )
    advantages = trainer.output["advantages"]
    if advantages.ndim == 2:
        assert advantages.shape == trainer.output["completion_ids"].shape
        advantages = advantages[:, 0]
    assert advantages.tolist() == pytest.approx([*first, *second], abs=1e-5)
    logged = [-0.70701, 0.70701] if "advantage_statistics" not in settings else second
    assert read_table(trainer)["advantage"].dropna().tolist() == pytest.approx([0, 0, *logged], abs=1e-5)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_truncated_rollouts_are_kept_last_when_they_are_masked(tmp_path, loss_type):
    settings = N8_M4 | {"mask_truncated_completions": True, "loss_type": loss_type, "learning_rate": 1e-2}
    nothing_ends = train(tmp_path, Script([Group(F1.rewards, F1.lengths, ends=[False] * 8)]), **settings)
    logs = only_log(nothing_ends)
    assert (logs["loss"], logs["grad_norm"], logs["pods/ineligible"]) == (0.0, 0.0, 1.0)
    assert all(value is None or math.isfinite(value) for value in logs.values())
    assert all(weight.isfinite().all() for weight in weights(nothing_ends).values())

    ends = [i in (1, 2, 5, 6) for i in range(8)]
    some_end = train(
        tmp_path, Script([Group([0, 1, 0.2, 0, 0, 0.9, 0.3, 0], F1.lengths, ends=ends)]), **settings, **LOGGED
    )
    assert kept_rows(some_end) == [1, 2, 5, 6]
    assert all(value is None or math.isfinite(value) for value in only_log(some_end).values())
    assert only_log(some_end)["grad_norm"] > 0


TIED, MIXED = Group([1] * 4, [5, 3, 4, 2]), Group([0, 1, 0.25, 0.5], [2, 6, 3, 3])


@pytest.mark.parametrize(("groups", "policy_loss"), [([TIED], 0.0), ([TIED, MIXED], -0.70701 * (6 - 2) / (8 + 8))])
def test_a_tied_group_keeps_its_kl_term(tmp_path, groups, policy_loss):
    reference = make_model(seed=3)
    reference.save_pretrained(tmp_path / "reference")
    kept = {number: [0, 1] for number in range(len(groups))}

    def run(name, script, trainer_class, config_class, **extra):
        model = make_model()
        model.config._name_or_path = str(tmp_path / "reference")
        settings = {"num_generations": 2, "per_device_train_batch_size": 2 * len(groups), "beta": 0.1}
        return only_log(train(tmp_path / name, script, trainer_class, config_class, model=model, **settings, **extra))

    ours = run("pods", Script(groups), PODSGRPOTrainer, PODSGRPOConfig, num_rollouts=4)
    kl = mean_kl(make_model(), reference, [(n, groups[n].completion(i)) for n, rows in kept.items() for i in rows])
    assert ours["kl"] == pytest.approx(kl, rel=1e-4)
    assert ours["kl"] > 0
    assert ours["loss"] == pytest.approx(policy_loss + 0.1 * kl, abs=1e-5)

    theirs = run("shadow", Script(groups, only=kept), GRPOTrainer, GRPOConfig)
    of_the_update = [key for key in theirs if key.startswith(("loss", "grad_norm", "kl", "entropy", "clip_ratio/"))]
    assert len(of_the_update) >= 9
    for key in of_the_update:
        assert ours[key] == theirs[key], key


def mean_kl(policy, reference, rows):
    """Mean over tokens of exp(d) - d - 1, with d the reference's log-prob of a token less the policy's."""
    values = []
    for number, completion in rows:
        ids = torch.tensor([[10 + number, 3, 4, *completion]])
        with torch.no_grad():
            logprobs = [
                model(ids).logits.log_softmax(-1)[0, 2:-1].gather(1, torch.tensor(completion)[:, None])
                for model in (policy, reference)
            ]
        difference = logprobs[1] - logprobs[0]
        values.append(difference.exp() - difference - 1)
    return torch.cat(values).mean().item()
