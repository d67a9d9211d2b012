"""PODS for TRL: generate n rollouts per prompt, train GRPO on the m that say most (arXiv 2504.13818)."""

import importlib
from typing import TYPE_CHECKING, Any


__version__ = "0.1.0"

# Public names and where they live. They are imported on first use, so that `import trl_pods` stays light.
_EXPORTS = {
    "PODSGRPOConfig": "pods_grpo_config",
    "PODSGRPOTrainer": "pods_grpo_trainer",
    "PODSMixin": "pods_grpo_trainer",
}
_SUBMODULES = ("data", "rewards", "selectors")

__all__ = ["PODSGRPOConfig", "PODSGRPOTrainer", "PODSMixin", "__version__", "data", "rewards", "selectors"]

if TYPE_CHECKING:
    from . import data, rewards, selectors
    from .pods_grpo_config import PODSGRPOConfig
    from .pods_grpo_trainer import PODSGRPOTrainer, PODSMixin


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
