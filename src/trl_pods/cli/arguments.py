"""
What goes to the launcher and what to the training script.

Both kinds of settings may stand in the recipe and on the command line. The settings of the training are only looked at
here, not made into a configuration: that would check them for the one process that is running, not for those to come.
"""

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from ..scripts.recipe import check_known, find_recipe, read_recipe, take_config
from .launcher import LaunchPlan, launcher_options


@dataclass
class _Recipe:
    training: dict[str, Any] = field(default_factory=dict)
    launcher: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)  # what names the recipe to the training script


def separate(args: list[str], parser: TrlParser) -> LaunchPlan:
    """
    Separate a command line, and the recipe it names, into arguments of the launcher and of the training script.

    Args:
        args (`list[str]`):
            The command line.
        parser ([`~trl.TrlParser`]):
            That of the training script. The recipe becomes its defaults.

    Returns:
        `LaunchPlan`: the arguments; of the launcher first those of the recipe, so that the command line wins.

    Raises:
        FileNotFoundError: If there is no such recipe.
        ValueError: If a setting is known to neither, or its value is of the wrong type.
    """
    config, rest = take_config(args)
    recipe = _read(config, parser) if config is not None else _Recipe()
    training, launcher = _split_command_line(rest, parser)
    values = _check_values(training, recipe.training, parser)
    return LaunchPlan(
        launcher=_as_options(recipe.launcher) + launcher,
        training=recipe.args + training,
        environment={name: str(value) for name, value in recipe.environment.items()},
        on_cpu=values.use_cpu,
    )


def check_settings(settings: dict[str, Any], name: str) -> None:
    """
    Refuse unknown settings, values of a wrong type and a policy that is not there.

    Args:
        settings (`dict[str, Any]`):
            The settings, as in a recipe.
        name (`str`):
            What they are, for messages.

    Raises:
        ValueError: If one is wrong.
    """
    from ..scripts.grpo import make_parser
    from ..scripts.task import locate_policy

    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / name
        recipe.write_text(yaml.safe_dump(settings), encoding="utf-8")
        separate(["--config", str(recipe)], make_parser())
    locate_policy(settings.get("model_name_or_path"))


def _read(config: str, parser: TrlParser) -> _Recipe:
    path = find_recipe(config)
    recipe = read_recipe(path)
    environment = recipe.pop("env", {})
    training = {action.dest for action in parser._actions}
    for key in recipe:
        check_known(key, training | launcher_options().keys(), f"in {path}")
    return _Recipe(
        training={key: value for key, value in recipe.items() if key in training},
        launcher={key: value for key, value in recipe.items() if key not in training},
        environment=environment,
        args=["--config", str(path.resolve())],
    )


def _split_command_line(args: list[str], parser: TrlParser) -> tuple[list[str], list[str]]:
    """Each option goes with the values behind it. Where both know an option (`--debug`), it is the training's."""
    training_flags = {flag for action in parser._actions for flag in action.option_strings}
    launcher_flags = {flag for action in launcher_options().values() for flag in action.option_strings}
    training: list[str] = []
    launcher: list[str] = []
    owner = None
    for arg in args:
        if arg.startswith("--") or arg in launcher_flags:
            flag = arg.partition("=")[0]
            check_known(flag, sorted(training_flags | launcher_flags), "on the command line")
            owner = training if flag in training_flags else launcher
        if owner is None:
            raise ValueError(f"Unexpected argument {arg!r}. A recipe is given by --config {arg}.")
        owner.append(arg)
    return training, launcher


def _check_values(args: list[str], defaults: dict[str, Any], parser: TrlParser) -> argparse.Namespace:
    """Check types and choices alone."""
    parser.set_defaults_with_config(**defaults)
    parser.exit_on_error = False
    try:
        values, unused = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if unused:
        raise ValueError(f"Unexpected argument {unused[0]!r} on the command line.")
    return values


def _as_options(settings: dict[str, Any]) -> list[str]:
    options = []
    for key, value in settings.items():
        action = launcher_options()[key]
        flag = action.option_strings[0]
        if action.nargs != 0:
            options += [f"{flag}={value}"] if value is not None else []
        elif isinstance(value, bool):
            options += [flag] if value else []
        else:
            raise ValueError(f"{key}: {value!r} in the recipe must be true or false.")
    return options
