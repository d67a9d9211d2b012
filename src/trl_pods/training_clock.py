"""Time spent in training, which evaluation and saving leave out, and what goes by it: evaluation and the end."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


logger = logging.getLogger(__name__)

TRAIN_TIME = "time/train"  # in the logs: seconds


class TrainingClock(TrainerCallback, ExportableState):
    """
    Counts the seconds of training, evaluates every so many minutes of them and stops after so many.

    The clock runs from the beginning of training to its end: data loading, generation, rewards, updates and logging
    are in. It stands still while the trainer evaluates or saves a checkpoint (strictly: from its last event before
    that, the end of a step or a log entry, to `on_evaluate` or `on_save`), and in a [`~TrainingClock.paused`] block.
    Steps alone are not summed up, as that would leave out what happens between them.

    Its reading is in every log entry as `time/train`, in seconds, and in every checkpoint: a run that is resumed goes
    on from there. With several processes what goes by it goes by the clock of the main process, so that they evaluate
    and stop at the same step.

    [`PODSGRPOTrainer`] has a clock and takes both limits from its config. Any other [`~transformers.Trainer`] gets one
    by `callbacks=[TrainingClock(...)]`; trackers then do not see `time/train`, the log history has it.

    Args:
        max_train_minutes (`float`, *optional*):
            Minutes of training after which it stops, with the end of a step; one more step is made where a resumed
            run has had them already. The last step is logged, evaluated if `eval_minutes` is set, and saved if
            `save_strategy="steps"`. `None` is no limit. A setting of this name in the arguments of the trainer wins
            unless it is `None`.
        eval_minutes (`float`, *optional*):
            Evaluate after the first step past each multiple of so many minutes of training. `None` leaves it to
            `eval_strategy`. A setting of this name in the arguments of the trainer wins unless it is `None`.

    Raises:
        ValueError: If a limit is not a positive number.

    Example:

    ```python
    >>> TrainingClock(max_train_minutes=30, eval_minutes=2).read()
    0.0
    >>> TrainingClock(max_train_minutes=0)
    Traceback (most recent call last):
    ValueError: max_train_minutes=0 is no time to train for. Use None for no limit, or minutes, for instance 30.0.

    ```
    """

    def __init__(self, max_train_minutes: float | None = None, eval_minutes: float | None = None) -> None:
        check_minutes(max_train_minutes, eval_minutes)
        self.max_train_minutes = max_train_minutes
        self.eval_minutes = eval_minutes
        self._limits = (max_train_minutes, eval_minutes)  # that hold: those of the trainer's arguments go first
        self.seconds = 0.0  # up to the last mark
        self.seconds_at_last_step = 0.0
        self._step_before = 0.0  # the same of the step before
        self._mark = 0.0
        self._training = False
        self._running = False

    def read(self) -> float:
        """Seconds of training so far."""
        return self.seconds + (time.perf_counter() - self._mark if self._running else 0.0)

    def passed(self, minutes: float | None) -> bool:
        """
        Whether the last step went past a multiple of so many minutes of training; the same on all processes, which
        must all ask.

        Args:
            minutes (`float`, *optional*):
                Minutes of training; with `None` the answer is no.
        """
        if minutes is None:
            return False
        ends = _of_main_process([self._step_before, self.seconds_at_last_step])
        before, now = (math.floor(seconds / (60 * minutes)) for seconds in ends)
        return now > before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block that is not training, such as a measurement by a callback."""
        self._count()
        self._running = False
        try:
            yield
        finally:
            self._go_on()

    def state(self) -> dict[str, Any]:
        """
        What a checkpoint keeps. While it is being saved, that is the time up to the last mark. Limits that came from
        the trainer's arguments are not kept, so that a resumed run goes by those of its own.
        """
        return {
            "args": {"max_train_minutes": self.max_train_minutes, "eval_minutes": self.eval_minutes},
            "attributes": {"seconds": self.seconds, "seconds_at_last_step": self.seconds_at_last_step},
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        of_args = (getattr(args, "max_train_minutes", None), getattr(args, "eval_minutes", None))
        own = (self.max_train_minutes, self.eval_minutes)
        self._limits = (of_args[0] or own[0], of_args[1] or own[1])  # they are `None` or positive
        self._restore(state)
        self._training = True
        self._go_on()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        getattr(torch, args.device.type).synchronize()  # else evaluation would wait for what training has queued
        self._count()
        max_train_minutes, eval_minutes = self._limits
        if max_train_minutes is not None:
            (self.seconds,) = _of_main_process([self.seconds])
        self._step_before, self.seconds_at_last_step = self.seconds_at_last_step, self.seconds
        if self.passed(eval_minutes):
            control.should_evaluate = True
        if max_train_minutes is not None and self.seconds >= 60 * max_train_minutes:
            control.should_training_stop = control.should_log = True
            control.should_evaluate |= eval_minutes is not None
            control.should_save |= args.save_strategy == "steps"

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._count()
        for entry in (logs, *state.log_history[-1:]):  # the same entry, once for callbacks and once for the history
            if entry is not None:
                entry.setdefault(TRAIN_TIME, self.seconds)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._running = False  # what has gone by since the last mark belongs to the evaluation

    def on_predict(self, args: Any, state: Any, control: Any, *_: Any, **kwargs: Any) -> None:
        self._go_on()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._go_on()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._go_on()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count()
        self._training = self._running = False

    def _restore(self, state: Any) -> None:
        """Take the time from the checkpoint; transformers itself does so on demand only."""
        name = type(self).__name__
        saved = state.stateful_callbacks.get(name) if state.global_step else None
        saved = saved[0] if isinstance(saved, list) else saved  # of several clocks
        if state.global_step and saved is None:
            logger.warning("The checkpoint holds no training time: the training clock starts at 0.")
            state.stateful_callbacks[name] = self.state()  # transformers looks for it when it saves
        attributes = saved["attributes"] if saved else {}
        self.seconds = attributes.get("seconds", 0.0)
        self.seconds_at_last_step = self._step_before = attributes.get("seconds_at_last_step", 0.0)

    def _count(self) -> None:
        """Add what has gone by since the last mark, and set a mark."""
        self.seconds = self.read()
        self._mark = time.perf_counter()

    def _go_on(self) -> None:
        """Set a mark without adding what has gone by."""
        self._running = self._training
        self._mark = time.perf_counter()


def _of_main_process(values: list[float]) -> list[float]:
    if PartialState().num_processes > 1:
        broadcast_object_list(values)
    return values


def check_minutes(max_train_minutes: float | None, eval_minutes: float | None) -> None:
    """
    Refuse limits that are not times.

    Args:
        max_train_minutes (`float`, *optional*):
            See [`TrainingClock`].
        eval_minutes (`float`, *optional*):
            See [`TrainingClock`].

    Raises:
        ValueError: If one is neither `None` nor a positive number.
    """
    if max_train_minutes is not None and not 0 < max_train_minutes < math.inf:
        raise ValueError(
            f"max_train_minutes={max_train_minutes} is no time to train for. Use None for no limit, or minutes, for "
            "instance 30.0."
        )
    if eval_minutes is not None and not 0 < eval_minutes < math.inf:
        raise ValueError(
            f"eval_minutes={eval_minutes} is no time between two evaluations. Use None to go by eval_strategy, or "
            "minutes, for instance 2.0."
        )
