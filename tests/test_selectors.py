import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_pods import PODSGRPOConfig, selectors
from trl_pods.selectors import (
    BUILT_IN_SELECTORS,
    max_reward,
    max_variance,
    percentile,
    resolve_selector,
    select,
    selector_name,
)


NAN = float("nan")


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def keep(selector, rewards, num_selected, **kwargs):
    return selector(tensor(rewards), num_selected, **kwargs)[0].tolist()


def largest_variance(rewards, num_selected):
    """Of all subsets, by trying them."""
    return max(np.var(subset) for subset in itertools.combinations(rewards, num_selected))


def best_by_the_tie_rules(rewards, num_selected):
    """The subset that the documented tie rules single out, straight from their wording; exact for small integers."""
    by_reward = sorted(range(len(rewards)), key=lambda i: (rewards[i], i))
    by_reward_from_top = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))
    best, best_spread = None, -1
    for k in range(num_selected + 1):
        values = sorted(rewards)
        chosen = values[: num_selected - k] + values[len(values) - k :]
        spread = num_selected * sum(v * v for v in chosen) - sum(chosen) ** 2
        if spread > best_spread:
            best, best_spread = chosen, spread
    counts = {value: best.count(value) for value in best}
    picked = []
    for i in sorted(set(by_reward) | set(by_reward_from_top)):
        if counts.get(rewards[i], 0) > 0:
            counts[rewards[i]] -= 1
            picked.append(i)
    return picked


# Rewards as reward functions give them: few distinct values, signs, a large offset with a small spread, huge scales.
reward_values = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.5, 1.0, -0.5]),
    st.floats(-10, 10),
)
reward_vectors = st.one_of(
    st.lists(reward_values, min_size=2, max_size=9),
    st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=12),
    st.lists(st.floats(1e6, 1e6 + 1e-2), min_size=2, max_size=9),
    st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=8),
)


@st.composite
def rewards_and_count(draw, vectors=reward_vectors):
    rewards = draw(vectors)
    return rewards, draw(st.integers(1, len(rewards)))


@settings(max_examples=600, deadline=None)
@given(rewards_and_count())
def test_max_variance_is_optimal(case):
    rewards, m = case
    chosen = keep(max_variance, rewards, m)
    assert len(set(chosen)) == m
    scale = max(map(abs, rewards)) if max(map(abs, rewards)) > 1e100 else 1.0  # squares of the largest overflow
    scaled = [reward / scale for reward in rewards]
    assert np.var([scaled[i] for i in chosen]) == pytest.approx(largest_variance(scaled, m), rel=1e-9, abs=1e-300)


@settings(max_examples=30, deadline=None)
@given(rewards_and_count(st.lists(reward_values, min_size=12, max_size=12)))
def test_max_variance_is_optimal_for_twelve_rollouts(case):
    rewards, m = case
    variance = np.var([rewards[i] for i in keep(max_variance, rewards, m)])
    assert variance == pytest.approx(largest_variance(rewards, m), rel=1e-9, abs=1e-300)


@settings(max_examples=400, deadline=None)
@given(rewards_and_count(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=10)))
def test_max_variance_breaks_ties_by_fewest_top_rewards_then_lowest_index(case):
    rewards, m = case
    assert keep(max_variance, rewards, m) == best_by_the_tie_rules(rewards, m)


@settings(max_examples=200, deadline=None)
@given(rewards_and_count(), st.integers(0, 2**32))
def test_max_variance_keeps_the_same_rewards_whatever_their_order(case, seed):
    rewards, m = case
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    shuffled = [rewards[i] for i in order]
    kept = sorted(rewards[i] for i in keep(max_variance, rewards, m))
    assert kept == sorted(shuffled[i] for i in keep(max_variance, shuffled, m))


def test_max_variance_on_the_worked_examples():
    assert keep(max_variance, [0.1, 0.9, 0.5, 0.45, 0.0, 1.0, 0.55, 0.6], 4) == [0, 1, 4, 5]
    assert keep(max_variance, [0, 0, 0, 0, 0, 0, 0.1, 1], 4) == [0, 1, 2, 7]  # variance .1875; half and half .1769
    assert keep(max_variance, [0.3, 0.1, 0.2, 0.0, 0.6, 0.5, 0.4], 3) == [1, 3, 4]  # tied with two top ones


@pytest.mark.parametrize(
    ("num_ones", "ones_kept"), [(0, 0), (1, 1), (2, 2), (3, 2), (8, 2), (14, 2), (15, 3), (16, 4)]
)
def test_max_variance_takes_half_ones_as_far_as_there_are_enough(num_ones, ones_kept):
    rewards = [1.0] * num_ones + [0.0] * (16 - num_ones)
    assert sum(rewards[i] for i in keep(max_variance, rewards, 4)) == ones_kept


def test_max_variance_does_not_repeat_the_aliasing_defect_of_the_authors_code():
    # Their multi-GPU program overwrote its own sort order and kept 1 right and 31 wrong rollouts here.
    for num_ones in (32, 48, 97):
        rewards = torch.zeros(1, 128, dtype=torch.float64)
        rewards[0, :num_ones] = 1
        before = rewards.clone()
        assert rewards[0, max_variance(rewards, 32)[0]].sum() == 16
        assert torch.equal(rewards, before)


