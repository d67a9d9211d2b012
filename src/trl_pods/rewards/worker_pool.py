"""
Processes that judge answers side by side, started when they are first needed and kept for later calls.

They are programs of their own, not copies of this process (whose CUDA a fork would break) nor second runs of its
script (which `multiprocessing` makes when it spawns, and which few scripts are written for). Any thread may use them.
They end with this process, however it ends.
"""

import builtins
import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing import connection
from typing import Any, NoReturn

from .worker import READY


logger = logging.getLogger(__name__)

# Seconds after which a process is killed that is neither done nor ended by its own limits.
_MAX_SECONDS = 60
# Seconds it may take to start; from a slow disk the imports are slow too.
_MAX_SECONDS_TO_START = 600
# An answer that takes longer may never end. Another process then works beside the one that is busy with it.
_SECONDS_ALONE = 1
_LEAST_PROCESSES = 4
_MAX_WORKERS = 8

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.stdin.readline())
from trl_pods.rewards.worker import serve
serve()
"""


class WorkerPool:
    """
    A few processes that call functions of [`~trl_pods.rewards.worker`].

    Args:
        num_workers (`int`):
            How many work at a time. One that has been busy with an answer for more than a second does not count: up to
            twice as many, and at least four, are started where answers never end.

    Example:

    ```python
    >>> pool = WorkerPool(1)
    >>> pool.map("judge_reading", [("x+1", "1+x"), ("x+1", "x")], if_ended=0.0)
    [1.0, 0.0]

    ```
    """

    def __init__(self, num_workers: int) -> None:
        most = max(2 * num_workers, _LEAST_PROCESSES)
        self._executor = ThreadPoolExecutor(most, thread_name_prefix="trl_pods-rewards")
        self._turns = threading.Semaphore(num_workers)
        # The last one that was used comes first; `None` is one that is yet to be started.
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(most):
            self._free.put(None)

    def map(self, function: str, arguments: Sequence[tuple], *, if_ended: Any) -> list[Any]:
        """
        Call a function once for each tuple of arguments.

        Args:
            function (`str`):
                Its name.
            arguments (`Sequence[tuple]`):
                What it is called with, strings.
            if_ended (`Any`):
                The result where the call ended its process, as by taking too long.

        Returns:
            `list[Any]`: the results, in the order of the arguments.

        Raises:
            RuntimeError: If a process cannot be started, or fails; or what the function raised. The first error ends
                all calls.
        """
        is_given_up = threading.Event()
        calls = [self._executor.submit(self._call, [function, each], if_ended, is_given_up) for each in arguments]
        try:
            # In short waits, between which an exception can reach this thread.
            while wait(calls, timeout=0.5).not_done:
                pass
        except BaseException:
            is_given_up.set()
            raise
        return [call.result() for call in calls]

    def _call(self, request: list[Any], if_ended: Any, is_given_up: threading.Event) -> Any:
        with contextlib.ExitStack() as turn:
            turn.enter_context(self._turns)
            if is_given_up.is_set():
                return None
            worker = self._free.get()
            try:
                if worker is None or not worker.is_alive:
                    worker = _Worker(is_given_up)
                return worker.call(request, is_given_up, turn.close)
            except _EndedError as error:
                worker = None
                if not is_given_up.is_set():
                    logger.warning(f"An answer could not be judged and counts as {if_ended}: {error}")
                return if_ended
            except BaseException:
                is_given_up.set()
                raise
            finally:
                self._free.put(worker)


class _EndedError(Exception):
    pass


class _Worker:
    """This end of one process, which is ready once this is made."""

    def __init__(self, is_given_up: threading.Event) -> None:
        self._process = subprocess.Popen(
            # -P: a file in the current directory must not take the place of a module of Python.
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        self._requests: Any = self._process.stdin
        self._replies: Any = self._process.stdout
        self._end = weakref.finalize(self, _end, self._process, os.getpid())  # also when Python exits
        try:
            self._send([path for path in sys.path if isinstance(path, str)])  # Python looks at no other, say a `Path`
            line = self._receive(is_given_up, _MAX_SECONDS_TO_START)
        except _EndedError as error:
            if is_given_up.is_set():
                raise
            raise RuntimeError(f"A process that judges answers did not start: {error}.") from error
        if line != READY:
            self._end()
            raise RuntimeError(f"A process that judges answers printed {line!r} before it was ready.")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: list[Any], is_given_up: threading.Event, if_slow: Callable[[], None]) -> Any:
        self._send(request)
        reply = json.loads(self._receive(is_given_up, _MAX_SECONDS, if_slow))
        if "error" in reply:
            name, message = reply["error"]
            raise getattr(builtins, name, RuntimeError)(message)
        return reply["value"]

    def _send(self, message: list[Any]) -> None:
        try:
            self._requests.write(json.dumps(message) + "\n")
            self._requests.flush()
        except OSError:
            self._raise_ended()

    def _receive(
        self, is_given_up: threading.Event, max_seconds: float, if_slow: Callable[[], None] = lambda: None
    ) -> str:
        start = time.monotonic()
        while not connection.wait([self._replies], timeout=0.2):
            seconds = time.monotonic() - start
            if is_given_up.is_set() or seconds > max_seconds:
                self._end()
                raise _EndedError(f"no word from it in {max_seconds} s")
            if seconds > _SECONDS_ALONE:
                if_slow()
        return self._replies.readline() or self._raise_ended()

    def _raise_ended(self) -> NoReturn:
        code = self._process.wait()  # it has closed its end, or is closing it
        self._end()
        if code >= 0:
            raise RuntimeError(f"A process that judges answers has failed with exit code {code}; its error is above.")
        raise _EndedError(
            "it took too long" if code == -signal.SIGPROF else f"its process was killed by signal {-code}"
        )


def _end(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        process.kill()
        with process:  # closes its pipes
            pass


_lock = threading.Lock()
_shared: WorkerPool | None = None


def shared_pool() -> WorkerPool:
    """The pool of this process, with one worker for each core that is left to it."""
    global _shared
    with _lock:
        if _shared is None:
            _shared = WorkerPool(num_workers())
        return _shared


def map_distinct(function: str, arguments: Iterable[tuple], *, if_ended: Any) -> dict[tuple, Any]:
    """
    Call a function of [`~trl_pods.rewards.worker`] in the shared pool, once for equal arguments.

    Args:
        function (`str`):
            Its name.
        arguments (`Iterable[tuple]`):
            What it is called with, strings.
        if_ended (`Any`):
            The result where the call ended its process, as by taking too long.

    Returns:
        `dict[tuple, Any]`: The result for each tuple of arguments.

    Example:

    ```python
    >>> map_distinct("judge_reading", [("x+1", "1+x"), ("x+1", "1+x")], if_ended=0.0)
    {('x+1', '1+x'): 1.0}

    ```
    """
    distinct = list(dict.fromkeys(arguments))
    return (
        dict(zip(distinct, shared_pool().map(function, distinct, if_ended=if_ended), strict=True)) if distinct else {}
    )


def num_workers() -> int:
    """
    Cores per training process on this machine, at least 1 and at most 8.

    Example:

    ```python
    >>> 1 <= num_workers() <= 8
    True

    ```
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1), _MAX_WORKERS)


def _forget() -> None:
    # Threads do not survive a fork, and the processes are the parent's.
    global _lock, _shared
    _lock, _shared = threading.Lock(), None


if hasattr(os, "register_at_fork"):  # not on Windows, where there are no forks
    os.register_at_fork(after_in_child=_forget)
