"""What a comparison runs: the arms, their settings, and in which order. Imports no torch."""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ..scripts.recipe import find_recipe, read_recipe
from .arms import BUILT_IN_ARMS, Settings, apply, for_a_measurement


# What a comparison sets itself in every run.
_LIKE = "like"
_OURS = {
    "seed": "use seeds",
    "max_train_minutes": "use minutes",
    "accuracy_minutes": "set it outside settings and arms",
    "num_accuracy_problems": "set it outside settings and arms",
    "output_dir": "use --output_dir",
    "log_file": "the comparison keeps the log",
    "max_steps": "every run ends by the training time",
    "num_train_epochs": "every run ends by the training time",
    "resume_from_checkpoint": "every run starts anew",
    "evaluate_only": "every run trains",
}
# For all arms, unless the comparison says otherwise: a schedule of the learning rate over steps would treat an arm
# with slow steps differently, and the runs leave their curves, not their models.
_DEFAULTS = {
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "eval_strategy": "no",
    "log_completions": False,
    "disable_tqdm": True,
}
_NEVER = 1_000_000_000  # steps


@dataclass(frozen=True)
class Arm:
    """
    One of the ways to train that are compared.

    Args:
        name (`str`):
            How it is called.
        like (`str`):
            The built-in arm that it is a kind of.
        overrides (`dict[str, Any]`):
            What it sets otherwise than the recipe.
    """

    name: str
    like: str
    overrides: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedRun:
    """One arm with one seed: all settings of the training but for the folders."""

    arm: str
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


@dataclass(frozen=True)
class Comparison:
    """
    What is compared.

    Args:
        recipe (`str`):
            Path or name of the recipe that all arms start from. It must be one of PODS (n > m).
        minutes (`float`):
            Training time of every run.
        accuracy_minutes (`float`):
            Training time between two measurements of the accuracy.
        num_accuracy_problems (`int`):
            Held-out problems of a measurement.
        seeds (`tuple[int, ...]`):
            Every arm is run with each of them.
        arms (`tuple[Arm, ...]`):
            The arms.
        settings (`dict[str, Any]`, *optional*):
            What all arms set otherwise than the recipe.
        baseline (`str`, *optional*, defaults to `"grpo"`):
            The arm whose best accuracy the others are timed to reach.

    Raises:
        ValueError: If something is wrong or does not fit together.
    """

    recipe: str
    minutes: float
    accuracy_minutes: float
    num_accuracy_problems: int
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    settings: Settings = field(default_factory=dict)
    baseline: str = "grpo"

    def __post_init__(self) -> None:
        self._check_types()
        if self.accuracy_minutes > self.minutes:
            raise ValueError(
                f"accuracy_minutes={self.accuracy_minutes} is more than minutes={self.minutes}, so that there would "
                f"be no point of a curve. Use for instance accuracy_minutes={self.minutes / 10}."
            )
        if self.num_accuracy_problems < 1:
            raise ValueError(f"num_accuracy_problems={self.num_accuracy_problems} is too few. Use for instance 500.")
        self._check_names()
        for settings in (self.settings, *(arm.overrides for arm in self.arms)):
            for name, remedy in _OURS.items():
                if name in settings:
                    raise ValueError(f"{name}={settings[name]!r} cannot be set for an arm: {remedy}.")

    def _check_types(self) -> None:
        """A file may hold anything."""
        if not isinstance(self.recipe, str):
            raise ValueError(f"recipe={self.recipe!r} is no name. Use a path or a shipped recipe, such as quickstart.")
        for name in ("minutes", "accuracy_minutes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r} is no time. Use minutes of training, for instance 1.5.")
        if not _is_whole(self.num_accuracy_problems):
            raise ValueError(
                f"num_accuracy_problems={self.num_accuracy_problems!r} is no whole number. Use for instance 500."
            )
        if not all(map(_is_whole, self.seeds)):
            raise ValueError(f"seeds={list(self.seeds)} must be whole numbers. Use for instance [1, 2].")
        if not isinstance(self.settings, dict):
            raise ValueError(
                f"settings={self.settings!r} is no mapping. Use lines of `setting: value`, for instance "
                "`logging_steps: 20`."
            )

    def _check_names(self) -> None:
        names = [arm.name for arm in self.arms]
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={list(self.seeds)} must be at least one, and different. Use for instance [1, 2].")
        for name in names:
            if not re.fullmatch(r"[\w.,=+-]+", name):
                raise ValueError(f"The arm {name!r} names files. Use letters, digits and any of . , = + - _.")
        if self.baseline not in names:
            raise ValueError(f"baseline={self.baseline!r} is not among the arms. Use one of {', '.join(names)}.")

    def runs(self) -> list[PlannedRun]:
        """
        All runs, in the order in which they are run.

        Seeds are outermost, and each starts with another arm: a machine that gets slower meanwhile does so for all.
        """
        base = for_a_measurement(read_recipe(find_recipe(self.recipe))) | _DEFAULTS | self.settings
        settings = {arm.name: apply(arm.like, base | arm.overrides) for arm in self.arms}
        return [PlannedRun(arm.name, seed, settings[arm.name] | self._ours(seed)) for arm, seed in in_turn(self)]

    def _ours(self, seed: int) -> Settings:
        return {
            "seed": seed,
            "max_steps": _NEVER,
            "max_train_minutes": self.minutes,
            "accuracy_minutes": self.accuracy_minutes,
            "num_accuracy_problems": self.num_accuracy_problems,
        }


