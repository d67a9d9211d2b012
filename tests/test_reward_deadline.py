import contextlib
import signal
import time

import pytest

from trl_pods.reward_deadline import RewardDeadline
from trl_pods.rewards import math_accuracy_reward


def test_a_scoring_in_time_is_left_alone_and_the_next_has_the_whole_limit():
    deadline = RewardDeadline(seconds=0.6)
    for _ in range(3):
        with deadline.watch("f"):
            time.sleep(0.3)
    with pytest.raises(TimeoutError, match="process 0 the reward functions f took longer"), deadline.watch("f"):
        time.sleep(100)
    with deadline.watch("f"):
        time.sleep(0.3)


def test_the_limit_ends_where_the_scoring_is_done():
    deadline = RewardDeadline(seconds=0.3)
    with deadline.watch("f"):
        deadline.stop()
        time.sleep(0.6)  # waiting for other processes


def test_an_exception_of_a_reward_function_passes_unchanged():
    with pytest.raises(KeyError, match="mine"), RewardDeadline(seconds=10).watch("f"):
        raise KeyError("mine")


def test_a_reward_function_that_swallows_the_interruption_is_ended_when_it_returns():
    deadline = RewardDeadline(seconds=0.3)

    def score():
        with deadline.watch("f"), contextlib.suppress(BaseException):
            time.sleep(100)

    with pytest.raises(TimeoutError, match="reward_timeout=0.3 s"):
        score()


def test_a_late_signal_is_not_taken_for_the_next_scoring():
    with RewardDeadline(seconds=10).watch("f"):
        signal.raise_signal(signal.SIGVTALRM)
    signal.raise_signal(signal.SIGVTALRM)


def test_math_verify_keeps_its_own_alarm():
    alarm, completions = signal.getsignal(signal.SIGALRM), ["<answer>4</answer>", "<answer>5</answer>"]
    with RewardDeadline(seconds=60, process=3).watch("f"):
        assert math_accuracy_reward(completions=completions, solution=["4", "4"]) == [1.0, 0.0]
    assert signal.getsignal(signal.SIGALRM) is alarm


def test_the_process_that_keeps_the_time_ends_with_the_one_it_watches():
    deadline = RewardDeadline(seconds=60)
    with deadline.watch("f"):
        watcher = deadline._watcher
    assert watcher.poll() is None
    watcher.stdin.close()
    assert watcher.wait(timeout=20) == 0
    with deadline.watch("f"):  # another one takes its place
        assert deadline._watcher is not watcher
