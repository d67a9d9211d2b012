"""The built-in arms: what each makes of the settings of a PODS recipe."""

from collections.abc import Callable, Mapping
from typing import Any


Settings = dict[str, Any]
DEFAULT_BATCH_SIZE = 8  # `per_device_train_batch_size` if it is not set

# Settings of a recipe that are for a training whose model is kept: evaluation beside it, what goes to the hub, from
# where it is resumed, and the shape of a schedule over its steps.
_OF_A_TRAINING_FOR_ITS_MODEL = (
    "do_eval",
    "eval_minutes",
    "eval_on_start",
    "eval_strategy",
    "evaluate_only",
    "load_best_model_at_end",
    "log_completions_hub_repo",
    "log_update_memory",
    "lr_scheduler_kwargs",
    "push_to_hub",
    "resume_from_checkpoint",
)


def for_a_measurement(recipe: Settings) -> Settings:
    """
    The settings of a recipe without those that a run which is only measured has no use for.

    Example:

    ```python
    >>> for_a_measurement({"num_rollouts": 32, "eval_strategy": "steps", "eval_on_start": True, "push_to_hub": True})
    {'num_rollouts': 32}

    ```
    """
    return {name: value for name, value in recipe.items() if name not in _OF_A_TRAINING_FOR_ITS_MODEL}


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
    return train_on(settings, n)


def train_on(settings: Settings, num_generations: int) -> Settings:
    """
    The settings with another m: as many prompts a step, in micro-batches of the same size or, where m or the number of
    micro-batches leaves no other way, smaller ones.

    Args:
        settings (`dict[str, Any]`):
            The settings, with `num_generations`.
        num_generations (`int`):
            The other m.

    Raises:
        ValueError: If a process would train on a fraction of a row.

    Example:

    ```python
    >>> recipe = {"num_generations": 8, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    >>> train_on(recipe, 4)
    {'num_generations': 4, 'per_device_train_batch_size': 16, 'gradient_accumulation_steps': 1}
    >>> train_on(recipe, 2)
    {'num_generations': 2, 'per_device_train_batch_size': 8, 'gradient_accumulation_steps': 1}

    ```
    """
    m, batch_size = settings["num_generations"], int(settings.get("per_device_train_batch_size") or DEFAULT_BATCH_SIZE)
    accumulation = int(settings.get("gradient_accumulation_steps") or 1)
    micro_batches = int(settings.get("steps_per_generation") or accumulation)  # of a round
    rows, part_of_a_row = divmod(batch_size * accumulation * num_generations, m)
    fitting = [
        number
        for number in range(-(-accumulation * num_generations // m), rows + 1)
        if rows % number == 0 and micro_batches * number % accumulation == 0
    ]
    if part_of_a_row or not fitting:
        raise ValueError(
            f"num_generations={num_generations} does not fit in place of {m}: of the {batch_size * accumulation} rows "
            f"that a process trains on in a step it would leave {batch_size * accumulation * num_generations / m:g}, "
            f"to be split into micro-batches. Use for instance num_generations={2 * m}."
        )
    changed = {**settings, "num_generations": num_generations, "gradient_accumulation_steps": fitting[0]}
    if rows != fitting[0] * batch_size:
        changed["per_device_train_batch_size"] = rows // fitting[0]
    # All else that counts micro-batches or rows of a round goes with them.
    if settings.get("steps_per_generation") is not None:
        changed["steps_per_generation"] = micro_batches * fitting[0] // accumulation
    if settings.get("generation_batch_size") is not None:
        changed["generation_batch_size"] = int(settings["generation_batch_size"]) * num_generations // m
    return changed


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
    if not isinstance(kind, str) or kind not in BUILT_IN_ARMS:
        raise ValueError(f"like={kind!r} is no built-in arm. Use one of {', '.join(BUILT_IN_ARMS)}.")
    needed = ["num_generations"] if kind == "grpo" else ["num_generations", "num_rollouts"]
    for name in needed:
        if not isinstance(settings.get(name), int):
            raise ValueError(f"The arm {kind} needs {name} as a whole number, in the recipe or as an override.")
    return BUILT_IN_ARMS[kind](settings)
