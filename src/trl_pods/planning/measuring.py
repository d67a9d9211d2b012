"""Measure what a plan asks for and has not been measured yet, one process after the other."""

import json
import shutil
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
from tqdm import tqdm

from ..comparison.run_file import check_same_settings
from ..comparison.running import alone, sigterm_as_interrupt
from ..comparison.training_process import TrainingProcess
from .measurement import PHASES, Measurement, read_measurement, write_measurement
from .pairs import MEMORY, Planned


MEASUREMENTS_FOLDER = "measurements"
_WORK_FOLDER = "work"
_POLL_SECONDS = 0.3
_MEAN_OF = "rewards/{}/mean"  # in the log, for each reward function in their order


class MeasuringError(RuntimeError):
    """A measured process failed."""


def measure(planned: Sequence[Planned], folder: Path, warmup: int) -> list[Measurement]:
    """
    Measure, or read what is measured already.

    Args:
        planned (`Sequence[Planned]`):
            What to measure.
        folder (`Path`):
            Folder of the plan: a file for each process in `measurements`; what a process writes itself is in `work`
            until it has ended well.
        warmup (`int`):
            Rounds of each that are not counted.

    Returns:
        `list[Measurement]`: in the order of the plan.

    Raises:
        MeasuringError: If a process fails whose seconds are needed. One that measures memory may run out of it; that
            is a result, and stands until its file is deleted.
        ValueError: If a file in the folder is of other settings, or trl-pods is running there already.
        KeyboardInterrupt: If it is interrupted, by SIGTERM too, after the process under way has ended.
    """
    done = {process.name: found for process in planned if (found := _measured(process, folder))}
    total = sum(process.settings["max_steps"] for process in planned if process.name not in done)
    if done:
        tqdm.write(f"{len(done)} of {len(planned)} processes are measured already.")
    with sigterm_as_interrupt(), alone(folder) as note_process, _bar(total) as bar:
        for number, process in enumerate(planned, start=1):
            if process.name in done:
                continue
            bar.set_description(f"{number}/{len(planned)} {process.name}")
            measurement = _measure(process, folder / _WORK_FOLDER / process.name, warmup, bar, note_process)
            done[process.name] = measurement
            write_measurement(measurement, _file(process, folder))
            tqdm.write(f"{number}/{len(planned)} {process.name}: {_outcome(measurement)}")
    return [done[process.name] for process in planned]


def _measured(process: Planned, folder: Path) -> Measurement | None:
    path = _file(process, folder)
    if not path.is_file():
        return None
    found = read_measurement(path)
    check_same_settings(path, found.settings, process.settings)
    found.purpose = process.purpose  # a pair may have been the check of another grid
    return found


def _file(process: Planned, folder: Path) -> Path:
    return folder / MEASUREMENTS_FOLDER / f"{process.name}.json"


def _measure(
    planned: Planned, folder: Path, warmup: int, bar: Any, note_process: Callable[[int], None]
) -> Measurement:
    before = bar.n
    process = TrainingProcess(planned.settings, folder)
    try:
        note_process(process.process.pid)
        while not process.is_over():
            bar.n = before + max((entry.get("step", 0) for entry in process.entries), default=0)
            bar.update(0)
            time.sleep(_POLL_SECONDS)
    finally:
        process.end()
    bar.n = before + planned.settings["max_steps"]
    measurement = _result(planned, process, warmup)
    if measurement.error is None:
        shutil.rmtree(folder)
    elif planned.purpose != MEMORY:
        raise MeasuringError(f"{planned.name} failed. {measurement.error}")
    return measurement


def _result(planned: Planned, process: TrainingProcess, warmup: int) -> Measurement:
    header = process.header
    measurement = Measurement(
        planned.purpose,
        planned.n,
        planned.m,
        planned.settings,
        started=process.started.isoformat(timespec="milliseconds"),
        wall_seconds=round(process.wall_seconds, 1),
        versions=header.get("versions", {}),
        hardware=header.get("hardware", {}),
    )
    rounds = _rounds(process.entries, warmup)
    if process.process.returncode or not rounds.get("update"):
        reason = f"It ended with exit code {process.process.returncode} and {len(rounds.get('update', []))} rounds."
        measurement.error = "\n".join([reason, *process.last_lines()])
        return measurement
    measurement.rounds = rounds
    measurement.rounds_per_step = process.rounds_per_step
    measurement.rollouts = header["settings"]["generation_batch_size"] * planned.n // planned.m
    measurement.functions = _functions(process.entries)
    if planned.purpose != MEMORY:
        measurement.rewards = _rewards(process, measurement)
    return measurement


def _rounds(entries: Sequence[dict[str, Any]], warmup: int) -> dict[str, list[float]]:
    """
    What was logged of each round after the warm-up. With several rounds in a step, their means.

    Where a step holds no whole number of rounds, the last one may be generated and not yet trained on: it is left out.
    """
    names = {phase: f"time/{phase}" for phase in PHASES} | {"length": "completions/mean_length"}
    names |= {"memory": "memory/update_peak"}
    logged = {name: [e[key] for e in entries if "loss" in e and e.get(key) is not None] for name, key in names.items()}
    num_whole = min((len(values) for values in logged.values() if values), default=0)
    return {name: values[warmup:num_whole] for name, values in logged.items() if values[warmup:num_whole]}


def _functions(entries: Sequence[dict[str, Any]]) -> list[str]:
    start, end = _MEAN_OF.split("{}")
    keys = dict.fromkeys(key for entry in entries for key in entry if key.startswith(start) and key.endswith(end))
    return [key.removeprefix(start).removesuffix(end) for key in keys]


def _rewards(process: TrainingProcess, measurement: Measurement) -> list[list]:
    """Of each prompt of each round, warm-up too, from the tables of completions."""
    rewards = []
    for entry in process.entries:
        if entry.get("time/generate") is None or "loss" not in entry:  # else the table shows a former round once more
            continue
        path = process.model_folder / "completions" / f"completions_{entry['step']:05d}.parquet"
        rows = parquet.read_table(path, columns=["prompt", *measurement.functions]).to_pylist()
        for place in range(len(rows) // measurement.n):
            group = rows[place * measurement.n : (place + 1) * measurement.n]
            prompt = zlib.crc32(json.dumps(group[0]["prompt"], default=str).encode())
            counts = Counter(tuple(_score(row[name]) for name in measurement.functions) for row in group)
            rewards.append(
                [[entry["step"], place, prompt], [[list(scores), count] for scores, count in counts.items()]]
            )
    return rewards


def _score(value: float | None) -> float | None:
    return None if value is None or value != value else value


def _bar(total: int) -> Any:
    # In a file each state of the bar is a line: fewer of them.
    shape = "{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} steps [{elapsed}<{remaining}]"
    return tqdm(total=total, bar_format=shape, mininterval=0.1 if sys.stderr.isatty() else 60, disable=not total)


def _outcome(measurement: Measurement) -> str:
    if measurement.error is not None:
        return f"FAILED. {measurement.error.splitlines()[-1]}"
    return f"{measurement.step_seconds():.3g} s a step ({measurement.wall_seconds:.0f} s with start-up)"
