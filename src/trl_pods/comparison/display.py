"""How far a comparison is, on the terminal."""

import sys
from typing import Any

from tqdm import tqdm

from .plan import PlannedRun
from .run_file import FINISHED, Run
from .training_process import ComparedProcess


_BAR = "{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s of training [{elapsed}<{remaining}]{postfix}"


class Display:
    """
    A bar over the training time of all runs, and a line for each run that has ended.

    Args:
        num_runs (`int`):
            Runs of the comparison.
        num_done (`int`):
            Those that need not be run.
        seconds (`float`):
            Training time of a run.
    """

    def __init__(self, num_runs: int, num_done: int, seconds: float) -> None:
        self._num_runs = num_runs
        self._number = num_done
        self._seconds = seconds
        self._before = 0.0  # seconds of the runs before
        # In a file each state of the bar is a line: fewer of them.
        self._bar = tqdm(
            total=seconds * (num_runs - num_done),
            bar_format=_BAR,
            mininterval=0.1 if sys.stderr.isatty() else 60,
            disable=num_done == num_runs,
        )

    def __enter__(self) -> "Display":
        if self._number:
            tqdm.write(f"{self._number} of {self._num_runs} runs are there already.")
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    def start_run(self, run: PlannedRun) -> None:
        """A run begins."""
        self._number += 1
        self._bar.set_description_str(f"{self._number}/{self._num_runs} {run.arm} seed {run.seed}")
        self._bar.set_postfix_str("starting", refresh=False)

    def show(self, process: ComparedProcess) -> None:
        """Where the run is."""
        self._bar.n = self._before + min(process.train_seconds, self._seconds)
        if process.accuracies:
            self._bar.set_postfix_str(f"accuracy {process.accuracies[-1]:.3f}", refresh=False)
        self._bar.update(0)

    def end_run(self, run: Run) -> None:
        """A run has ended."""
        self._before += self._seconds
        self._bar.n = self._before
        tqdm.write(f"{self._number}/{self._num_runs} {run.arm} seed {run.seed}: {_outcome(run)}")


def _outcome(run: Run) -> str:
    if run.status != FINISHED:
        lines = (run.error or "").splitlines()
        return f"FAILED. {lines[0]} {lines[-1] if len(lines) > 1 else ''}".rstrip()
    sampled, steps, seconds = (run.accuracy[name] for name in ("sampled", "step", "seconds"))
    return (
        f"accuracy {sampled[0]:.3f} -> {sampled[-1]:.3f} in {steps[-1]} steps of {seconds[-1] / steps[-1]:.3f} s "
        f"({run.wall_seconds:.0f} s with start-up and measurements)"
    )
