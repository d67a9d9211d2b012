"""Run what a comparison plans and has not run yet, one run after the other, and write a file for each."""

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from .display import Display
from .plan import Comparison, PlannedRun
from .run_file import FINISHED, Run, check_same_settings, read_run, write_json, write_run
from .training_process import ComparedProcess


COMPARISON_FILE = "comparison.json"
RUNS_FOLDER = "runs"
_WORK_FOLDER = "work"
_PROCESSES_FILE = "running.json"
_POLL_SECONDS = 0.5


def run_comparison(
    comparison: Comparison, folder: Path, keep_models: bool = False, run_timeout_minutes: float | None = None
) -> list[Run]:
    """
    Run a comparison, or what is left of it.

    Every run is a process of its own. A run that fails leaves a file that says so and does not hold up the others; the
    next call tries it again. A run that is interrupted leaves none.

    Args:
        comparison ([`Comparison`]):
            What to run.
        folder (`Path`):
            Folder of the comparison: a file for each run in `runs`, and `comparison.json` that says what is compared.
            What a run writes itself is in `work` until it has finished.
        keep_models (`bool`, *optional*, defaults to `False`):
            Keep what finished runs wrote, their models and output.
        run_timeout_minutes (`float`, *optional*):
            Minutes by the clock on the wall after which a run is ended and counts as failed. `None` is no limit.

    Returns:
        `list[Run]`: all runs of the plan.

    Raises:
        ValueError: If a file in the folder is of a run with other settings, or the comparison is running already.
        KeyboardInterrupt: If it is interrupted, by SIGTERM too, after the run under way has ended.
    """
    planned = comparison.runs()
    left = [run for run in planned if not _is_finished(run, folder)]
    with sigterm_as_interrupt(), alone(folder) as note_process:
        write_json(_description(comparison), folder / COMPARISON_FILE)
        with Display(len(planned), len(planned) - len(left), 60 * comparison.minutes) as display:
            for run in left:
                result = _run(run, folder / _WORK_FOLDER / run.name, display, note_process, run_timeout_minutes)
                write_run(result, run_file(folder, run))
                if result.status == FINISHED and not keep_models:
                    shutil.rmtree(folder / _WORK_FOLDER / run.name)
                display.end_run(result)
    return [read_run(run_file(folder, run)) for run in planned]


def run_file(folder: Path, run: PlannedRun) -> Path:
    """Where the file of a run is."""
    return folder / RUNS_FOLDER / f"{run.name}.json"


def _run(
    run: PlannedRun,
    folder: Path,
    display: Display,
    note_process: Callable[[int], None],
    timeout_minutes: float | None,
) -> Run:
    display.start_run(run)
    process = ComparedProcess(run, folder)
    try:
        note_process(process.process.pid)
        while not process.is_over():
            display.show(process)
            if timeout_minutes is not None and process.wall_seconds > 60 * timeout_minutes:
                process.end()
                return process.result(error=f"It was ended after {timeout_minutes} minutes (run_timeout_minutes).")
            time.sleep(_POLL_SECONDS)
        return process.result()
    finally:
        process.end()


def _is_finished(run: PlannedRun, folder: Path) -> bool:
    path = run_file(folder, run)
    if not path.is_file():
        return False
    found = read_run(path)
    if found.status != FINISHED:
        return False
    check_same_settings(path, found.settings, run.settings)
    return True


def _description(comparison: Comparison) -> dict[str, Any]:
    return {
        "recipe": comparison.recipe,
        "minutes": comparison.minutes,
        "seeds": list(comparison.seeds),
        "baseline": comparison.baseline,
        "arms": {arm.name: {"like": arm.like, **arm.overrides} for arm in comparison.arms},
    }


@contextmanager
def alone(folder: Path) -> Iterator[Callable[[int], None]]:
    """
    Refuse a folder in which a comparison, or a run that outlived one, is at work: they would slow each other down.

    Gives a function that notes another process.
    """
    path = folder / _PROCESSES_FILE
    noted = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    alive = [entry["pid"] for entry in noted if _started(entry["pid"]) == entry["started"]]
    if alive:
        raise ValueError(
            f"trl-pods is running in {folder} already (process {alive[0]}). Wait for it, end it, or use another "
            "output_dir."
        )
    entries: list[dict[str, Any]] = []

    def note(pid: int) -> None:
        entries[1:] = []  # the run before has ended
        entries.append({"pid": pid, "started": _started(pid)})
        write_json(entries, path)

    note(psutil.Process().pid)
    try:
        yield note
    finally:
        path.unlink(missing_ok=True)


def _started(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A scheduler ends a job by SIGTERM, which would leave the run behind."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
