"""Starts a script in several real processes, with a watchdog."""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock


# How much sooner than the launcher a process that hangs gives up: time enough to print where it stands.
_HEAD_START = 10


def run_processes(
    script: Path,
    *arguments: object,
    num_processes: int,
    timeout: int = 240,
    config_file: Path | None = None,
    **variables: str,
) -> tuple[int, str]:
    """
    Run a script under torchrun, or under `accelerate launch` if a file of its settings is given; return its exit
    status and what it wrote.

    The test fails if the run takes longer than `timeout` seconds; then no process is left behind, and the output says
    where each stood if the script has called `give_up_in_time`.
    """
    if config_file is None:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_processes), "--standalone"]
    else:
        launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config_file)]
        launcher += ["--num_processes", str(num_processes), "--main_process_port", "0"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "TEST_SECONDS": str(timeout - _HEAD_START),
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, *launcher, str(script), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the launcher, if it hangs, and what it may have left
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def launch(script: Path, *arguments: object, **settings: Any) -> None:
    """Run a script as `run_processes` does; the test fails if the script does."""
    status, output = run_processes(script, *arguments, **settings)
    assert status == 0, output[-8000:]


def give_up_in_time() -> None:
    """To be called by a launched script: if it hangs, print the stack of each thread and exit."""
    faulthandler.dump_traceback_later(int(os.environ["TEST_SECONDS"]), exit=True)


def once(tmp_path_factory, name: str, fill: Callable[[Path], object]) -> Path:
    """A folder that was filled by the first worker of pytest-xdist that asked for it, so that none launches again."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            unfinished = folder.with_name(f"{name}-unfinished")
            assert not unfinished.exists(), f"{name} failed before: the first test that asked for it says why"
            unfinished.mkdir()
            fill(unfinished)
            unfinished.rename(folder)
    return folder
