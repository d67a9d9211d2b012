"""Recipes: YAML files of settings, given by path or, where shipped with the package, by name. Imports no torch."""

import argparse
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


COMPARISONS = "comparisons"  # folder among the recipes: files of `trl-pods compare`, which are no recipes


def recipes_folder() -> Path:
    """The recipes shipped with the package: inside it where it is installed, beside `src` in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes, such as `"quickstart"` or `"gsm8k/qwen2.5-3b-lora-pods"`."""
    return [name for name in _names(recipes_folder()) if not name.startswith(f"{COMPARISONS}/")]


def shipped_comparisons() -> list[str]:
    """Names of the shipped comparisons of `trl-pods compare`, such as `"addition/arms"`."""
    return _names(recipes_folder() / COMPARISONS)


def find_recipe(name: str) -> Path:
    """
    The file of a recipe.

    Args:
        name (`str`):
            A path, or the name of a shipped recipe. A file of that path goes first.

    Returns:
        `Path`: the file.

    Raises:
        FileNotFoundError: If there is neither; the message lists the shipped recipes.
    """
    return _find("recipe", name, recipes_folder(), shipped_recipes())


def find_comparison(name: str) -> Path:
    """As [`find_recipe`], for the comparisons of `trl-pods compare`."""
    return _find("comparison", name, recipes_folder() / COMPARISONS, shipped_comparisons())


def _find(kind: str, name: str, folder: Path, shipped: list[str]) -> Path:
    for path in (Path(name), folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"There is no {kind} {name!r}: it is neither a file nor one of the shipped {kind}s "
        f"({', '.join(shipped) or 'none here'})."
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def read_recipe(path: Path) -> dict[str, Any]:
    """
    The settings of a recipe.

    Args:
        path (`Path`):
            A YAML file.

    Returns:
        `dict[str, Any]`: the settings as they stand in the file.

    Raises:
        ValueError: If the file is not valid YAML or not a mapping with strings as keys, or its `env` is not a mapping.
    """
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(recipe, dict) or not all(isinstance(key, str) for key in recipe):
        raise ValueError(f"{path} must be a mapping, lines of `setting: value`; it is {_kind(recipe)}.")
    if not isinstance(recipe.get("env", {}), dict):
        raise ValueError(f"`env` in {path} must be a mapping, lines of `VARIABLE: value`.")
    return recipe


def take_config(args: list[str]) -> tuple[str | None, list[str]]:
    """
    Take `--config` and its value out of a command line.

    Args:
        args (`list[str]`):
            The command line.

    Returns:
        `tuple[str | None, list[str]]`: the value, `None` if there is none, and the rest of the command line.

    Raises:
        ValueError: If `--config` has no value.

    Example:

    ```python
    >>> take_config(["--seed", "1", "--config", "quickstart", "--beta", "-1"])
    ('quickstart', ['--seed', '1', '--beta', '-1'])

    ```
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config")
    try:
        namespace, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ValueError("--config needs a value: a YAML file or the name of a shipped recipe.") from error
    return namespace.config, rest


def check_known(name: str, known: Iterable[str], where: str) -> None:
    """
    Refuse a setting that nobody reads.

    Args:
        name (`str`):
            The setting.
        known (`Iterable[str]`):
            All settings there are.
        where (`str`):
            Where the setting stands, for the message: `"in recipe.yaml"`.

    Raises:
        ValueError: If the setting is not known; the message names it and, where there is one, a close match.

    Example:

    ```python
    >>> check_known("sede", ["num_rollouts", "seed"], "in recipe.yaml")
    Traceback (most recent call last):
    ValueError: 'sede' in recipe.yaml is neither a training setting nor a launch option. Did you mean 'seed'?

    ```
    """
    known = list(known)
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    raise ValueError(
        f"{name!r} {where} is neither a training setting nor a launch option."
        + (f" Did you mean {close[0]!r}?" if close else "")
    )


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    return "a mapping with other keys than strings" if isinstance(value, dict) else f"a {type(value).__name__}"
