"""Start a script on several real processes (gloo)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def launch(script: Path, *arguments: Any, timeout: float, num_processes: int = 2) -> subprocess.CompletedProcess:
    """Run to its end; a run that hangs is ended and fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes), "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    return subprocess.run(
        [*command, str(script), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
