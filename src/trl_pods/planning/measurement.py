"""
What a measured process left. Its file is written whole or not at all. Imports no torch.

A JSON object:

- `format`: `"trl_pods.measurement/1"`
- `purpose`: `"fit"`, `"check"` or `"memory"`; `n`, `m`: which pair
- `settings`: the recipe as it was run
- `started`, `wall_seconds`, `versions`, `hardware`: as in the file of a run of `trl-pods compare`
- `error`: how the process ended, if it failed; nothing of what follows is there then
- `rounds_per_step`: rounds of generation for each step of the optimizer
- `rollouts`: of a round, on all processes
- `rounds`: by phase (`generate`, `reward`, `select`, `score`, `update`) the seconds of each round after the warm-up;
  `length`: mean number of tokens of a completion; `memory`: GiB, where the memory of the update was measured
- `functions`: names of the reward functions
- `rewards`: for each prompt of each round, `[round, place in it, check sum of the prompt]` and how many rollouts got
  which rewards, `[[[reward of each function], number], ...]`; `null` is no score
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..comparison.run_file import read_as, write_json


FORMAT = "trl_pods.measurement/1"
PHASES = ("generate", "reward", "select", "score", "update")


@dataclass
class Measurement:
    """The fields are those of the file, see this module."""

    purpose: str
    n: int
    m: int
    settings: dict[str, Any]
    started: str = ""
    wall_seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    rounds_per_step: float = 1.0
    rollouts: int = 0
    rounds: dict[str, list[float]] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)
    rewards: list[list] = field(default_factory=list)

    def seconds(self, phase: str) -> float:
        """Seconds of a step in a phase, by the median over rounds."""
        values = self.rounds.get(phase)
        return self.rounds_per_step * median(values) if values else 0.0

    def step_seconds(self) -> float:
        """Seconds of a step in all phases."""
        return sum(map(self.seconds, PHASES))

    def step_range(self) -> tuple[float, float]:
        """Seconds of the fastest and of the slowest round, for a step."""
        of_rounds = zip(*(self.rounds[phase] for phase in PHASES if phase in self.rounds), strict=True)
        seconds = [self.rounds_per_step * sum(phases) for phases in of_rounds]
        return min(seconds), max(seconds)

    def seconds_per_token(self) -> float:
        """Seconds of generation for each token, by the median over rounds."""
        rounds = zip(self.rounds["generate"], self.rounds["length"], strict=True)
        return median(seconds / (length * self.rollouts) for seconds, length in rounds)


def join_passes(measurements: Sequence[Measurement]) -> list[Measurement]:
    """
    The passes over a pair as one measurement of it, with the rounds of all. Its rewards are those of the first: with
    the same prompts, policy and seed the others draw the same again.

    Args:
        measurements (`Sequence[Measurement]`):
            In the order of the passes.

    Returns:
        `list[Measurement]`: one for each pair.
    """
    by_pair: dict[tuple[int, int], list[Measurement]] = {}
    for found in measurements:
        by_pair.setdefault((found.n, found.m), []).append(found)
    return [
        replace(passes[0], rounds={name: sum((one.rounds[name] for one in passes), []) for name in passes[0].rounds})
        for passes in by_pair.values()
    ]


def write_measurement(measurement: Measurement, path: Path) -> None:
    """Write a measurement to its file; what is there is replaced."""
    write_json({"format": FORMAT, **asdict(measurement)}, path)


def read_measurement(path: Path) -> Measurement:
    """
    Read a measurement from its file.

    Raises:
        ValueError: If it is not such a file, or of another format.
    """
    return read_as(Measurement, path, FORMAT, "a measurement")
