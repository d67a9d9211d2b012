"""What a run was made with: versions of packages and hardware."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch


_PACKAGES = ("trl-pods", "trl", "transformers", "torch", "accelerate", "peft", "datasets", "vllm", "deepspeed")


def versions() -> dict[str, str]:
    """
    Versions of Python and of the packages that matter, as far as they are installed.

    Example:

    ```python
    >>> versions()["python"].startswith("3.")
    True

    ```
    """
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """
    Processors, memory and accelerators of this machine.

    Example:

    ```python
    >>> sorted(hardware())
    ['accelerators', 'cpu', 'cpu_cores', 'memory_gib', 'platform', 'threads']

    ```
    """
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