def in_turn(comparison: Comparison) -> list[tuple[Arm, int]]:
    """
    Arms and seeds in the order of the runs.

    Example:

    ```python
    >>> arms = (Arm("a", "grpo"), Arm("b", "pods"), Arm("c", "pods"))
    >>> comparison = Comparison("quickstart", 1.0, 0.1, 100, seeds=(1, 2), arms=arms, baseline="a")
    >>> [f"{arm.name}{seed}" for arm, seed in in_turn(comparison)]
    ['a1', 'b1', 'c1', 'b2', 'c2', 'a2']

    ```
    """
    arms = comparison.arms
    return [
        (arms[(position + shift) % len(arms)], seed)
        for shift, seed in enumerate(comparison.seeds)
        for position in range(len(arms))
    ]


def read_comparison(path: Path | None, flags: Mapping[str, Any]) -> Comparison:
    """
    A comparison from a file and flags that beat it.

    Args:
        path (`Path`, *optional*):
            A YAML file with the fields of [`Comparison`]; `arms` maps names to overrides, among them `like` with one
            of the built-in arms (default: the arm of that name, else `pods`).
        flags (`Mapping[str, Any]`):
            Fields by name. `arms` is a list of names, those of the file to run or built-in ones; `more_arms` maps
            names to overrides, as in the file.

    Returns:
        [`Comparison`]

    Raises:
        ValueError: If something is missing, unknown or wrong.
    """
    values = dict(read_recipe(path)) if path is not None else {}
    where = f"in {path}" if path is not None else "in the comparison"
    _check_keys(values, where)
    values |= {name: value for name, value in flags.items() if name in _FIELDS - {"arms"}}
    arms = _arms_of(values.get("arms", {}), where) | _arms_of(flags.get("more_arms", {}), "on the command line")
    for name in flags.get("arms") or []:
        if name not in arms and name not in BUILT_IN_ARMS:
            known = ", ".join(dict.fromkeys([*arms, *BUILT_IN_ARMS]))
            raise ValueError(f"There is no arm {name!r}. Use some of {known}, or describe it by --arm.")
    if flags.get("arms"):
        arms = {name: arms.get(name, Arm(name, name)) for name in flags["arms"]}
    values["arms"] = tuple(arms.values()) or tuple(Arm(name, name) for name in BUILT_IN_ARMS)
    missing = _REQUIRED - values.keys()
    if missing:
        raise ValueError(f"{sorted(missing)[0]!r} is missing {where}. Set it there or by --{sorted(missing)[0]}.")
    values["seeds"] = tuple(values["seeds"]) if isinstance(values["seeds"], list) else (values["seeds"],)
    values["settings"] = values.get("settings") or {}
    return Comparison(**values)


def _arms_of(arms: Any, where: str) -> dict[str, Arm]:
    if not isinstance(arms, Mapping):
        raise ValueError(f"`arms` {where} must be a mapping of names to overrides, lines of `name: {{...}}`.")
    found = {}
    for name, overrides in arms.items():
        if not isinstance(overrides, Mapping | None):
            raise ValueError(f"The arm {name!r} {where} must be a mapping of overrides, or empty.")
        overrides = dict(overrides or {})
        like = overrides.pop(_LIKE, name if name in BUILT_IN_ARMS else "pods")
        found[str(name)] = Arm(str(name), like, overrides)
    return found


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_keys(values: Mapping[str, Any], where: str) -> None:
    for key in values:
        if key not in _FIELDS:
            close = difflib.get_close_matches(key, _FIELDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Use some of {', '.join(sorted(_FIELDS))}."
            raise ValueError(f"{key!r} {where} is unknown.{hint}")


def read_value(text: str) -> tuple[str, Any]:
    """
    An override from the command line.

    Example:

    ```python
    >>> read_value("selector=random"), read_value("num_rollouts=64")
    (('selector', 'random'), ('num_rollouts', 64))

    ```
    """
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"{text!r} is no override. Write setting=value, for instance selector=random.")
    return name, yaml.safe_load(value)


_FIELDS = {f.name for f in fields(Comparison)}
_REQUIRED = {"recipe", "minutes", "accuracy_minutes", "num_accuracy_problems", "seeds"}
