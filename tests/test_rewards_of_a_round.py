"""Reward functions and rules in the trainer: what they get, and what is kept of what they return."""

import asyncio
import math
import threading

import numpy as np
import pytest
import torch
from rig import F1, LOGGED, N4_M2, N8_M4, Group, Script, kept_rows, make_trainer, only_log, read_table, train, weights


NAN, INF = float("nan"), float("inf")


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


def test_reward_functions_get_all_columns_and_may_return_any_numbers(tmp_path):
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
