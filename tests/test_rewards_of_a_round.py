"""Reward functions and rules in the trainer: what they get, and what is kept of what they return."""

import asyncio
import math
import threading

import numpy as np
import pytest
import torch
from datasets import Dataset
from rig import (
    EOS,
    F1,
    LOGGED,
    N4_M2,
    N8_M4,
    Group,
    Script,
    kept_rows,
    make_tokenizer,
    make_trainer,
    only_log,
    read_table,
    train,
    weights,
)
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

from trl_pods import PODSGRPOTrainer, PODSMixin


NAN, INF = float("nan"), float("inf")


def ones(count, num_rollouts=16):
    return [1.0] * count + [0.0] * (num_rollouts - count)


@pytest.mark.parametrize(
    ("rewards", "kept", "advantages"),
    [
        (F1.rewards, [0, 1, 4, 5], [-0.76495, 0.76495, -0.95618, 0.95618]),
        ([0, 0, 0, 0, 0, 0, 0.1, 1], [0, 1, 2, 7], [-0.4999, -0.4999, -0.4999, 1.4997]),  # not half and half
        (ones(1), [0, 1, 2, 3], [1.4997, -0.4999, -0.4999, -0.4999]),
        (ones(2), [0, 1, 2, 3], [0.86588, 0.86588, -0.86588, -0.86588]),
        (ones(3), [0, 1, 3, 4], [0.86588, 0.86588, -0.86588, -0.86588]),
        (ones(8), [0, 1, 8, 9], [0.86588, 0.86588, -0.86588, -0.86588]),
        (ones(15), [0, 1, 2, 15], [0.4999, 0.4999, 0.4999, -1.4997]),
        # The mean of .1, 0 and .6 is .23333, their standard deviation .32146.
        ([0.3, 0.1, 0.2, 0, 0.6, 0.5, 0.4], [1, 3, 4], [-0.41465, -0.72563, 1.14028]),
    ],
)
def test_the_rewards_with_the_largest_variance_are_kept_and_normalised_by_themselves(
    tmp_path, rewards, kept, advantages
):
    m = len(kept)
    settings = {"num_rollouts": len(rewards), "num_generations": m, "per_device_train_batch_size": m}
    trainer = train(tmp_path, Script([Group(rewards)]), **settings, **LOGGED)
    assert kept_rows(trainer) == kept
    assert advantages_of(trainer) == pytest.approx(advantages, abs=5e-5)


def advantages_of(trainer):
    return read_table(trainer)["advantage"].dropna().tolist()


