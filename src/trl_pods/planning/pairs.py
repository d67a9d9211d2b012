"""What a plan looks at and which of it is measured, and with what settings. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..comparison.arms import DEFAULT_BATCH_SIZE, Settings, for_a_measurement, train_on


FIT, CHECK, MEMORY = "fit", "check", "memory"

_DEFAULT_NUM_GENERATIONS = 8  # TRL's
_DOUBLINGS = 5  # sizes of a default grid
_FITTED = 3  # sizes of a grid that are measured for the fit
# In every measured process. The policy does not move, so that all measure the same one, on the same prompts.
_OURS = {
    "learning_rate": 0.0,
    "lr_scheduler_type": "constant",
    "logging_strategy": "steps",
    "logging_steps": 1,
    "log_completions": True,
    "num_completions_to_print": 0,
    "disable_tqdm": True,
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
}
# Settings of a recipe that a few steps have no use for either.
_LEFT_OUT = (
    "accuracy_minutes",
    "log_file",
    "max_train_minutes",
    "num_accuracy_problems",
    "num_train_epochs",
    "output_dir",
)


@dataclass(frozen=True)
class Planned:
    """
    A process to measure.

    Args:
        purpose (`str`):
            What for: `FIT`, `CHECK` or `MEMORY`.
        n (`int`):
            Rollouts of a prompt.
        m (`int`):
            Those kept.
        settings (`dict[str, Any]`):
            All its settings but for the folders.
        turn (`int`, *optional*, defaults to 1):
            In which pass over the pairs.
    """

    purpose: str
    n: int
    m: int
    settings: Settings
    turn: int = 1

    @property
    def name(self) -> str:
        if self.purpose == MEMORY:
            return f"rows{self.settings['per_device_train_batch_size']}"
        return f"n{self.n}-m{self.m}" + (f"-pass{self.turn}" if self.turn > 1 else "")


@dataclass(frozen=True)
class Grid:
    """
    The pairs of n and m that are looked at: all of these with m up to n.

    Args:
        n (`tuple[int, ...]`):
            Numbers of rollouts, ascending.
        m (`tuple[int, ...]`):
            Numbers of kept rollouts, ascending.

    Raises:
        ValueError: If there are no pairs, or too few to check a prediction.
    """

    n: tuple[int, ...]
    m: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, values in (("num_rollouts_grid", self.n), ("num_generations_grid", self.m)):
            if not values or min(values) < 2:
                raise ValueError(f"{name}={list(values)} must be numbers from 2 on. Use for instance 8 16 32.")
        if min(self.m) > min(self.n):
            raise ValueError(
                f"num_rollouts_grid={list(self.n)} has {min(self.n)}, of which none of num_generations_grid="
                f"{list(self.m)} can be kept. Use for instance --num_generations_grid {min(self.n)}."
            )
        if max(self.m) > max(self.n):
            raise ValueError(
                f"num_generations_grid={list(self.m)} has {max(self.m)}, and n is at most {max(self.n)} "
                f"(num_rollouts_grid={list(self.n)}). Use for instance --num_rollouts_grid {max(self.n)} "
                f"{max(self.m)}."
            )
        if not self._others():
            raise ValueError(
                f"num_rollouts_grid={list(self.n)} and num_generations_grid={list(self.m)} leave no pair to check the "
                f"prediction on. Use more of them, for instance --num_rollouts_grid {min(self.n)} {2 * max(self.n)} "
                f"{4 * max(self.n)}."
            )

    def pairs(self) -> list[tuple[int, int]]:
        """All pairs, by n and then m."""
        return [(n, m) for n in self.n for m in self.m if m <= n]

    def fitted(self) -> list[tuple[int, int]]:
        """
        The pairs whose seconds are fitted: few, with the least, a middle and the largest n and m among them.

        Example:

        ```python
        >>> Grid((8, 16, 32, 64, 128), (2, 4, 8, 16, 32)).fitted()
        [(8, 2), (32, 8), (128, 32)]

        ```
        """
        large_first = zip_longest(_spread(self.n)[::-1], _spread(self.m)[::-1])
        pairs = set()
        for n, m in large_first:
            n, m = n or self.n[-1], m or self.m[0]
            pairs |= {(n, m)} if m <= n else {(n, self.m[0]), (self.n[-1], m)}
        return sorted(pairs)

    def check(self) -> tuple[int, int]:
        """
        The pair that the prediction is checked on: if possible one whose n and whose m were not measured for the fit.

        Example:

        ```python
        >>> Grid((8, 16, 32, 64, 128), (2, 4, 8, 16, 32)).check()
        (64, 16)

        ```
        """
        seen_n, seen_m = (set(values) for values in zip(*self.fitted(), strict=True))
        return max(self._others(), key=lambda pair: ((pair[0] not in seen_n) + (pair[1] not in seen_m), pair))

    def _others(self) -> list[tuple[int, int]]:
        return sorted(set(self.pairs()) - set(self.fitted()))


def make_grid(
    recipe: Settings, num_rollouts: Sequence[int] | None = None, num_generations: Sequence[int] | None = None
) -> Grid:
    """
    The pairs around those of a recipe.

    Args:
        recipe (`dict[str, Any]`):
            The recipe.
        num_rollouts (`Sequence[int]`, *optional*):
            Numbers of rollouts. Default: five, each twice the one before, from a quarter of the recipe's n (at least
            its m).
        num_generations (`Sequence[int]`, *optional*):
            Numbers of kept rollouts. Default: the recipe's m, two halvings of it and two doublings, as far as the
            batch size fits them.

    Raises:
        ValueError: If that gives no pairs.

    Example:

    ```python
    >>> make_grid({"num_rollouts": 32, "num_generations": 8, "per_device_train_batch_size": 128})
    Grid(n=(8, 16, 32, 64, 128), m=(2, 4, 8, 16, 32))

    ```
    """
    n, m = sizes(recipe)
    first = max(n // 4, m)
    n_grid = num_rollouts or [first * 2**i for i in range(_DOUBLINGS)]
    m_grid = num_generations or [
        kept for i in range(_DOUBLINGS) if 2 <= (kept := m * 2**i // 4) <= max(n_grid) and _fits(recipe, kept)
    ]
    return Grid(tuple(sorted(set(n_grid))), tuple(sorted(set(m_grid))))


def plan_processes(
    recipe: Settings, grid: Grid, memory_rows: Sequence[int], warmup: int, steps: int, passes: int = 1
) -> list[Planned]:
    """
    What is to be measured, each in a process of its own.

    Args:
        recipe (`dict[str, Any]`):
            The recipe.
        grid ([`Grid`]):
            The pairs that are looked at.
        memory_rows (`Sequence[int]`):
            Micro-batches, in rows, whose update memory is measured.
        warmup (`int`):
            Rounds that are made and not counted.
        steps (`int`):
            Rounds that are counted.
        passes (`int`, *optional*, defaults to 1):
            How often every pair has its turn. A slow phase of the machine then meets a part of the rounds of several
            pairs, not all of those of one.

    Raises:
        ValueError: If the recipe does not fit a pair.
    """
    _, m = sizes(recipe)
    base = {name: value for name, value in for_a_measurement(recipe).items() if name not in _LEFT_OUT} | _OURS
    base |= {"num_generations": m, "max_steps": math.ceil((warmup + steps) * _steps_per_round(recipe))}
    pairs = [(FIT, *pair) for pair in grid.fitted()] + [(CHECK, *grid.check())]
    planned = [
        Planned(purpose, n, m, {**train_on(base, m), "num_rollouts": n}, turn + 1)
        for turn in range(passes)
        for purpose, n, m in pairs
    ]
    return planned + [_for_memory(base, rows, warmup + steps) for rows in sorted(set(memory_rows))]


def default_memory_rows(recipe: Settings) -> list[int]:
    """Micro-batches around that of a recipe, in rows: two halvings of it and one doubling."""
    rows = batch_size(recipe)
    return [size for size in (rows // 4, rows // 2, rows, 2 * rows) if size >= 2]


def sizes(recipe: Settings) -> tuple[int, int]:
    """
    n and m of a recipe.

    Raises:
        ValueError: If they are no whole numbers.
    """
    m = recipe.get("num_generations") or _DEFAULT_NUM_GENERATIONS
    n = recipe.get("num_rollouts") or m
    for name, value in (("num_rollouts", n), ("num_generations", m)):
        if not isinstance(value, int) or value < 2:
            raise ValueError(f"{name}={value!r} is no number of rollouts. Use a whole number, for instance 16.")
    return n, m


def batch_size(recipe: Settings) -> int:
    """Rows of a micro-batch on a device."""
    return int(recipe.get("per_device_train_batch_size") or DEFAULT_BATCH_SIZE)


def _for_memory(base: Settings, rows: int, steps: int) -> Planned:
    """All rows of a step in one micro-batch, on each device, and no more rollouts than these."""
    kept = math.gcd(rows, base["num_generations"])
    if kept < 2:
        raise ValueError(
            f"memory_rows={rows} holds no group of {base['num_generations']} rollouts or of a part of them. Use for "
            f"instance {base['num_generations']}."
        )
    settings = {name: value for name, value in base.items() if name not in ("steps_per_generation", "num_iterations")}
    settings.pop("generation_batch_size", None)
    settings |= {"num_rollouts": kept, "num_generations": kept, "per_device_train_batch_size": rows}
    settings |= {"gradient_accumulation_steps": 1, "max_steps": steps, "log_update_memory": True}
    return Planned(MEMORY, kept, kept, settings)


def _steps_per_round(recipe: Settings) -> float:
    """As far as the recipe alone says: with `generation_batch_size` it depends on the number of processes."""
    accumulation = int(recipe.get("gradient_accumulation_steps") or 1)
    micro_batches = recipe.get("steps_per_generation") or accumulation
    if recipe.get("generation_batch_size"):
        micro_batches = recipe["generation_batch_size"] // (batch_size(recipe) * int(recipe.get("num_processes") or 1))
    # Several rounds in a step are one entry of the log, their mean.
    return max(1.0, int(micro_batches) * int(recipe.get("num_iterations") or 1) / accumulation)


def _fits(recipe: Settings, num_generations: int) -> bool:
    try:
        train_on({**recipe, "num_generations": sizes(recipe)[1]}, num_generations)
    except ValueError:
        return False
    return True


def _spread(values: Sequence[Any]) -> list[Any]:
    """The first, the last and one in the middle."""
    last = len(values) - 1
    return sorted({values[round(i * last / (_FITTED - 1))] for i in range(_FITTED)})
