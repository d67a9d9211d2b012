import contextlib
import signal
import subprocess
import sys
import time

import pytest

from trl_pods import reward_deadline
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


def test_a_process_whose_watcher_dies_is_left_alone_and_the_next_scoring_has_another(monkeypatch):
    monkeypatch.setattr(reward_deadline, "GRACE", 0.2)
    deadline = RewardDeadline(seconds=0.3)
    with deadline.watch("f"):
        deadline._watcher.kill()
        deadline._watcher.wait()
    time.sleep(1.5)  # longer than the limit and the grace: an update
    with pytest.raises(TimeoutError), deadline.watch("f"):
        time.sleep(100)


def test_of_scorings_one_within_the_other_each_has_its_limit(monkeypatch):
    monkeypatch.setattr(reward_deadline, "GRACE", 0.2)
    outer, inner = RewardDeadline(seconds=0.5), RewardDeadline(seconds=60)
    with pytest.raises(TimeoutError, match="reward functions outer took"), outer.watch("outer"), inner.watch("inner"):
        time.sleep(100)
    with outer.watch("outer"):
        with inner.watch("inner"):
            pass
        outer.stop()
        time.sleep(1)
    outer, inner = RewardDeadline(seconds=60), RewardDeadline(seconds=0.2)
    with outer.watch("outer"), contextlib.suppress(TimeoutError), inner.watch("inner"):
        time.sleep(100)
    assert inner._expired
    assert not outer._expired


THREAD_THAT_HANGS = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
for _ in range(2):
    with contextlib.suppress(TimeoutError), deadline.watch("f"):
        pool.submit(time.sleep, 60).result()
time.sleep(1.5)
print("goes on")
"""

DIES_AFTER_A_FORK = """
with deadline.watch("f"):
    pass
if os.fork() == 0:
    time.sleep(3)
    os._exit(0)
with deadline.watch("f"):
    os.kill(os.getpid(), signal.SIGKILL)
"""

FORKS_AFTER_A_TIMEOUT = """
import multiprocessing
with contextlib.suppress(TimeoutError), deadline.watch("f"):
    time.sleep(60)
fork = multiprocessing.get_context("fork").Process(target=print)
fork.start()
fork.join()
time.sleep(1.5)
print("goes on")
"""


@pytest.mark.parametrize(
    ("script", "status", "printed", "is_killed"),
    [
        (THREAD_THAT_HANGS, -signal.SIGKILL, "goes on", True),  # at its exit, not before
        (DIES_AFTER_A_FORK, -signal.SIGKILL, "", False),  # by itself: its id may be that of another process by now
        (FORKS_AFTER_A_TIMEOUT, 0, "goes on", False),
    ],
)
def test_only_a_process_that_hangs_is_killed(script, status, printed, is_killed):
    start = """
import contextlib, os, signal, time
from trl_pods import reward_deadline
reward_deadline.GRACE = 0.4
deadline = reward_deadline.RewardDeadline(0.4)
"""
    run = subprocess.run(
        [sys.executable, "-c", start + script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (status, printed)
    assert ("Process 0 is killed" in run.stderr) == is_killed
    assert "Error" not in run.stderr
