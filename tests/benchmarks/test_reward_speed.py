import os
import time

import pytest
from math_texts import make_texts
from measuring import alternating_seconds
from trl.rewards import accuracy_reward

from trl_pods.rewards import fast_accuracy_reward, math_accuracy_reward, worker_pool


pytestmark = pytest.mark.benchmark


@pytest.fixture
def two_cores(monkeypatch):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    monkeypatch.setattr(worker_pool, "_shared", None)  # workers of these cores
    yield
    os.sched_setaffinity(0, before)


def test_accuracy_rewards_against_that_of_trl(two_cores, report):
    functions = {"trl": accuracy_reward, "fast": fast_accuracy_reward, "math": math_accuracy_reward}
    steps = [make_texts(seed) for seed in range(6)]
    results = {name: [] for name in functions}

    def score(name):
        # Each step has new texts, as in training.
        completions, golds, _ = steps[len(results[name])]
        results[name].append(functions[name](completions, golds))

    start = time.perf_counter()
    score("fast")
    first = time.perf_counter() - start
    score("math")
    score("trl")
    seconds = alternating_seconds({name: lambda name=name: score(name) for name in functions})

    assert results["fast"] == results["trl"]
    for rewards, (_, _, is_gold) in zip(results["math"], steps, strict=True):
        assert {reward for reward, same in zip(rewards, is_gold, strict=True) if same} == {1.0}
        assert 0.3 < rewards.count(0.0) / len(rewards) < 0.7
    size = "1,024 completions of 16 prompts, two cores"
    report(f"fast_accuracy_reward, {size}", f"{seconds['trl'] / seconds['fast']:.1f} times as fast as TRL's")
    report("  the first call of a process", f"{seconds['trl'] / first:.1f} times")
    report(f"math_accuracy_reward, {size}", f"{seconds['trl'] / seconds['math']:.1f} times as fast as TRL's")
