"""A training as a process of its own, watched by its log; a run of a comparison is one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

from .plan import PlannedRun
from .run_file import FAILED, FINISHED, LOG_COLUMNS, Run, columns


_COMMAND = [sys.executable, "-m", "trl_pods", "grpo", "--config"]
_ACCURACY = "held_out_accuracy/"
_SECONDS_TO_END = 20  # the launcher gives its own processes 10
_SECONDS_BETWEEN_NOTES = 2
_SECONDS_TO_FOLLOW = 2  # for processes whose launcher has ended
_ERROR_LINES = 25


class TrainingProcess:
    """
    A training under way: `trl-pods grpo` in a folder of its own.

    Args:
        settings (`dict[str, Any]`):
            Its recipe, without folders.
        folder (`Path`):
            Folder for its files; what is in it goes.
    """

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.entries: list[dict[str, Any]] = []  # of the log so far
        self._read_to = 0
        self._descendants: set[psutil.Process] = set()  # equal are those of one id and time of creation
        self._noted = 0.0
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        settings = {**settings, "output_dir": str(self.model_folder), "log_file": str(folder / "log.jsonl")}
        recipe = folder / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        self.started = datetime.now(UTC)
        self._start = time.monotonic()
        with (folder / "output.txt").open("wb") as output:
            # In a session of its own, so that Ctrl-C reaches it through us alone.
            self.process = subprocess.Popen(
                [*_COMMAND, str(recipe)], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._launcher = psutil.Process(self.process.pid)

    @property
    def wall_seconds(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._start

    @property
    def model_folder(self) -> Path:
        """Output folder of the training."""
        return self.folder / "model"

    @property
    def header(self) -> dict[str, Any]:
        """Settings of the trainer, versions and hardware; empty before the training has begun."""
        return next((entry for entry in self.entries if "settings" in entry), {})

    @property
    def rounds_per_step(self) -> float:
        """Rounds of generation for each step of the optimizer."""
        return _rounds_per_step(self.header.get("settings", {}))

    def is_over(self) -> bool:
        """Whether it has ended; reads what is new in the log, and notes which processes there are."""
        if time.monotonic() - self._noted > _SECONDS_BETWEEN_NOTES:  # a look at all processes of the machine
            self._note_descendants()
        is_over = self.process.poll() is not None
        self._read_log()
        return is_over

    def end(self) -> None:
        """End it, whatever it is doing, and what it has left behind if it was killed itself."""
        self._note_descendants()
        if self.process.poll() is None:
            self.process.terminate()  # the launcher takes its processes along
            try:
                self.process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _, alive = psutil.wait_procs([p for p in self._descendants if _runs(p)], timeout=_SECONDS_TO_FOLLOW)
        for process in alive:
            with suppress(psutil.NoSuchProcess):  # raised too where the id has been given to another process
                process.kill()
        psutil.wait_procs(alive, timeout=_SECONDS_TO_FOLLOW)

    def last_lines(self) -> list[str]:
        """The end of its output."""
        text = (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        return text.splitlines()[-_ERROR_LINES:]

    def _note_descendants(self) -> None:
        """When the launcher is gone, nothing leads from it to them, but from those that were noted to theirs."""
        self._noted = time.monotonic()
        for known in [self._launcher] if _runs(self._launcher) else list(self._descendants):
            with suppress(psutil.NoSuchProcess):
                self._descendants.update(known.children(recursive=True))

    def _read_log(self) -> None:
        path = self.folder / "log.jsonl"
        if not path.is_file():
            return
        with path.open("rb") as file:
            file.seek(self._read_to)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # the last line may be under way
        self._read_to += len(whole)
        self.entries += [entry for line in whole.splitlines() if (entry := _entry(line)) is not None]


class ComparedProcess(TrainingProcess):
    """
    A run of a comparison under way.

    Args:
        planned ([`PlannedRun`]):
            What to run.
        folder (`Path`):
            Folder for its files; what is in it goes.
    """

    def __init__(self, planned: PlannedRun, folder: Path) -> None:
        super().__init__(planned.settings, folder)
        self.planned = planned

    @property
    def train_seconds(self) -> float:
        """Seconds of training so far, as far as they are logged."""
        return max((entry.get("time/train") or 0.0 for entry in self.entries), default=0.0)

    @property
    def accuracies(self) -> list[float]:
        """What was measured so far, sampled."""
        return [entry[f"{_ACCURACY}sampled"] for entry in self.entries if f"{_ACCURACY}sampled" in entry]

    def result(self, error: str | None = None) -> Run:
        """
        The run, once it is over.

        Args:
            error (`str`, *optional*):
                Why it counts as failed, if not by its exit code.
        """
        settings = self.settings
        error = error or self._error(60 * settings["max_train_minutes"])
        accuracies = [entry for entry in self.entries if f"{_ACCURACY}sampled" in entry]
        measured = columns(accuracies, ("time/train", "step", f"{_ACCURACY}sampled", f"{_ACCURACY}greedy"))
        return Run(
            arm=self.planned.arm,
            seed=self.planned.seed,
            status=FAILED if error else FINISHED,
            error=error,
            settings=settings,
            duration=60 * settings["max_train_minutes"],
            interval=60 * settings["accuracy_minutes"],
            started=self.started.isoformat(timespec="milliseconds"),
            wall_seconds=round(self.wall_seconds, 1),
            rounds_per_step=self.rounds_per_step,
            versions=self.header.get("versions", {}),
            hardware=self.header.get("hardware", {}),
            accuracy={_column(name): values for name, values in measured.items()},
            log=columns([entry for entry in self.entries if "loss" in entry], LOG_COLUMNS),
        )

    def _error(self, duration: float) -> str | None:
        if self.process.returncode == 0 and self.train_seconds >= duration:
            return None
        reason = f"It ended with exit code {self.process.returncode} after {self.train_seconds:.1f} s of training."
        return "\n".join([reason, *self.last_lines()])


def _entry(line: bytes) -> dict[str, Any] | None:
    """An entry of the log; of a line that a kill has torn there is none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _runs(process: psutil.Process) -> bool:
    """Whether it is still the same process, and no dead one that nobody has waited for."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _rounds_per_step(settings: dict[str, Any]) -> float:
    if not settings:
        return 1.0
    return settings["gradient_accumulation_steps"] / (settings["steps_per_generation"] * settings["num_iterations"])


def _column(name: str) -> str:
    return "seconds" if name == "time/train" else name.removeprefix(_ACCURACY)
