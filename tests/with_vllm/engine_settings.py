"""
What vLLM needs to serve a trainer on a CPU. Nothing in the package depends on it.

The CPU backend packs linear weights for oneDNN, or for kernels of sglang, when it loads them, and drops the parameters
that a weight sync writes to. `install` turns both off in this process; a child gets `child_environment()`, with which
Python does the same when it starts.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


CHILD_PATH = Path(__file__).parent / "child"

PATCHES = {
    "vllm._custom_ops": ("_supports_onednn", False),
    "vllm.model_executor.layers.utils": ("check_cpu_sgl_kernel", lambda *args, **kwargs: False),
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other processes share the cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

HAS_VLLM = importlib.util.find_spec("vllm") is not None


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Patches modules of vLLM once they are imported, so that nothing is imported before its time."""

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


def _patch(module: ModuleType) -> None:
    attribute, value = PATCHES[module.__name__]
    assert hasattr(module, attribute), f"{module.__name__} has no {attribute}: not the vLLM that these settings know"
    setattr(module, attribute, value)


def install() -> None:
    """Make the settings in this process."""
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    for name in PATCHES.keys() & sys.modules.keys():
        _patch(sys.modules[name])
    sys.meta_path.insert(0, _PatchingFinder())


def child_environment(**further: str) -> dict[str, str]:
    """The environment of a process that makes the settings when it starts."""
    path = os.pathsep.join(filter(None, [str(CHILD_PATH), os.environ.get("PYTHONPATH")]))
    return os.environ | ENVIRONMENT | {"PYTHONPATH": path} | further
