"""
Runs under torchrun, all cases in one process group: `torchrun --nproc_per_node 2 failing_cases.py FOLDER CASE ...`.

In each case something fails on some process. What each process raises goes to FOLDER/rank<N>.json, after every case;
the assertions are in test_failures.py.
"""

import contextlib
import ctypes
import json
import os
import re
import sys
import threading
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rig import F1, Script, make_trainer
from torch.distributed import destroy_process_group

from trl_pods import reward_deadline


RANK = int(os.environ.get("RANK", 0))
SETTINGS = {"num_rollouts": 8, "num_generations": 4, "per_device_train_batch_size": 2}


def scoring(function, on, is_async):
    """A reward function that does something else on one process."""

    def judge(rollout, **columns):
        return function(rollout) if on == RANK else [F1.rewards[i] for i in rollout]

    async def judge_async(rollout, **columns):
        return judge(rollout)

    return judge_async if is_async else judge


def breaks(rollout):
    raise ZeroDivisionError("no score today")


def leaves(rollout):
    sys.exit("gone")


def too_few(rollout):
    return [0.0] * (len(rollout) - 1)


def no_numbers(rollout):
    return ["good"] * len(rollout)


def sleeps(rollout):
    time.sleep(1000)


def sleeps_and_swallows(rollout):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(1000)


def backtracks(rollout):
    re.match("(a+)+$", "a" * 60 + "b")  # for ages, without letting another thread run


def locks_up(rollout):
    """Waits in C code that no signal ends and that keeps the interpreter's lock."""
    mutex = ctypes.create_string_buffer(128)
    lock = ctypes.PyDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)


def rollouts_break(prompts, trainer):
    if RANK == 1:
        raise ZeroDivisionError("no rollouts today")
    return Script([F1]).rollout_func(prompts, trainer)


def rollouts_lack_log_probs(prompts, trainer):
    output = Script([F1]).rollout_func(prompts, trainer)
    if RANK == 1:
        del output["logprobs"]
    return output


def rollouts_are_too_few(prompts, trainer):
    output = Script([F1]).rollout_func(prompts, trainer)
    return {name: values[RANK:] for name, values in output.items()}


def rollouts_cannot_be_pickled(prompts, trainer):
    output = Script([F1]).rollout_func(prompts, trainer)
    return {**output, "client": [threading.Lock() if RANK == 1 else None] * len(prompts)}


TRAINERS = []


def gathers_and_sleeps(rollout, **columns):
    TRAINERS[-1].accelerator.gather(torch.tensor(1.0))  # a statistic over all processes
    return sleeps(rollout) if RANK == 1 else [F1.rewards[i] for i in rollout]


def comes_late(calculate_rewards, seconds):
    """Log-probs that take longer on one process."""

    def calculate_late(*args):
        time.sleep(seconds * RANK)
        return calculate_rewards(*args)

    return calculate_late


def takes_a_second(rollout):
    time.sleep(1)
    return [F1.rewards[i] for i in rollout]


def failing_rule(rewards, num_selected):
    raise ZeroDivisionError("no rule today")


def reward(function, on, is_async=False, **settings):
    return {"trainer_kwargs": {"reward_funcs": [scoring(function, on, is_async)]}, **SETTINGS, **settings}


def rollouts(function, **settings):
    return {"trainer_kwargs": {"rollout_func": function}, **SETTINGS, **settings}


def saving_breaks(output_dir):
    if RANK == 1:
        raise OSError("disk full")


PLAIN = {"num_rollouts": None}
LIMIT = {"reward_timeout": 1.5}

CASES = {
    "reward_raises_on_1": reward(breaks, on=1),
    "reward_raises_on_0": reward(breaks, on=0),
    "async_reward_raises": reward(breaks, on=1, is_async=True),
    "reward_exits": reward(leaves, on=1),
    "reward_raises_without_down_sampling": reward(breaks, on=1, **PLAIN),
    "reward_raises_in_evaluation": reward(breaks, on=1),
    "too_few_rewards": reward(too_few, on=1),
    "too_few_rewards_on_0_in_evaluation": reward(too_few, on=0),
    "no_numbers": reward(no_numbers, on=1, **PLAIN),
    "rollouts_raise": rollouts(rollouts_break),
    "rollouts_raise_without_down_sampling": rollouts(rollouts_break, **PLAIN),
    "rollouts_raise_in_evaluation": rollouts(rollouts_break),
    "rollouts_lack_log_probs": rollouts(rollouts_lack_log_probs),
    "rollouts_are_too_few": rollouts(rollouts_are_too_few),
    "rollouts_are_too_few_without_down_sampling": rollouts(rollouts_are_too_few, **PLAIN),
    "rollouts_cannot_be_pickled": rollouts(rollouts_cannot_be_pickled, selector="max_reward"),
    "failing_rule": SETTINGS | {"selector": failing_rule},
    "saving_raises": SETTINGS | {"save_strategy": "steps", "save_steps": 1},
    "reward_sleeps": reward(sleeps, on=1, **LIMIT),
    "reward_sleeps_on_0_in_evaluation": reward(sleeps, on=0, **LIMIT),
    "async_reward_sleeps": reward(sleeps, on=1, is_async=True, **LIMIT),
    "reward_swallows": reward(sleeps_and_swallows, on=1, **LIMIT, **PLAIN),
    "reward_backtracks": reward(backtracks, on=1, **LIMIT),
    "reward_gathers_and_sleeps": {"trainer_kwargs": {"reward_funcs": [gathers_and_sleeps]}, **SETTINGS, **LIMIT},
    "no_failure_where_one_scores_late": reward(takes_a_second, on=1, **LIMIT, **PLAIN),
    "no_failure": reward(breaks, on=None, **LIMIT, max_steps=3),
    "reward_locks_up": reward(locks_up, on=1, **LIMIT),
}


def run(folder, name):
    settings = dict(CASES[name])
    kwargs = dict(settings.pop("trainer_kwargs", {}))
    script = Script([F1])
    if name.endswith("in_evaluation"):
        kwargs["eval_dataset"] = script.dataset()
        settings["per_device_eval_batch_size"] = 2
    trainer = make_trainer(folder / name, script, trainer_kwargs=kwargs, **settings)
    TRAINERS.append(trainer)
    if name.endswith("late"):  # later than the others would wait for it to score
        trainer._calculate_rewards = comes_late(trainer._calculate_rewards, seconds=3)
    if name.startswith("saving"):
        trainer._save_rng_state = saving_breaks
    try:
        if name.endswith("in_evaluation"):
            trainer.evaluate()
        else:
            trainer.train()
    except (Exception, SystemExit) as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None, "message": ""}


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    reward_deadline.GRACE = 4.0
    results = {}
    for name in names:
        started = time.monotonic()
        results[name] = run(folder, name) | {"seconds": time.monotonic() - started}
        (folder / f"rank{RANK}.json").write_text(json.dumps(results))
    if "reward_locks_up" in names:
        time.sleep(60)  # the other process is killed, and then the launcher ends this one
    destroy_process_group()


if __name__ == "__main__":
    main()
