"""
Runs under torchrun, one process group for all cases: `torchrun --nproc_per_node 2 cases.py FOLDER`.

Each process writes what it saw of each case to FOLDER/rank<N>.json; the assertions are in test_two_processes.py.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch


sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from collectives import recorded_collectives
from launching import give_up_in_time
from rig import F1, FIRST_WORD, ForwardCounter, Group, Script, make_trainer, number_of_distinct_words, step_logs
from test_tools_and_environments import Board, ScriptedPODS, make_tool_tokenizer
from test_tools_and_environments import train as train_with_tools
from test_vision import NONE, ONE, TWO, ReplayPODS
from test_vision import train as train_with_pictures
from torch.distributed import destroy_process_group
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer, training_clock


# Three groups of four over two processes: the middle one straddles.
STRADDLING = [
    Group(rewards, [2 + (4 * number + i) % 5 for i in range(4)])
    for number, rewards in enumerate([[0, 0.2, 0.1, 1], [0.4, 0.5, 0, 1], [1, 0.3, 0.6, 0]])
]


class Spy(PODSGRPOTrainer):
    """Notes which rollouts it trains on, as (prompt, rollout, advantage), and how many tokens of each."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        prompts = output["prompt_ids"][:, 0] - 10
        rollouts = torch.div(output["completion_ids"][:, 0] - FIRST_WORD, 7, rounding_mode="floor")
        advantages = output["advantages"]
        self.tokens = (output["completion_mask"] * output.get("tool_mask", 1)).sum(dim=1).tolist()
        self.trained = list(zip(prompts.tolist(), rollouts.tolist(), advantages.tolist(), strict=True))
        return output


def checksum(trainer):
    return [parameter.double().sum().item() for parameter in trainer.model.parameters()]


def digest(trainer):
    """Tells weights apart that differ in any bit."""
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in trainer.model.parameters())
    return hashlib.sha256(weights).hexdigest()


def run(folder, script, trainer_class=Spy, **settings):
    trainer = make_trainer(folder, script, trainer_class, **settings)
    counter = ForwardCounter(trainer.model)
    trainer.train()
    return {
        "logs": step_logs(trainer),
        "calls": script.calls,
        "trained": getattr(trainer, "trained", None),
        "tokens": getattr(trainer, "tokens", None),
        "weights": checksum(trainer),
        "digest": digest(trainer),
        "rows_with_grad": counter.rows(with_grad=True),
        "max_steps": trainer.state.max_steps,
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
    }


def straddling_group(folder):
    return run(
        folder,
        Script(STRADDLING),
        num_rollouts=4,
        num_generations=2,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        log_completions=True,
        num_completions_to_print=0,
    )


def a_demand_for_signal(folder):
    # The standard deviations of the groups are .457, .411 and .427.
    return run(
        folder,
        Script(STRADDLING),
        num_rollouts=4,
        num_generations=2,
        per_device_train_batch_size=3,
        min_reward_std=0.45,
    )


def one_group_over_all_processes(folder):
    return run(
        folder,
        Script([F1]),
        num_rollouts=8,
        num_generations=2,
        per_device_train_batch_size=1,
    )


def f1(folder):
    return run(folder, Script([F1]), num_rollouts=8, num_generations=4, per_device_train_batch_size=2)


def one_right_of_sixteen(folder):
    script = Script([Group([0] * 11 + [1] + [0] * 4)])
    return run(folder, script, num_rollouts=16, num_generations=4, per_device_train_batch_size=2)


def an_epoch_of_two_iterations(folder):
    return an_epoch(folder, num_iterations=2)


def an_epoch(folder, **settings):
    return run(
        folder,
        Script([Group([0, 1, 0, 1, 0, 0, 1, 1])] * 8),
        num_rollouts=8,
        num_generations=2,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=-1,
        num_train_epochs=1,
        **settings,
    )


def completions_tables(folder):
    return run(
        folder,
        Script([F1, F1]),
        num_rollouts=8,
        num_generations=4,
        per_device_train_batch_size=4,
        max_steps=3,
        log_completions=True,
        num_completions_to_print=2,
    )


def environments(folder):
    Board.made = []
    trainer = train_with_tools(
        folder,
        make_tool_tokenizer(),
        ScriptedPODS,
        PODSGRPOConfig,
        {"num_rollouts": 4, "per_device_train_batch_size": 2},
        tool="put",
        everyone_calls=True,
        trainer_settings={"environment_factory": Board, "reward_funcs": None},
    )
    return {
        "turns": [board.turns for board in Board.made],
        "resets": [board.num_resets for board in Board.made],
        "logs": step_logs(trainer),
        "digest": digest(trainer),
    }


def extra_columns_of_one_process(folder):
    script = Script([F1, F1])

    def reward(completions, rollout, log_extra, **kwargs):
        if os.environ["RANK"] == "1":
            log_extra("note", [f"rollout {i}" for i in rollout])
        return [F1.rewards[i] for i in rollout]

    return run(
        folder,
        script,
        num_rollouts=8,
        num_generations=4,
        per_device_train_batch_size=4,
        log_completions=True,
        num_completions_to_print=0,
        trainer_kwargs={"reward_funcs": [reward]},
    )