def test_rounding_does_not_decide_between_tied_splits():
    # In decimals the splits with one and with two top rewards have equal variance.
    assert keep(max_variance, [0.1, 0.2, 0.3, 0.4], 3) == [0, 1, 3]
    assert keep(max_variance, [1.1, 1.2, 1.3, 1.4], 3) == [0, 1, 3]


def test_max_reward_takes_the_highest_and_the_first_among_equals():
    assert keep(max_reward, [0.0, 1.0, 0.5, 1.0, 1.0], 2) == [1, 3]
    assert keep(max_reward, [-3.0, -1.0, -2.0], 2) == [1, 2]


def test_percentile_takes_the_middles_of_equal_shares():
    rewards = [0.7, 0.0, 0.6, 0.1, 0.5, 0.2, 0.4, 0.3]  # positions 1, 3, 5, 7 of the sorted ones
    assert keep(percentile, rewards, 4) == [0, 3, 4, 7]
    assert keep(percentile, rewards, 8) == list(range(8))
    assert keep(percentile, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 3) == [
        1,
        3,
        5,
    ]  # floor(7/6), floor(21/6), floor(35/6)


def test_random_is_uniform_without_replacement():
    generator = torch.Generator().manual_seed(0)
    drawn = selectors.random(torch.zeros(6000, 5), 2, generator=generator)
    assert (drawn[:, 0] < drawn[:, 1]).all()
    pairs = torch.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25)
    pairs = pairs[pairs > 0]
    assert len(pairs) == 10
    assert (pairs - 600).abs().max() < 5 * math.sqrt(600)


def test_random_depends_on_its_generator_alone():
    draws = []
    for _ in range(2):
        torch.rand(3)  # moves the global generator
        draws.append(selectors.random(torch.zeros(4, 9), 3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(*draws)


def test_the_rules_of_gfpo_look_at_lengths():
    lengths = torch.tensor([[7, 3, 9, 3, 2, 4]])
    assert keep(selectors.shortest, [1, 0, 1, 1, NAN, 0], 3, completion_lengths=lengths) == [1, 3, 5]
    assert keep(selectors.shortest, [1, 0, 1, 1, 1, 0], 2, completion_lengths=lengths) == [1, 4]
    # Rewards per token: 1/7, -1/3, 1/9, 1/3, none, 2/4
    rewards = [1, -1, 1, 1, NAN, 2]
    assert keep(selectors.token_efficiency, rewards, 3, completion_lengths=lengths) == [0, 3, 5]
    assert keep(selectors.token_efficiency, [1, 0], 1, completion_lengths=torch.tensor([[0, 5]])) == [0]


def built_in(name):
    """A rule with what the trainer would give it."""
    if name in ("shortest", "token_efficiency"):
        lengths = torch.arange(1, 13)
        return lambda rewards, m: BUILT_IN_SELECTORS[name](
            rewards, m, completion_lengths=lengths[: rewards.shape[1]].expand_as(rewards)
        )
    return BUILT_IN_SELECTORS[name]


@pytest.mark.parametrize("name", BUILT_IN_SELECTORS)
@pytest.mark.parametrize("unscored", [NAN, math.inf, -math.inf])
def test_ineligible_rollouts_come_last(name, unscored):
    selector = built_in(name)
    assert keep(selector, [unscored, 0.4, unscored, 0.9, 0.6], 3) == [1, 3, 4]
    assert {1, 4} < set(keep(selector, [unscored, 0.4, unscored, unscored, 0.6], 3))
    assert len(set(keep(selector, [unscored] * 5, 3))) == 3


def test_ineligible_rollouts_do_not_disturb_the_choice_among_the_others():
    assert keep(max_variance, [NAN, 0.4, 0.9, 0.6], 2) == [1, 2]
    assert keep(percentile, [NAN, 0.0, 0.1, 0.2, 0.3], 2) == [2, 4]


@pytest.mark.parametrize("name", BUILT_IN_SELECTORS)
def test_rows_are_selected_independently_of_each_other(name):
    selector = built_in(name)
    torch.manual_seed(0)
    rewards = torch.rand(20, 7, dtype=torch.float64).round(decimals=1)
    rewards[::3, 2] = NAN
    together = selector(rewards, 3, **({"generator": torch.Generator()} if name == "random" else {}))
    assert together.shape == (20, 3)
    assert together.dtype == torch.int64
    assert (together.diff(dim=1) > 0).all()
    if name != "random":
        assert torch.equal(together, torch.cat([selector(row[None], 3) for row in rewards]))


@pytest.mark.parametrize("num_prompts", [0, 1, 2, 3, 7])
def test_many_prompts_are_selected_as_few_are(num_prompts, monkeypatch):
    rewards = torch.rand(num_prompts, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rewards = rewards.round(decimals=1).masked_fill(rewards > 0.9, NAN)
    together = select(max_variance, rewards, 4)
    monkeypatch.setattr(selectors, "_BLOCK_SIZE", 18)  # two prompts at once
    assert together.shape == (num_prompts, 4)
    assert torch.equal(select(max_variance, rewards, 4), together)


def test_a_rule_gets_the_keywords_that_it_names():
    received = {}

    def rule(rewards, num_selected, *, completion_lengths, bonus=0):
        received.update(lengths=completion_lengths, bonus=bonus)
        return torch.tensor([[0, 1]])

    select(rule, tensor([1, 2, 3]), 2, selector_kwargs={"bonus": 5}, completion_lengths="L", generator="G")
    assert received == {"lengths": "L", "bonus": 5}

    def greedy_rule(rewards, num_selected, **everything):
        received.update(everything)
        return torch.tensor([[0, 1]])

    select(greedy_rule, tensor([1, 2, 3]), 2, completion_lengths="L", generator="G")
    assert received["generator"] == "G"


def test_a_rule_cannot_change_the_rewards_of_the_trainer():
    def rule(rewards, num_selected):
        rewards.zero_()
        return torch.tensor([[0, 1]])

    rewards = tensor([1, 2, 3])
    select(rule, rewards, 2)
    assert rewards.tolist() == [[1, 2, 3]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=2, max_size=8), st.data())
def test_no_rule_keeps_an_ineligible_rollout_while_an_eligible_one_is_left(rewards, data):
    m = data.draw(st.integers(1, len(rewards)))
    choice = data.draw(st.permutations(range(len(rewards))))[:m]
    kept = select(lambda rewards, m: torch.tensor([choice]), tensor(rewards), m)[0].tolist()
    eligible = {i for i, reward in enumerate(rewards) if not math.isnan(reward)}
    assert len(set(kept)) == m
    assert len(eligible & set(kept)) == min(m, len(eligible))
    assert eligible & set(choice) <= set(kept)  # what it chose among the eligible stays
    if set(choice) <= eligible or eligible <= set(choice):
        assert kept == sorted(choice)


def test_selected_indices_are_put_in_their_original_order():
    assert select(lambda rewards, m: torch.tensor([[2, 0]]), tensor([1, 2, 3]), 2).tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ([[0, 1]], "a list"),
        (None, "a NoneType"),
        (torch.tensor([0, 1]), r"shape \(2,\)"),
        (torch.tensor([[0, 1, 2]]), r"shape \(1, 3\)"),
        (torch.tensor([[0.0, 1.0]]), "dtype torch.float32"),
        (torch.tensor([[0, 1]], dtype=torch.int32), "dtype torch.int32"),
        (torch.tensor([[0, 3]]), "indices from 0 to 3"),
        (torch.tensor([[-1, 1]]), "indices from -1 to 1"),
        (torch.tensor([[1, 1]]), r"the row \[1, 1\] \(prompt 0\)"),
    ],
)
def test_what_a_rule_returns_is_checked(returned, complaint):
    def bad_rule(rewards, num_selected):
        return returned

    with pytest.raises(ValueError, match=rf"bad_rule.* returned {complaint}.*\(1, 2\)"):
        select(bad_rule, tensor([1, 2, 3]), 2)


