"""
Processes that judge answers side by side, started when they are first needed and kept for later calls.

They are programs of their own, not copies of this process (whose CUDA a fork would break) nor second runs of its
script (which `multiprocessing` makes when it spawns, and which few scripts are written for). Any thread may use them.
They end with this process, however it ends.
"""

import builtins
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from multiprocessing import connection
from typing import Any, NoReturn


logger = logging.getLogger(__name__)

# Seconds after which a process is killed that is neither done nor ended by its own limits.
_MAX_SECONDS = 60
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
            How many there are at most.

    Example:

    ```python
    >>> pool = WorkerPool(1)
    >>> pool.map("judge_reading", [("x+1", "1+x"), ("x+1", "x")], if_ended=0.0)
    [1.0, 0.0]

    ```
    """

    def __init__(self, num_workers: int) -> None:
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="trl_pods-rewards")
        # The last one that was used comes first; `None` is one that is yet to be started.
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
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
        if is_given_up.is_set():
            return None
        worker = self._free.get()
        try:
            if worker is None or not worker.is_alive:
                worker = _Worker()
            return worker.call(request, is_given_up)
        except _EndedError as error:
            worker = None
            if not is_given_up.is_set():
                logger.warning(f"An answer could not be judged and counts as {if_ended}: {error}")
            return if_ended
        finally:
            self._free.put(worker)


class _EndedError(Exception):
    pass


class _Worker:
    """This end of one process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the process that asks
        )
        self._requests: Any = self._process.stdin
        self._replies: Any = self._process.stdout
        self._end = weakref.finalize(self, _end, self._process, os.getpid())  # also when Python exits
        self._send(sys.path)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: list[Any], is_given_up: threading.Event) -> Any:
        self._send(request)
        reply = json.loads(self._receive(is_given_up))
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

    def _receive(self, is_given_up: threading.Event) -> str:
        for _ in range(_MAX_SECONDS * 5):
            if connection.wait([self._replies], timeout=0.2):
                return self._replies.readline() or self._raise_ended()
            if is_given_up.is_set():
                break
        self._end()
        raise _EndedError(f"no result after {_MAX_SECONDS} s")

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
