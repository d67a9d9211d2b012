"""
A process that fails says so to the others where they meet next, so that none is left waiting in a collective.

They meet in the key-value store of the process group and not by a collective: it knows who is missing, takes a time
limit on every backend, does not wait for a device, and a process can look meanwhile whether its neighbours live. A
meeting costs a few short messages.
"""

import itertools
import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch.distributed as dist


# Seconds that a process which failed waits for the others to hear of it, before it ends with its own exception.
_PATIENCE = 60.0

# Seconds between two looks whether the neighbours live.
_PULSE = 2.0

# Where process ids mean the same: hosts may share a name, and the first namespace of ids is alike on all.
_BOOT, _NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")

# Characters of a traceback that are passed on, from its end.
_MAX_TRACEBACK = 10_000

_instances = itertools.count()  # alike on all processes, which build their trainers in the same order


class ProcessFailures:
    """
    Shares what fails on one process with the others.

    All processes must open the same blocks by [`~ProcessFailures.shared`] and meet equally often in each. With one
    process, or without a process group, nothing is done and exceptions pass as they are.

    Args:
        process (`int`):
            Number of this process.
        num_processes (`int`):
            Number of processes.
        timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds to wait for the others at a meeting.
        store (`torch.distributed.Store`, *optional*):
            Where they meet. Default: the store of the process group.

    Raises:
        RuntimeError: At a meeting, if another process failed or does not come; it names the process and the cause.

    Example:

    ```python
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> store = dist.HashStore()

    >>> def work(process):
    ...     failures = ProcessFailures(process, num_processes=2, store=dist.PrefixStore("example", store))
    ...     try:
    ...         with failures.shared():
    ...             result = 1 / process
    ...             failures.meet()
    ...     except Exception as error:
    ...         return str(error).splitlines()[0]

    >>> with ThreadPoolExecutor(2) as pool:
    ...     for outcome in pool.map(work, range(2)):
    ...         print(outcome)  # doctest: +ELLIPSIS
    division by zero
    Process 0 failed, and so this one ends: ZeroDivisionError('division by zero') in `work` (...)

    ```
    """

    def __init__(
        self, process: int, num_processes: int, timeout: float = 1800.0, store: dist.Store | None = None
    ) -> None:
        self._process = process
        self._num_processes = num_processes
        self._timeout = timeout
        self._store = (store or _own_store()) if num_processes > 1 else None
        if self._store is not None:
            self._store.set(f"pid/{process}", json.dumps([_machine(), os.getpid()]))
        self._meetings = itertools.count()
        self._open = False
        self._deadline: tuple[float, str] | None = None
        self._places: dict[int, tuple[str, int]] = {}  # machine and process id of each

    @contextmanager
    def shared(self, *collectives: tuple[Any, str]) -> Iterator[None]:
        """
        A block in which processes may fail one by one, up to [`~ProcessFailures.settle`] or its end.

        Args:
            collectives (`tuple[Any, str]`):
                Functions, as owner and name, before each of which the processes meet while the block lasts.
        """
        self._open = self._store is not None
        with ExitStack() as stack:
            for owner, name in collectives if self._open else ():
                stack.enter_context(patch.object(owner, name, self._meeting_before(getattr(owner, name))))
            try:
                yield
            except (Exception, SystemExit) as error:
                self._report(error)
                raise
            finally:
                self._open, self._deadline = False, None

    def meet(self) -> None:
        """Go on when all processes are here and none has failed since they last met; outside a block do nothing."""
        if not self._open:
            return
        try:
            reports = self._exchange(next(self._meetings), None, *self._limit())
        except RuntimeError:
            self._open = False  # nothing more is said to processes that have gone
            raise
        if reports:
            self._open = False  # they know
            raise RuntimeError("\n\n".join(reports))

    def settle(self) -> None:
        """From here on the processes do the same: they fail together or are not followed by a meeting."""
        self._open, self._deadline = False, None

    @contextmanager
    def limit(self, seconds: float, reason: str) -> Iterator[None]:
        """
        To the meetings in this block the processes must come within so many seconds, and if it fails to the next one.

        Args:
            seconds (`float`):
                The limit, from now on.
            reason (`str`):
                What a process that does not come has not done.
        """
        self._deadline = (time.monotonic() + seconds, reason)
        yield
        self._deadline = None

    def _meeting_before(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def meet_first(*args: Any, **kwargs: Any) -> Any:
            self.meet()
            return collective(*args, **kwargs)

        return meet_first

    def _limit(self) -> tuple[float, str]:
        if self._deadline is None:
            return self._timeout, f"come within {self._timeout:g} s to where all exchange what they have"
        deadline, reason = self._deadline
        return max(deadline - time.monotonic(), 1.0), reason

    def _report(self, error: BaseException) -> None:
        if not self._open:
            return
        seconds, reason = self._limit()
        if self._deadline is None:
            seconds = min(seconds, _PATIENCE)
        try:
            self._exchange(next(self._meetings), self._describe(error), seconds, reason)
        except RuntimeError:
            return  # its own exception says more than that another process is missing

    def _describe(self, error: BaseException) -> str:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]
        return (
            f"Process {self._process} failed, and so this one ends: {error!r} in `{place.name}` "
            f"({place.filename}:{place.lineno})\n\nOn process {self._process}:\n{text}"
        )

    def _exchange(self, meeting: int, report: str | None, seconds: float, reason: str) -> list[str]:
        """What the processes that failed report, once all are here."""
        store = self._store
        assert store is not None
        try:
            store.set(f"{meeting}/{self._process}", report or "")
            if report is not None:
                store.add(f"{meeting}/failed", 1)
            if store.add(f"{meeting}/here", 1) == self._num_processes:  # the last one collects
                store.set(f"{meeting}/reports", json.dumps(self._collect(meeting)))
            if not self._wait(meeting, seconds):
                return [*self._reports(meeting), self._who_is_missing(meeting, reason)]
            reports = json.loads(store.get(f"{meeting}/reports"))
            self._forget(meeting - 1)
        except RuntimeError as error:  # of the store
            raise RuntimeError(
                f"Process {self._process} lost the store of the process group: the process that holds it has ended."
            ) from error
        return reports

    def _wait(self, meeting: int, seconds: float) -> bool:
        """
        Whether all come. It looks again and again, at intervals of 1 % of the time waited, since a wait inside the
        store would not notice that another process has died, and warns when it ends early.
        """
        assert self._store is not None
        started = pulse = time.monotonic()
        shortest = 1e-3 * max(1.0, self._num_processes / 16)  # spares the store where it serves many
        while not self._store.check([f"{meeting}/reports"]):
            now = time.monotonic()
            if now - started > seconds:
                return False
            if now - pulse > _PULSE:
                if self._dead():
                    return False
                pulse = now
            time.sleep(max(shortest, min((now - started) / 100, 0.1)))
        return True

    def _dead(self) -> list[int]:
        """Processes on this machine that have ended."""
        assert self._store is not None
        for process in set(range(self._num_processes)) - self._places.keys():
            if self._store.check([f"pid/{process}"]):  # else it has not come so far
                self._places[process] = tuple(json.loads(self._store.get(f"pid/{process}")))
        here = {process: pid for process, (machine, pid) in self._places.items() if machine == _machine()}
        return sorted(process for process, pid in here.items() if not psutil.pid_exists(pid))

    def _collect(self, meeting: int) -> list[str]:
        assert self._store is not None
        return [] if self._store.add(f"{meeting}/failed", 0) == 0 else self._reports(meeting)

    def _reports(self, meeting: int) -> list[str]:
        assert self._store is not None
        here = [p for p in range(self._num_processes) if self._store.check([f"{meeting}/{p}"])]
        said = [self._store.get(f"{meeting}/{process}").decode() for process in here]
        return [report for report in said if report]

    def _forget(self, meeting: int) -> None:
        """All have left a meeting when all are at the next one."""
        assert self._store is not None
        if meeting < 0:
            return
        names = ["failed", "here", "reports"] if self._process == 0 else []
        for name in [*names, self._process]:
            self._store.delete_key(f"{meeting}/{name}")

    def _who_is_missing(self, meeting: int, reason: str) -> str:
        assert self._store is not None
        dead = self._dead()
        if dead:
            return f"Of {self._num_processes} processes, {dead} have died."
        missing = [p for p in range(self._num_processes) if not self._store.check([f"{meeting}/{p}"])]
        return f"Of {self._num_processes} processes, {missing} have not {reason}."


def _machine() -> str:
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    namespace = _NAMESPACE.readlink() if _NAMESPACE.exists() else ""
    return f"{platform.node()} {boot} {namespace}"


def _own_store() -> dist.Store | None:
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.PrefixStore(f"trl_pods/{next(_instances)}", dist.distributed_c10d._get_default_store())
