"""What is trained on, from names in a recipe: reward functions, data sets and the policy."""

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl import DatasetMixtureConfig, ScriptArguments


if TYPE_CHECKING:
    from datasets import Dataset

    from .grpo import PODSScriptArguments


REWARDS = {
    "math_accuracy_reward": "trl_pods.rewards.math_accuracy_reward",
    "fast_accuracy_reward": "trl_pods.rewards.fast_accuracy_reward",
    "multiple_choice_reward": "trl_pods.rewards.multiple_choice_reward",
    "graded_format_reward": "trl_pods.rewards.graded_format_reward",
    "tag_count_reward": "trl_pods.rewards.tag_count_reward",
    "strict_format_reward": "trl_pods.rewards.strict_format_reward",
    "strict_tag_count_reward": "trl_pods.rewards.strict_tag_count_reward",
    "addition_reward": "trl_pods.data.addition.addition_reward",
    "accuracy_reward": "trl.rewards.accuracy_reward",
    "reasoning_accuracy_reward": "trl.rewards.reasoning_accuracy_reward",
    "think_format_reward": "trl.rewards.think_format_reward",
    "get_soft_overlong_punishment": "trl.rewards.get_soft_overlong_punishment",
}
LOADERS = {
    "gsm8k": "trl_pods.data.load_gsm8k",
    "math": "trl_pods.data.load_math",
    "sciknoweval": "trl_pods.data.load_sciknoweval",
    "addition": "trl_pods.data.addition.load_addition",
}
EMBEDDED_POLICY = "embedded"


def load_reward(name: str) -> Callable[..., list]:
    """
    A reward function by its name.

    Args:
        name (`str`):
            One of `REWARDS`, or a dotted import path; the current directory is importable.

    Returns:
        `Callable`: the function.

    Raises:
        ValueError: If the name is unknown or cannot be imported; the message lists the names.

    Example:

    ```python
    >>> load_reward("addition_reward")(completions=["85"], solution=["85"])
    [1.0]

    ```
    """
    reward = _import_by_name(name, REWARDS, "reward_funcs")
    if name == "get_soft_overlong_punishment":  # a maker of reward functions; the values are those of `trl grpo`
        return reward(max_completion_len=1280, soft_punish_cache=256)
    return reward


def open_dataset(script_args: "PODSScriptArguments", dataset_args: DatasetMixtureConfig) -> Callable[[str], "Dataset"]:
    """
    The data set that the arguments name, as a function from the name of a split to its rows.

    Args:
        script_args ([`PODSScriptArguments`]):
            Names the data set by `dataset_loader` or `dataset_name`.
        dataset_args ([`~trl.DatasetMixtureConfig`]):
            Names it by `datasets`.

    Returns:
        `Callable[[str], Dataset]`: loads a split.

    Raises:
        ValueError: If no data set is named, or `dataset_loader` beside another one.
    """
    if not (script_args.dataset_loader or script_args.dataset_name or dataset_args.datasets):
        raise ValueError(
            f"No data set is set. Set dataset_loader ({', '.join(LOADERS)}, or the dotted import path of a function), "
            "dataset_name, or datasets."
        )
    if not script_args.dataset_loader:
        return _pick_split(_load_dataset_dict(script_args, dataset_args))
    if script_args.dataset_name or dataset_args.datasets:
        raise ValueError(
            f"dataset_loader={script_args.dataset_loader!r} is set beside dataset_name or datasets. Set one of them."
        )
    kwargs: Any = script_args.dataset_kwargs or {}  # `PODSScriptArguments` has parsed it
    loader = _import_by_name(script_args.dataset_loader, LOADERS, "dataset_loader")
    return cache(lambda split: loader(split, **kwargs))


def locate_policy(name: str | None) -> str:
    """
    What to load the policy from.

    Args:
        name (`str`, *optional*):
            A folder, a repository of the hub, or `"embedded"` for the policy shipped with the package.

    Returns:
        `str`: a folder or a repository.

    Raises:
        ValueError: If there is no name, or it is a path (`./...`, `/...`) and no folder is there.
    """
    if not name:
        raise ValueError(
            f"model_name_or_path is not set. Use a folder, a repository of the hub, or {EMBEDDED_POLICY!r}."
        )
    if name.startswith(("./", "../", "/")) and not Path(name).is_dir():
        raise ValueError(f"model_name_or_path={name!r} is no folder. Make it first, or name one that is there.")
    if name != EMBEDDED_POLICY:
        return name
    from ..data.addition import embedded_policy_path

    return str(embedded_policy_path())


def make_current_directory_importable() -> None:
    """Let a dotted import path name a module in the current directory."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _load_dataset_dict(script_args: ScriptArguments, dataset_args: DatasetMixtureConfig) -> Mapping[str, "Dataset"]:
    from datasets import load_dataset
    from trl import get_dataset

    if dataset_args.datasets:  # they go before `dataset_name`, as in TRL
        return get_dataset(dataset_args)
    return load_dataset(
        script_args.dataset_name, name=script_args.dataset_config, streaming=script_args.dataset_streaming
    )


def _pick_split(splits: Mapping[str, "Dataset"]) -> Callable[[str], "Dataset"]:
    def pick(split: str) -> "Dataset":
        if split not in splits:
            raise ValueError(
                f"The data set has no split {split!r}, only {sorted(splits)}. Set dataset_train_split and "
                "dataset_test_split, or test_split_size with datasets."
            )
        return splits[split]

    return pick


def _import_by_name(name: str, paths: Mapping[str, str], setting: str) -> Any:
    choices = f"Use one of {', '.join(paths)}, or a dotted import path such as 'my_module.my_function'."
    module_name, _, attribute = paths.get(name, name).rpartition(".")
    if not module_name:
        raise ValueError(f"{setting}={name!r} is unknown. {choices}")
    make_current_directory_importable()
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}={name!r} cannot be imported ({error}). {choices}") from error
