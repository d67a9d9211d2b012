"""From the runs of a comparison to what its tables and plots show."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..comparison.run_file import FINISHED, Run, read_runs
from ..comparison.running import COMPARISON_FILE, RUNS_FOLDER
from .statistics import PAPER_SHARE, Interval, SpeedUp, at_grid, band, bootstrap, make_grid, speed_up


SHARES = (0.9, 0.95, 0.97, 0.98, 0.99, 1.0)

# What a step is split into, and the phases of the log that go into each.
PHASES = {
    "generation": ("time/generate",),
    "reward, selection": ("time/reward", "time/select"),
    "scoring": ("time/score",),
    "update": ("time/update",),
}
OTHER = "other"


@dataclass(frozen=True)
class ArmSummary:
    """
    One arm.

    Args:
        name (`str`):
            Its name.
        runs (`list[Run]`):
            Its finished runs.
        num_failed (`int`):
            Runs that failed.
        accuracy_RT (`np.ndarray`):
            Accuracy of the runs at the times of the grid.
        speed_ups (`dict[float, tuple[SpeedUp, Interval | None]]`):
            By the share of the baseline's best accuracy; of the baseline itself none. There is no interval where one
            of the two has a single run, or the baseline learned nothing.
    """

    name: str
    runs: list[Run]
    num_failed: int
    accuracy_RT: np.ndarray
    speed_ups: dict[float, tuple[SpeedUp, Interval | None]]

    def step_seconds(self) -> list[float]:
        """Seconds of a step, for each run."""
        return [run.accuracy["seconds"][-1] / run.accuracy["step"][-1] for run in self.runs]

    def accuracy_after(self, num_steps: int) -> np.ndarray | None:
        """Accuracy of the runs after so many steps, (R, 1), between two measurements interpolated; `None` beyond."""
        if min(run.accuracy["step"][-1] for run in self.runs) < num_steps:
            return None
        return np.array([[np.interp(num_steps, r.accuracy["step"], r.accuracy["sampled"])] for r in self.runs])

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of a step by phase, the mean over runs; empty if the runs did not log them."""
        if not all("time/generate" in run.log for run in self.runs):
            return {}
        seconds = {
            phase: float(np.mean([run.rounds_per_step * sum(map(_mean, _found(run, names))) for run in self.runs]))
            for phase, names in PHASES.items()
        }
        return seconds | {OTHER: max(0.0, float(np.mean(self.step_seconds())) - sum(seconds.values()))}

    def series(self, column: str, grid: np.ndarray) -> np.ndarray:
        """
        A column of the log by the times of the grid, the mean over runs; NaN where there is nothing.

        The value at a time is the mean of the entries in the interval that ends there.
        """
        series_RT = np.array([_in_bins(run, column, grid) for run in self.runs])
        there_RT = ~np.isnan(series_RT)
        with np.errstate(invalid="ignore"):
            return np.where(there_RT, series_RT, 0).sum(axis=0) / there_RT.sum(axis=0)


@dataclass(frozen=True)
class Summary:
    """
    A comparison.

    Args:
        baseline (`str`):
            Name of the baseline.
        grid (`np.ndarray`):
            Times in seconds of training, the first 0.
        arms (`list[ArmSummary]`):
            The arms with finished runs, the baseline first.
        failed (`dict[str, list[Run]]`):
            By its name, the runs of an arm that has no finished one.
    """

    baseline: str
    grid: np.ndarray
    arms: list[ArmSummary]
    failed: dict[str, list[Run]]

    def numbers_of_steps(self) -> list[int]:
        """Round numbers of steps to compare arms at: the first was made by all runs, the last by the fastest one."""
        made = [run.accuracy["step"][-1] for arm in self.arms for run in arm.runs]
        least, most = min(made), max(made)
        numbers = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
        return [number for number in numbers if least < 2.5 * number and number <= most]


