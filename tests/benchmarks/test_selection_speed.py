import math
import time

import pytest
import torch
from measuring import alternating_seconds

from trl_pods.selectors import max_variance, select


pytestmark = pytest.mark.benchmark

# All is done by one thread, so the time of the processor is measured, which what else runs does not change.

NUM_PROMPTS, NUM_ROLLOUTS, NUM_SELECTED = 1024, 256, 64


@pytest.fixture(autouse=True)
def one_core():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_rewards(num_rollouts, decimals=None):
    generator = torch.Generator().manual_seed(num_rollouts)
    rewards = torch.rand(NUM_PROMPTS, num_rollouts, dtype=torch.float64, generator=generator)
    return rewards if decimals is None else rewards.round(decimals=decimals)


def try_every_split(rewards, num_selected):
    """The straightforward way: of each prompt the variance of each split of its sorted rewards."""
    chosen = []
    for row in rewards:
        order = row.argsort()
        splits = [torch.cat([order[: num_selected - k], order[len(order) - k :]]) for k in range(num_selected + 1)]
        chosen.append(max(splits, key=lambda split: torch.var(row[split])))
    return torch.stack(chosen)


def variances(rewards, indices):
    return rewards.gather(1, indices).var(dim=1)


@pytest.mark.parametrize(("kind", "decimals"), [("all different", None), ("of one decimal", 1), ("binary", 0)])
def test_selection_against_trying_every_split(kind, decimals, report):
    rewards = make_rewards(NUM_ROLLOUTS, decimals)
    best = variances(rewards, try_every_split(rewards, NUM_SELECTED))
    torch.testing.assert_close(variances(rewards, max_variance(rewards, NUM_SELECTED)), best, rtol=1e-9, atol=0)
    seconds = alternating_seconds(
        {
            "baseline": lambda: try_every_split(rewards, NUM_SELECTED),
            "rule": lambda: max_variance(rewards, NUM_SELECTED),
            "checked": lambda: select(max_variance, rewards, NUM_SELECTED),
        },
        clock=time.process_time,
    )
    size = f"{NUM_PROMPTS:,} prompts, n = {NUM_ROLLOUTS}, m = {NUM_SELECTED}, rewards {kind}, one core"
    report(f"max_variance, {size}", f"{seconds['baseline'] / seconds['rule']:.0f} times as fast as every split tried")
    report("  the same with its checks (select)", f"{seconds['baseline'] / seconds['checked']:.0f} times")


def test_growth_of_selection_with_the_rollouts(report):
    rewards = {num_rollouts: make_rewards(num_rollouts) for num_rollouts in (256, 512, 1024, 2048, 4096)}
    for values in rewards.values():  # two prompts of each size suffice to see that the results are right
        best = variances(values[:2], try_every_split(values[:2], NUM_SELECTED))
        torch.testing.assert_close(variances(values[:2], max_variance(values, NUM_SELECTED)[:2]), best)
    seconds = alternating_seconds(
        {n: lambda values=values: max_variance(values, NUM_SELECTED) for n, values in rewards.items()},
        repeats=9,
        clock=time.process_time,
    )
    for n in rewards:
        expected = n * math.log2(n) / (256 * math.log2(256))
        report(
            f"max_variance, n = {n:,} against n = 256",
            f"{seconds[n] / seconds[256]:.1f} times the time; n log n: {expected:.1f}",
        )
