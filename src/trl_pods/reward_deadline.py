"""
A time limit for reward functions that hang.

They run in the main thread, where math-verify needs to be for its own alarm, and may hang in C code that holds the
interpreter's lock (a regular expression, a huge power): no thread of the process would then run. So a small process
beside it keeps the time. It sends a signal, whose handler raises in the main thread and interrupts what waits for the
system; if that does not end the scoring, it kills the process. This module is also what that process runs, so it
imports the standard library alone.
"""

import atexit
import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any


# Seconds after the limit until a process that cannot be interrupted is killed.
GRACE = 10.0

# Not SIGALRM, which math-verify uses; this one belongs to a timer that Python programs hardly use.
_SIGNAL: Any = getattr(signal, "SIGVTALRM", None)

_STDERR = 2

_current: "list[RewardDeadline]" = []  # the scorings under way, one within the other


class _Interrupted(BaseException):  # so that `except Exception` in a reward function does not swallow it
    pass


class RewardDeadline:
    """
    Ends a scoring that takes too long.

    Args:
        seconds (`float`):
            The limit for all reward functions of a scoring together.
        process (`int`, *optional*, defaults to `0`):
            Number of this process, for the messages.

    Raises:
        TimeoutError: From [`~RewardDeadline.watch`], if the limit is over; it names what was interrupted.

    Example:

    ```python
    >>> deadline = RewardDeadline(seconds=0.1)
    >>> with deadline.watch("sleepy"):  # doctest: +ELLIPSIS
    ...     time.sleep(1000)
    Traceback (most recent call last):
        ...
    TimeoutError: On process 0 the reward functions sleepy took longer than reward_timeout=0.1 s; interrupted in ...

    ```
    """

    def __init__(self, seconds: float, process: int = 0) -> None:
        self.seconds = seconds
        self._process = process
        self._names = ""
        self._watcher: subprocess.Popen | None = None
        self._watched = 0  # id of the process that the watcher watches: not of one that was forked from it
        self._limits_exit = False
        self._started = 0.0
        self._expired = False

    @property
    def seconds_for_others(self) -> float:
        """When other processes give up on this one: before it is killed, so that they can say which one it is."""
        return self.seconds + GRACE / 2

    @contextlib.contextmanager
    def watch(self, names: str) -> Iterator[None]:
        """
        Score under the limit.

        Args:
            names (`str`):
                The reward functions, for the message.
        """
        _listen()
        self._names, self._started, self._expired = names, time.monotonic(), False
        _current.append(self)
        self._begin()
        try:
            yield
            self.stop()
        except _Interrupted as interruption:
            if not self._expired:  # of a scoring around this one
                raise
            raise self._error(interruption) from interruption
        finally:
            self._end()

    def stop(self) -> None:
        """The scoring is done; what follows in the block has no limit."""
        self._end()
        if self._expired:  # a reward function swallowed the interruption
            raise self._error()

    def _begin(self) -> None:
        if not self._tell(b"+"):
            self._watcher, self._watched = self._start_watcher(), os.getpid()
            self._tell(b"+")

    def _end(self) -> None:
        if self in _current:
            _current.remove(self)  # a signal that comes later is not for this scoring
            self._tell(b"-")

    def _error(self, interruption: BaseException | None = None) -> TimeoutError:
        return TimeoutError(
            f"On process {self._process} the reward functions {self._names} took longer than reward_timeout="
            f"{self.seconds:g} s{_place(interruption)}."
        )

    def expire(self) -> None:
        """The signal: raise if the time is over, as a late one may come in the next scoring."""
        if time.monotonic() - self._started >= self.seconds:
            self._expired = True
            self._limit_exit()
            raise _Interrupted

    def _limit_exit(self) -> None:
        """A thread that still scores would keep the process from ending: at the exit it gets the same time again."""
        if self._limits_exit:
            return
        self._limits_exit = True
        before_exit: Callable[..., object] = getattr(threading, "_register_atexit", lambda *args: None)
        before_exit(self._tell, b"+")  # before threads are joined, those of `concurrent.futures` too
        atexit.register(self._tell, b"-")  # when all have been

    def _tell(self, message: bytes) -> bool:
        """Whether there is a watcher to hear it: it may have been killed, for want of memory for instance."""
        if self._watcher is None or self._watched != os.getpid():
            return False
        assert self._watcher.stdin is not None
        try:
            self._watcher.stdin.write(message)
        except BrokenPipeError:
            return False
        return True

    def _start_watcher(self) -> subprocess.Popen:
        farewell = (
            f"Process {self._process} is killed: its reward functions hang and could not be interrupted within "
            f"{GRACE:g} s after reward_timeout={self.seconds:g} s. Where they hang is written above.\n"
        )
        return subprocess.Popen(
            # Isolated and without site packages it starts fast; a session of its own spares it Ctrl-C.
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(self.seconds), str(GRACE), farewell],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )


def _listen() -> None:
    # In another thread than the main one nothing can be interrupted: there the signal ends the process, its default.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(_SIGNAL) is not _on_signal:
        signal.signal(_SIGNAL, _on_signal)
    faulthandler.register(_SIGNAL, file=_STDERR, chain=True)  # shows where, even if the handler cannot run


def _on_signal(signum: int, frame: object) -> None:
    for deadline in list(_current):
        deadline.expire()


def _place(interrupted: BaseException | None) -> str:
    frames = traceback.extract_tb(interrupted.__traceback__) if interrupted else []
    frames = [frame for frame in frames if frame.filename != __file__]
    return f"; interrupted in `{frames[-1].name}` ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


# The process that keeps the time


def _keep_time(process_id: int, seconds: float, grace: float, farewell: str) -> None:
    while True:
        if _told(None) != b"+" or _told(seconds):  # a scoring begins, and ends in time
            continue
        _kill(process_id, _SIGNAL)
        if not _told(grace):
            _kill(process_id, signal.SIGKILL, farewell)


def _told(seconds: float | None) -> bytes:
    ready, _, _ = select.select([0], [], [], seconds)
    message = os.read(0, 1) if ready else b""
    if ready and not message:
        sys.exit()  # the process that scores has ended
    return message


def _kill(process_id: int, signum: int, farewell: str = "") -> None:
    if os.getppid() != process_id:  # it has ended; what it has forked keeps the pipe open
        sys.exit()
    sys.stderr.write(farewell)
    sys.stderr.flush()
    os.kill(process_id, signum)


if __name__ == "__main__":
    _keep_time(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