def test_rules_are_found_by_name_path_and_object():
    assert resolve_selector("random") is selectors.random
    assert resolve_selector("trl_pods.selectors.max_reward") is max_reward
    assert resolve_selector(percentile) is percentile


class Rules:
    @staticmethod
    def first(rewards, num_selected):
        return torch.arange(num_selected).expand(len(rewards), -1)

    def __call__(self, rewards, num_selected):
        return self.first(rewards, num_selected)


def test_the_name_of_a_rule_within_a_class_finds_it_again_and_that_of_an_object_is_its_class(tmp_path):
    config = PODSGRPOConfig(output_dir=str(tmp_path), selector=Rules.first, use_cpu=True, bf16=False)
    assert config.to_dict()["selector"] == f"{__name__}.Rules.first"
    assert resolve_selector(config.to_dict()["selector"]) is Rules.first
    assert selector_name(Rules()) == f"{__name__}.Rules"
    assert selector_name(functools.partial(percentile)) == "functools.partial"


@pytest.mark.parametrize(
    ("selector", "selector_kwargs", "complaint"),
    [
        ("best", None, "selector='best'"),
        ("no_such_package.rule", None, "selector='no_such_package.rule' cannot be imported"),
        ("trl_pods.selectors.no_such_rule", None, "no_such_rule.*cannot be imported"),
        ("my rules.rule", None, "selector='my rules.rule' cannot be imported"),
        ("math.pi", None, "cannot be called"),
        (7, None, "selector=7 is a int"),
        ("max_variance", {"alpha": 1}, "alpha"),
        ("max_variance", {"generator": 1}, r"sets \['generator'\]"),
        (lambda rewards: None, None, "cannot be called as"),
        (lambda rewards, num_selected, needed: None, None, "needed"),
    ],
)
def test_wrong_rules_are_refused_with_a_remedy(selector, selector_kwargs, complaint):
    with pytest.raises(ValueError, match=complaint):
        resolve_selector(selector, selector_kwargs)
