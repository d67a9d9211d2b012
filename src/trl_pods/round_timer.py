"""Wall-clock seconds of a training round, split into generation, reward, selection, scoring and update."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback


# Phases of a round that come before its update.
ROLLOUT_PHASES = ("generate", "reward", "select", "score")


class RoundTimer:
    """
    Stop-watch for one process. Phases count within a round only, so that the same code runs untimed in evaluation.

    Args:
        device (`torch.device`):
            Device whose queued work is waited for before the clock is read.

    Example:

    ```python
    >>> timer = RoundTimer(torch.device("cpu"))
    >>> with timer.update():
    ...     with timer.round():
    ...         with timer.phase("generate"):
    ...             time.sleep(0.02)
    >>> timer.seconds["generate"] >= 0.02, timer.seconds["select"], timer.pop_update() < 0.02
    (True, 0.0, True)

    ```
    """

    def __init__(self, device: torch.device) -> None:
        self._backend = getattr(torch, device.type)
        self._in_round = False
        self._round_seconds = 0.0  # all rounds so far
        self._update_seconds = 0.0
        self._update_ended = 0.0
        self.seconds: dict[str, float] = dict.fromkeys(ROLLOUT_PHASES, 0.0)

    @contextmanager
    def round(self) -> Iterator[None]:
        """The part of a round that generates, scores and selects; `seconds` tells of the last one."""
        self.seconds = dict.fromkeys(ROLLOUT_PHASES, 0.0)
        self._in_round = True
        start = self._now()
        try:
            yield
        finally:
            self._round_seconds += self._now() - start
            self._in_round = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add to one of `ROLLOUT_PHASES`; does nothing outside a round."""
        if not self._in_round:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] += self._now() - start

    @contextmanager
    def update(self) -> Iterator[None]:
        """Forward and backward of a micro-batch. A round that runs inside is not counted."""
        start, round_seconds = time.perf_counter(), self._round_seconds
        yield
        self._update_ended = time.perf_counter()
        self._update_seconds += self._update_ended - start - (self._round_seconds - round_seconds)

    def optimizer_stepped(self) -> None:
        """Count the time since the last micro-batch (gradient clipping, optimizer) as update."""
        now = time.perf_counter()
        self._update_seconds += now - self._update_ended
        self._update_ended = now

    def pop_update(self) -> float:
        """Seconds of update since the last call."""
        queued = time.perf_counter()
        seconds, self._update_seconds = self._update_seconds + self._now() - queued, 0.0
        return seconds

    def _now(self) -> float:
        self._backend.synchronize()
        return time.perf_counter()


class OptimizerStepCallback(TrainerCallback):
    """
    Call a function after each step of the optimizer.

    Args:
        function (`Callable[[], None]`):
            What to call.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._function()
