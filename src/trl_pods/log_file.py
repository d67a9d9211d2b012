"""The log of a run as a file that grows with it."""

import json
import math
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from .machine import hardware, versions


class LogFileCallback(TrainerCallback):
    """
    Write each log entry as a line of JSON as soon as it is made.

    The first line, and another one where a resumed run goes on, holds the settings of the trainer, versions and
    hardware. Numbers that JSON does not know (NaN, infinite) become `null`. The main process alone writes.

    Args:
        path (`str` or `Path`):
            The file. A training from the start begins it anew. In that of a resumed one a line that a killed run left
            unfinished stays: skip what is no JSON.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if state.global_step == 0:
            self.path.write_text("", encoding="utf-8")
        self._end_torn_line()
        settings = {**args.to_dict(), "world_size": args.world_size}
        self._write({"settings": settings, "versions": versions(), "hardware": hardware()})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self._write({"step": state.global_step, **(logs or {})})

    def _end_torn_line(self) -> None:
        """What a kill in the middle of a line left stays a line of its own."""
        with self.path.open("ab+") as file:
            if file.tell() == 0:
                return
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")

    def _write(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(entry), default=str) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