def read_summary(folder: Path, baseline: str | None = None, shares: Sequence[float] = SHARES) -> Summary:
    """
    Sum up the runs in the folder of a comparison.

    Args:
        folder (`Path`):
            The folder, as `trl-pods compare` makes it, or one with files of runs alone.
        baseline (`str`, *optional*):
            The arm that the others are measured against. Default: that of the comparison.
        shares (`Sequence[float]`, *optional*):
            Shares of the baseline's best accuracy.

    Returns:
        [`Summary`]

    Raises:
        ValueError: If there are no runs, or they do not go together, or no runs of the baseline.
    """
    description = folder / COMPARISON_FILE
    plan = json.loads(description.read_text(encoding="utf-8")) if description.is_file() else {}
    runs_folder = folder / RUNS_FOLDER
    runs = read_runs(runs_folder if plan or runs_folder.is_dir() else folder)
    if plan and not runs:
        raise ValueError(
            f"There is no finished run in {folder} yet. `trl-pods compare` with --output_dir {folder} goes on with it."
        )
    names = [*plan.get("arms", {}), *sorted({run.arm for run in runs})]
    return summarize(runs, baseline or plan.get("baseline", "grpo"), shares, order=names)


def summarize(
    runs: Sequence[Run], baseline: str, shares: Sequence[float] = SHARES, order: Sequence[str] = ()
) -> Summary:
    """
    Sum up runs.

    Args:
        runs (`Sequence[Run]`):
            The runs, failed ones too.
        baseline (`str`):
            The arm that the others are measured against.
        shares (`Sequence[float]`, *optional*):
            Shares of the baseline's best accuracy.
        order (`Sequence[str]`, *optional*):
            In which order arms come, behind the baseline. Default: that of the runs.

    Returns:
        [`Summary`]

    Raises:
        ValueError: If there are no runs, or they do not go together, or no runs of the baseline.
    """
    finished = [run for run in runs if run.status == FINISHED]
    if not finished:
        raise ValueError(f"There are no finished runs to report on ({len(runs)} failed).")
    by_arm = {name: [run for run in finished if run.arm == name] for name in [*order, *(r.arm for r in runs)]}
    failed = {name: [run for run in runs if run.arm == name] for name, of_arm in by_arm.items() if not of_arm}
    failed = {name: of_arm for name, of_arm in failed.items() if of_arm}  # others have not been run
    by_arm = {name: of_arm for name, of_arm in by_arm.items() if of_arm}
    if baseline not in by_arm:
        raise ValueError(f"baseline={baseline!r} has no finished run. Use one of {', '.join(by_arm)}.")
    spans = {(run.duration, run.interval) for run in finished}
    if len(spans) > 1:
        raise ValueError(
            f"The runs last {sorted({d for d, _ in spans})} seconds and were measured every "
            f"{sorted({i for _, i in spans})} seconds: they do not compare. Keep those of one comparison in a folder."
        )
    grid = make_grid(*spans.pop())
    curves = {
        name: np.array([at_grid(r.accuracy["seconds"], r.accuracy["sampled"], grid) for r in of_arm])
        for name, of_arm in by_arm.items()
    }
    names = [baseline, *(name for name in by_arm if name != baseline)]
    return Summary(
        baseline,
        grid,
        [
            ArmSummary(
                name,
                by_arm[name],
                sum(run.arm == name and run.status != FINISHED for run in runs),
                curves[name],
                _speed_ups(grid, curves[baseline], curves[name], shares) if name != baseline else {},
            )
            for name in names
        ],
        failed,
    )


def best(arm: ArmSummary, grid: np.ndarray) -> tuple[float, float, float]:
    """The best mean accuracy of an arm after the start, half its 95 % band, and when it is there first."""
    mean, half = band(arm.accuracy_RT)
    at = int(mean[1:].argmax()) + 1
    return float(mean[at]), float(half[at]), float(grid[at])


def _speed_ups(
    grid: np.ndarray, baseline_RT: np.ndarray, arm_RT: np.ndarray, shares: Sequence[float]
) -> dict[float, tuple[SpeedUp, Interval | None]]:
    return {
        share: (speed_up(grid, baseline_RT, arm_RT, share), bootstrap(grid, baseline_RT, arm_RT, share))
        for share in sorted({*shares, PAPER_SHARE})
    }


def _found(run: Run, names: Sequence[str]) -> list[list]:
    return [run.log[name] for name in names if name in run.log]


def _mean(values: Sequence[float | None]) -> float:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else 0.0


def _in_bins(run: Run, column: str, grid: np.ndarray) -> np.ndarray:
    times = np.array(run.log.get("time/train", []), dtype=float)
    values = np.array(run.log.get(column, [None] * len(times)), dtype=float)
    bins = np.searchsorted(grid, times)  # an entry at a time of the grid belongs to the interval that ends there
    means = [values[(bins == i) & ~np.isnan(values)] for i in range(len(grid))]
    return np.array([found.mean() if len(found) else np.nan for found in means])
