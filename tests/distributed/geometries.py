"""
Shapes of a round, each for the numbers of processes that can share it. Runs under torchrun:
`torchrun --nproc_per_node W geometries.py FOLDER`.

Whatever the number of processes, a shape has the same prompts, rollouts and kept rows. Each process writes what it saw
to FOLDER/rank<N>.json, and its weights beside; the assertions are in test_geometries.py.
"""

import itertools
import json
import os
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from cases import Spy
from collectives import recorded_collectives
from launching import give_up_in_time
from rig import ForwardCounter, Group, Script, make_config, make_trainer, step_logs, weights
from torch.distributed import destroy_process_group

from trl_pods.row_exchange import deal_out


ROUNDS = 2


@dataclass(frozen=True)
class Geometry:
    """`prompts` of a round, `n` rollouts of each, `m` of them kept."""

    prompts: int
    n: int
    m: int
    worlds: tuple[int, ...]  # numbers of processes that can share a round
    loss_type: str = "dapo"
    micro_steps: int = 1  # in which a round is trained on
    updates: int = 1  # optimizer steps in these
    selector: str = "max_variance"
    lengths: tuple[int, int] = (2, 8)  # the shortest and the longest completion

    def batch_size(self, world: int) -> int:
        return self.prompts * self.m // (world * self.micro_steps)

    def groups(self) -> list[Group]:
        """For every round, with rewards without ties."""
        numbers = random.Random(f"{self.prompts} {self.n}")
        return [
            Group([numbers.random() for _ in range(self.n)], [numbers.randint(*self.lengths) for _ in range(self.n)])
            for _ in range(ROUNDS * self.prompts)
        ]

    def settings(self, world: int) -> dict:
        return {
            "num_rollouts": self.n,
            "num_generations": self.m,
            "per_device_train_batch_size": self.batch_size(world),
            "gradient_accumulation_steps": self.micro_steps // self.updates,
            "steps_per_generation": self.micro_steps,
            "loss_type": self.loss_type,
            "selector": self.selector,
            "log_completions": True,
            "num_completions_to_print": 0,
            # The second pass over a round has other weights than made it: a loss that is not 0 by construction.
            "num_iterations": 2,
            "max_steps": ROUNDS * 2 * self.updates,
            # Adam would make a full step of a gradient that is nothing but rounding.
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "learning_rate": 0.5,
        }


GEOMETRIES = {
    # Up to three processes hold several groups each; with four a group lies on two of them.
    "several_groups": Geometry(6, n=6, m=2, worlds=(1, 2, 3, 4)),
    # n is no multiple of m. Three processes hold a group each; with two or four, groups straddle.
    **{
        f"straddling_{loss_type}": Geometry(3, n=12, m=8, worlds=(1, 2, 3, 4), loss_type=loss_type)
        for loss_type in ("dapo", "grpo", "dr_grpo")
    },
    "one_group": Geometry(1, n=8, m=4, worlds=(1, 2, 4)),
    "one_group_over_three": Geometry(1, n=9, m=6, worlds=(1, 3)),
    "coprime": Geometry(4, n=5, m=3, worlds=(1, 2, 4)),
    **{
        f"accumulation_{loss_type}": Geometry(6, n=6, m=4, worlds=(1, 2, 3, 4), micro_steps=2, loss_type=loss_type)
        for loss_type in ("dapo", "grpo", "dr_grpo")
    },
    "two_updates": Geometry(6, n=6, m=4, worlds=(1, 2, 3, 4), micro_steps=2, updates=2),
    # For test_traffic.py.
    "long": Geometry(9, n=8, m=4, worlds=(1, 2, 4), lengths=(20, 60)),
    "random_rule": Geometry(3, n=12, m=8, worlds=(1, 2, 3, 4), selector="random"),
}

# Settings of which some cannot be shared out, whatever the number of processes.
SETTINGS = [
    {"num_rollouts": n, "num_generations": m, "per_device_train_batch_size": b, "gradient_accumulation_steps": a}
    for m in (2, 3, 4, 6)
    for n in (m, m + 1, m + 2, 2 * m, 3 * m - 1)
    for b in (1, 2, 3, 4, 6)
    for a in (1, 2)
]


class Recorder(Spy):
    """Keeps the rows that it trained on of every round."""

    def __init__(self, *args, **kwargs):
        self.rounds = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.rounds.append(self.trained)
        return output


def run(folder: Path, name: str, geometry: Geometry, world: int) -> dict:
    script = Script(geometry.groups())
    trainer = make_trainer(folder / name, script, Recorder, **geometry.settings(world))
    before, forwards = weights(trainer), ForwardCounter(trainer.model)
    with recorded_collectives() as collectives:
        trainer.train()
    after = weights(trainer)
    torch.save(after, folder / f"{name}-{trainer.accelerator.process_index}.pt")
    return {
        "rounds": trainer.rounds,
        "generated": list(itertools.chain(*script.calls)),
        "logs": step_logs(trainer),
        "forwards": forwards.calls,
        "moved": max((after[key] - before[key]).abs().max().item() for key in after),
        "collectives": collectives,
    }


def refusal(folder: Path, settings: dict) -> str | None:
    try:
        make_config(folder, **settings)
    except ValueError as error:
        return str(error)
    return None


def refusals(folder: Path) -> list:
    """For each of SETTINGS: why it is refused, and by setting that the message names, why that is refused too."""
    seen = []
    for settings in SETTINGS:
        message = refusal(folder, settings)
        remedies = dict(re.findall(r"(\w+)=(\d+)", message.split("Use ")[1])) if message else {}
        seen.append([message, {key: refusal(folder, settings | {key: int(value)}) for key, value in remedies.items()}])
    return seen


def wrong_shares(process: int, world: int) -> list:
    """Shares of kept rows that went wrong, of 100 draws, some of rows far from where they go."""
    wrong = []
    for draw in range(100):
        numbers = random.Random(draw)
        num_local = numbers.randint(1, 9)
        share = numbers.randint(1, num_local)
        kept = sorted(numbers.sample(range(num_local * world), share * world))
        rows = {number: f"row {number}" * (number % 3) for number in kept if number // num_local == process}
        dealt = deal_out(rows, kept, num_local, process, world)
        if dealt != [f"row {number}" * (number % 3) for number in kept[process * share :][:share]]:
            wrong.append([num_local, kept, dealt])
    return wrong


def main() -> None:
    give_up_in_time()
    folder, world = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    seen = {
        name: run(folder, name, geometry, world) for name, geometry in GEOMETRIES.items() if world in geometry.worlds
    }
    seen["refusals"] = refusals(folder)
    seen["wrong_shares"] = wrong_shares(int(os.environ["RANK"]), world)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen))
    if torch.distributed.is_initialized():
        destroy_process_group()


if __name__ == "__main__":
    main()