def masks_of_one_process(folder):
    script = Script(STRADDLING)

    def rollout_func(prompts, trainer):
        output = script.rollout_func(prompts, trainer)
        if os.environ["RANK"] == "1":
            output["env_mask"] = [[1] * (len(ids) - 1) + [0] for ids in output["completion_ids"]]
        return output

    return run(
        folder,
        script,
        num_rollouts=4,
        num_generations=2,
        per_device_train_batch_size=3,
        trainer_kwargs={"rollout_func": rollout_func},
    )


def random_rule(folder):
    return run(
        folder,
        Script([F1]),
        num_rollouts=8,
        num_generations=4,
        per_device_train_batch_size=2,
        selector="random",
        max_steps=3,
        learning_rate=1e-2,
    )


SAMPLED = {"rollout_func": None, "reward_funcs": [number_of_distinct_words]}
EQUAL = {"num_generations": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2}


def for_three_rounds(folder, *args, **settings):
    """By number of iterations."""
    return [
        run(
            folder,
            Script([F1] * 3),
            *args,
            trainer_kwargs=SAMPLED.copy(),
            num_iterations=mu,
            max_steps=3 * mu,
            **EQUAL,
            **settings,
        )
        for mu in (1, 2)
    ]


def without_down_sampling(folder):
    return for_three_rounds(folder, PODSGRPOTrainer)


def plain_grpo(folder):
    return for_three_rounds(folder, GRPOTrainer, config_class=GRPOConfig)


def with_pictures(folder, pictures, batch_size):
    trainer = train_with_pictures(
        folder / f"process{os.environ.get('RANK', 0)}",
        "qwen2_vl",
        ReplayPODS,
        pictures,
        PODSGRPOConfig,
        num_rollouts=4,
        per_device_train_batch_size=batch_size,
    )
    logged = [[picture.size for picture in pictures or []] for pictures in trainer._logs["images"]]
    return {"logs": step_logs(trainer), "weights": checksum(trainer), "pictures": logged}


def straddling_pictures(folder, batch_size=3):
    return with_pictures(folder, [ONE, TWO, ONE], batch_size)


def pictures_of_one_process(folder, batch_size=2):
    return with_pictures(folder, [TWO, NONE], batch_size)


def uneven_shares(folder):
    try:
        run(folder, Script([F1]), num_rollouts=7, num_generations=2, per_device_train_batch_size=1)
    except ValueError as error:
        return {"message": str(error)}


class Slow(TrainerCallback):
    """On the main process a step lasts 10 seconds, on the others 100; notes when there was an evaluation."""

    def __init__(self):
        self.now = 0.0
        self.evaluated = []

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.now += 10 if os.environ["RANK"] == "0" else 100

    def on_evaluate(self, args, state, *_, **kwargs):
        self.evaluated.append(state.global_step)


def clocks_that_differ(folder):
    slow = Slow()
    with patch.object(training_clock, "time", SimpleNamespace(perf_counter=lambda: slow.now)):
        trainer = make_trainer(
            folder,
            Script([F1]),
            num_rollouts=8,
            num_generations=4,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=2,
            max_steps=20,
            max_train_minutes=1.0,
            eval_minutes=0.3,
            trainer_kwargs={"eval_dataset": Script([F1]).dataset()},
        )
        trainer.add_callback(slow)
        trainer.train()
    return {
        "steps": trainer.state.global_step,
        "evaluated": slow.evaluated,
        "seconds": trainer.training_clock.read(),
        "logged": [entry["time/train"] for entry in trainer.state.log_history if "loss" in entry],
    }


class Asks(TrainerCallback):
    """Goes by the clock itself, as the accuracy on held-out problems does; notes after which steps it is told to."""

    def __init__(self, clock, minutes):
        self.clock, self.minutes = clock, minutes
        self.told = []

    def on_step_end(self, args, state, *_, **kwargs):
        if self.clock.passed(self.minutes):
            self.told.append(state.global_step)


def a_clock_without_limits(folder):
    """By what is asked of it."""
    seen = []
    for minutes in (None, 0.3):
        slow = Slow()
        with (
            patch.object(training_clock, "time", SimpleNamespace(perf_counter=lambda slow=slow: slow.now)),
            recorded_collectives() as collectives,
        ):
            trainer = make_trainer(
                folder, Script([F1]), num_rollouts=8, num_generations=4, per_device_train_batch_size=2, max_steps=4
            )
            asks = Asks(trainer.training_clock, minutes)
            trainer.add_callback(slow)
            trainer.add_callback(asks)
            trainer.train()
        exchanged = [call for call in collectives if call["caller"] == "trl_pods._of_main_process"]
        seen.append({"told": asks.told, "exchanges": len(exchanged)})
    return seen


CASES = [
    straddling_group,
    a_demand_for_signal,
    one_group_over_all_processes,
    f1,
    one_right_of_sixteen,
    an_epoch,
    an_epoch_of_two_iterations,
    completions_tables,
    environments,
    extra_columns_of_one_process,
    masks_of_one_process,
    random_rule,
    without_down_sampling,
    plain_grpo,
    straddling_pictures,
    pictures_of_one_process,
    uneven_shares,
    clocks_that_differ,
    a_clock_without_limits,
]


def main():
    give_up_in_time()
    folder = Path(sys.argv[1])
    results = {case.__name__: case(folder / case.__name__) for case in CASES}
    (folder / f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        destroy_process_group()


if __name__ == "__main__":
    main()
