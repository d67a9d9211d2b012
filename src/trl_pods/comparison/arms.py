"""The built-in arms: what each makes of the settings of a PODS recipe."""

from collections.abc import Callable, Mapping
from typing import Any


Settings = dict[str, Any]


def grpo(settings: Settings) -> Settings:
    """
    Plain GRPO on m rollouts: as many are generated as are trained on.

    Example:

    ```python
    >>> grpo({"num_rollouts": 32, "num_generations": 8})
    {'num_rollouts': 8, 'num_generations': 8}

    ```
    """
    return {**settings, "num_rollouts": settings["num_generations"]}


def grpo_all(settings: Settings) -> Settings:
    """
    GRPO on all n rollouts: as many prompts a step as in the recipe, in n / m times as many micro-batches of its size.

    Example:

    ```python
    >>> grpo_all({"num_rollouts": 32, "num_generations": 8, "per_device_train_batch_size": 16})
    {'num_rollouts': 32, 'num_generations': 32, 'per_device_train_batch_size': 16, 'gradient_accumulation_steps': 4}

    ```
    """
    n, m = settings["num_rollouts"], settings["num_generations"]
    if n % m:
        raise ValueError(
            f"The arm grpo-all trains on n / m micro-batches for each of the recipe; num_rollouts={n} is no multiple "
            f"of num_generations={m}. Use for instance num_rollouts={-(-n // m) * m}."
        )
    wider = {**settings, "num_generations": n, "gradient_accumulation_steps": 1}
    # All that counts micro-batches or rows of a round grows with them.
    for name in ("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size"):
        value = settings.get(name, wider.get(name))
        if value is not None:
            wider[name] = int(value) * n // m
    return wider


def pods(settings: Settings) -> Settings:
    """The recipe as it is, which must down-sample."""
    n, m = settings["num_rollouts"], settings["num_generations"]
    if n <= m:
        raise ValueError(
            f"The arm pods must down-sample, and num_rollouts={n} is not more than num_generations={m}. Use for "
            f"instance num_rollouts={4 * m}, or the arm grpo."
        )
    return settings


BUILT_IN_ARMS: Mapping[str, Callable[[Settings], Settings]] = {"grpo": grpo, "grpo-all": grpo_all, "pods": pods}


def apply(kind: str, settings: Settings) -> Settings:
    """
    Settings of an arm.

    Args:
        kind (`str`):
            One of `BUILT_IN_ARMS`.
        settings (`dict[str, Any]`):
            Those of the recipe, with what the arm overrides. They must name `num_generations`, and `num_rollouts`
            where the arm is not `grpo`.

    Returns:
        `dict[str, Any]`: the settings to run.

    Raises:
        ValueError: If the kind is unknown, or the settings do not fit it.
    """
    if kind not in BUILT_IN_ARMS:
        raise ValueError(f"like={kind!r} is no built-in arm. Use one of {', '.join(BUILT_IN_ARMS)}.")
    needed = ["num_generations"] if kind == "grpo" else ["num_generations", "num_rollouts"]
    for name in needed:
        if not isinstance(settings.get(name), int):
            raise ValueError(f"The arm {kind} needs {name} as a whole number, in the recipe or as an override.")
    return BUILT_IN_ARMS[kind](settings)