class WithoutFloat64(torch.Tensor):
    """Stands for a tensor on a device that has no float64, such as MPS."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


@pytest.mark.parametrize("settings", [{}, {"advantage_statistics": "all", "min_reward_std": 0.1}], ids=str)
def test_rewards_on_a_device_without_float64_are_selected_alike(tmp_path, settings):
    class OnSuchADevice(GRPOTrainer):
        def _calculate_rewards(self, *args):
            return super()._calculate_rewards(*args).as_subclass(WithoutFloat64)

    def run(trainer_class):
        trainer = train(tmp_path, Script([F1]), trainer_class, **N8_M4, **LOGGED, **settings)
        return kept_rows(trainer), advantages_of(trainer), only_log(trainer)["loss"]

    assert run(type("PODS", (PODSMixin, OnSuchADevice), {})) == run(PODSGRPOTrainer)


@pytest.mark.parametrize("unscored", [None, NAN])
def test_a_rollout_without_a_score_is_kept_last(tmp_path, unscored):
    script = Script([Group([unscored, 0.4, 0.9, 0.6], [4, 2, 6, 3])])
    trainer = train(tmp_path, script, **N4_M2, **LOGGED)
    logs = only_log(trainer)
    assert kept_rows(trainer) == [1, 2]
    assert advantages_of(trainer) == pytest.approx([-0.70691, 0.70691], abs=1e-5)
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
    assert advantages_of(trainer) == pytest.approx([0.70704, -0.70704], abs=1e-5)
    assert logs["loss"] == pytest.approx(0.17676, abs=1e-5)
    assert logs["reward"] == pytest.approx(0.1875)
    assert logs["rewards/f1/mean"] == pytest.approx(0.5)
    assert logs["rewards/f2/mean"] == pytest.approx(0.625)


def test_a_function_of_weight_zero_is_logged_and_decides_nothing(tmp_path):
    # f2 alone would keep rollouts 1 and 2; it also scores rollout 3, which f1 could not.
    rewards = list(zip([0.2, 0.5, 0.4, None, 0.9], [0.5, 1, 0, 0.5, 0.5], strict=True))
    script = Script([Group(rewards)], num_functions=2)
    trainer = train(tmp_path, script, reward_weights=[1, 0], **(N4_M2 | {"num_rollouts": 5}), **LOGGED)
    assert kept_rows(trainer) == [0, 4]
    assert only_log(trainer)["pods/ineligible"] == 0.2
    assert only_log(trainer)["rewards/f2/mean"] == pytest.approx(0.5)


def test_weights_of_zero_alone_push_nothing(tmp_path):
    script = Script([Group([(0, 1), (1, 0), (1, 1), (None, None)])], num_functions=2)
    trainer = train(tmp_path, script, reward_weights=[0, 0], learning_rate=1e-2, **N4_M2, **LOGGED)
    logs = only_log(trainer)
    assert kept_rows(trainer) == [0, 1]
    assert (logs["loss"], logs["grad_norm"], logs["reward"], logs["pods/no_signal"]) == (0, 0, 0, 1)
    assert logs["rewards/f1/mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("selector", "kept"), [("max_variance", [0, 1]), ("max_reward", [1, 3])])
def test_a_negative_weight_turns_the_order_of_rewards_round(tmp_path, selector, kept):
    trainer = train(tmp_path, Script([Group([3, 0, 2, 1])]), selector=selector, reward_weights=[-2], **N4_M2, **LOGGED)
    assert kept_rows(trainer) == kept
    assert advantages_of(trainer)[0] < 0 or selector == "max_reward"
    assert only_log(trainer)["reward"] == -3
    assert only_log(trainer)["rewards/f1/mean"] == 1.5


def test_a_rule_that_looks_at_weights_of_zero_alone_is_refused(tmp_path):
    script = Script([Group([(0, 1)] * 4)], num_functions=2)
    with pytest.raises(
        ValueError, match=r"selection_reward_funcs=\['f2'\].*reward_weights=\[1.0, 0.0\].*other than 0"
    ):
        make_trainer(tmp_path, script, selection_reward_funcs=["f2"], reward_weights=[1, 0], **N4_M2)


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
    script = Script([Group([0] * 4)] * 2)
    columns = {
        "answer": ["a", "b"],
        "meta": [{"x": 1}, {"x": 2}],
        "kept": [7, 8],
        "advantages": [1, 2],
        "tags": [["t"], []],
    }
    received = []

    def integers(**kwargs):
        assert threading.current_thread() is threading.main_thread()
        received.append(kwargs)
        return list(range(8))

    def booleans(completions, **kwargs):
        return [i % 2 == 0 for i in range(len(completions))]

    def numpy_numbers(completions, **kwargs):
        return np.arange(len(completions), dtype=np.float32) / 4

    async def in_reverse(completions, **kwargs):
        async def one(i):
            await asyncio.sleep(0.001 * (len(completions) - i))
            return i / 100

        return await asyncio.gather(*map(one, range(len(completions))))

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
    (kwargs,) = received
    for name, (first, second) in columns.items():
        assert kwargs[name] == [first] * 4 + [second] * 4, name
    assert kwargs["prompts"] == ["w10 w3 w4"] * 4 + ["w11 w3 w4"] * 4
    assert kwargs["rollout"] == [0, 1, 2, 3] * 2
    assert kwargs["completion_ids"] == [group.completion(i) for group in script.groups for i in range(4)]
    assert kwargs["completions"] == [" ".join(f"w{i}" for i in ids[:-1]) for ids in kwargs["completion_ids"]]
    assert kwargs["trainer_state"] is trainer.state
    assert callable(kwargs["log_extra"])
    assert callable(kwargs["log_metric"])
    table = read_table(trainer)
    assert table["integers"].tolist() == list(range(8))
    assert table["booleans"].tolist() == [1.0, 0.0] * 4
    assert table["numpy_numbers"].tolist() == [i / 4 for i in range(8)]
    assert table["in_reverse"].tolist() == pytest.approx([i / 100 for i in range(8)])
    assert kept_rows(trainer) == [0, 3, 4, 7]


def one_too_few(completions, **kwargs):
    return [1.0] * (len(completions) - 1)


async def one_too_few_later(completions, **kwargs):
    return one_too_few(completions)


def broken(completions, **kwargs):
    return {}["missing"]


async def broken_later(completions, **kwargs):
    return broken(completions)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (one_too_few, ValueError, "'one_too_few' returned 7 rewards, but 8 were expected"),
        (one_too_few_later, ValueError, "'one_too_few_later' returned 7 rewards, but 8 were expected"),
        (broken, KeyError, "missing"),
        (broken_later, KeyError, "missing"),
    ],
)
def test_errors_of_reward_functions_surface_unchanged(tmp_path, function, error, message):
    with pytest.raises(error, match=message):
        train(tmp_path, Script([F1]), trainer_kwargs={"reward_funcs": [function]}, **N8_M4)


HALF = r"\boxed{\frac{1}{2}}"
MATH = {  # by gold answer: completions, and what TRL's own reward for them is
    "6": ([r"\boxed{6}", "The answer is 6", "6", r"\boxed{6} and then \boxed{7}"], [1, 0, 0, 0]),
    "1/2": ([HALF, "6", HALF, "7"], [1, 0, 1, 0]),
    "0.5": (["6", HALF, "7", HALF], [0, 1, 0, 1]),
    "1,000": (["7", "6", "7", r"\boxed{1000}"], [0, 0, 0, 1]),
    "Paris": ([r"\boxed{Paris}"] * 4, [NAN] * 4),
    "": ([HALF] * 4, [NAN] * 4),
    "A": ([r"\boxed{A}"] * 4, [NAN] * 4),
    r"7.41\%": ([r"\boxed{7.41\%}"] * 4, [0] * 4),  # right, but not as this gold is read
    r"2\sqrt{5}": ([r"\boxed{2\sqrt{5}}"] * 4, [0] * 4),
}


def test_the_math_reward_of_trl_leaves_a_gold_that_it_cannot_read_without_a_score(tmp_path):
    texts = [text for completions, _ in MATH.values() for text in completions]
    words = sorted({word for text in texts for word in text.split()})
    tokenizer = make_tokenizer(words)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

    def rollout_func(prompts, trainer):
        ids = [[*tokenizer(text)["input_ids"], EOS] for text in texts]
        return {"prompt_ids": [[5]] * len(ids), "completion_ids": ids, "logprobs": [[-0.1] * len(row) for row in ids]}

    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "w5"}]] * len(MATH), "solution": list(MATH)})
    trainer = train(
        tmp_path,
        Script([]),
        trainer_kwargs={
            "rollout_func": rollout_func,
            "reward_funcs": [accuracy_reward],
            "train_dataset": dataset,
            "processing_class": tokenizer,
        },
        **(N4_M2 | {"per_device_train_batch_size": 2 * len(MATH)}),
        **LOGGED,
    )
    rewards = read_table(trainer)["accuracy_reward"].tolist()
    assert rewards == pytest.approx([reward for _, values in MATH.values() for reward in values], nan_ok=True)
    assert [row % 4 for row in kept_rows(trainer)] == [0, 1] * 3 + [0, 3] + [0, 1] * 5
    assert only_log(trainer)["pods/ineligible"] == pytest.approx(3 / 9)
    assert only_log(trainer)["reward"] == pytest.approx(6 / 24)
    assert math.isfinite(only_log(trainer)["loss"])
    assert only_log(trainer)["grad_norm"] > 0


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
