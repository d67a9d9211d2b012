"""2,000 steps with the tiny model, under torchrun: `torchrun --nproc_per_node W long_run.py FOLDER`.

Each process writes samples of itself to FOLDER/rank<N>.json; the assertions are in test_long_runs.py.
"""

import json
import os
import sys
import time
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import torch
from launching import give_up_in_time
from rig import Group, Script, make_trainer, number_of_distinct_words
from torch.distributed import destroy_process_group
from transformers import TrainerCallback


STEPS = 2000
EVERY = 50  # steps between samples, and between logs


class Sampler(TrainerCallback):
    """Every `EVERY` steps: memory, time of the processor, and how much the trainer holds for its logs."""

    def __init__(self):
        self.trainer = None
        self.samples = []
        self.process = psutil.Process()
        self.seconds = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY:
            return
        before, self.seconds = self.seconds, time.process_time()
        columns = [self.trainer._logs[name] for name in ("prompt", "completion", "advantages", "images")]
        columns += [*self.trainer._logs["rewards"].values(), *self.trainer._logs["extra"].values()]
        self.samples.append(
            {
                "step": state.global_step,
                "megabytes": self.process.memory_info().rss / 2**20,
                # Not by the clock, which other programs on the machine would slow down.
                "milliseconds_per_step": 1000 * (self.seconds - before) / EVERY,
                "rows_in_logs": max(map(len, columns)),
                "values_in_metrics": max(map(len, self.trainer._metrics["train"].values())),
                "pending": len(self.trainer._pending_extra_logs) + len(self.trainer._pending_metrics),
            }
        )


def noted(completion_ids, log_extra, log_metric, **kwargs):
    rewards = number_of_distinct_words(completion_ids)
    log_extra("words", rewards)
    log_metric("words", sum(rewards) / len(rewards))
    return rewards


def main():
    give_up_in_time()
    folder, world = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    sampler = Sampler()
    trainer = make_trainer(
        folder / "run",
        Script([Group([])] * 100),  # prompts alone: the model generates
        trainer_kwargs={"rollout_func": None, "reward_funcs": [noted]},
        num_rollouts=8,
        num_generations=4,
        # Three groups: with two processes one straddles.
        per_device_train_batch_size=12 // world,
        max_completion_length=6,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=EVERY,
        log_completions=True,
        num_completions_to_print=0,
    )
    sampler.trainer = trainer
    trainer.add_callback(sampler)
    trainer.train()
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(sampler.samples))
    if torch.distributed.is_initialized():
        destroy_process_group()


if __name__ == "__main__":
    main()
