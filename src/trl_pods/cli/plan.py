"""The arguments of `trl-pods plan`. Imports no torch."""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from ..comparison.arms import Settings
from ..planning.pairs import Planned, default_memory_rows, make_grid, plan_processes
from ..scripts.recipe import find_recipe, read_recipe


_DESCRIPTION = """\
Find n (num_rollouts) and m (num_generations) for a recipe on this machine: measure a few steps of a few pairs, predict
seconds and kept variance of rewards for all pairs of a grid, check the seconds on a pair that the prediction did not
see, and recommend a pair.

Every measured pair is a process of its own, with the settings of the recipe, as many prompts a step as in the recipe,
and learning rate 0. It leaves one JSON file in OUTPUT_DIR/measurements (its fields: the head of
trl_pods/planning/measurement.py) and is not measured again: the same command goes on after an interruption, and draws
tables and plots anew. OUTPUT_DIR gets plan.md and, with matplotlib, plots as PNG and SVG.

Any setting of `trl-pods grpo` may follow and wins over the recipe, for instance --model_name_or_path."""


def plan(args: list[str], prog: str) -> int:
    """
    Run `trl-pods plan`.

    Args:
        args (`list[str]`):
            The command line behind the command.
        prog (`str`):
            Name of the program in `--help`.

    Returns:
        `int`: the exit code: 0, 1 if a measured process failed, 130 if interrupted.

    Raises:
        FileNotFoundError: If there is no such recipe.
        ValueError: If a setting is wrong.
    """
    options, recipe = _parse(args, prog)
    grid = make_grid(recipe, options.num_rollouts_grid, options.num_generations_grid)
    memory_rows = default_memory_rows(recipe) if options.memory_rows is None else options.memory_rows
    processes = plan_processes(recipe, grid, memory_rows, options.warmup, options.steps, options.passes)
    if options.dry_run:
        print("\n".join(f"{process.name} ({process.purpose})" for process in processes))
        return 0
    _check(recipe, processes)
    from ..planning.measuring import MeasuringError, measure
    from ..planning.summary import summarize

    try:
        measurements = measure(processes, options.output_dir, options.warmup)
    except MeasuringError as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    return _show(summarize(measurements, recipe, grid), options.output_dir, prog)


def _show(found: Any, folder: Path, prog: str) -> int:
    from ..planning.plots import draw_plots
    from ..planning.recommendation import reason
    from ..planning.tables import check_text, grid_table, plan_text
    from ..whole_files import write_text

    missing = None
    plots: list[str] = []
    try:
        plots = draw_plots(found, folder)
    except ImportError as error:  # the table is worth having without
        missing = error
    write_text(plan_text(found, plots), folder / "plan.md")
    print(f"{grid_table(found)}\n\n{check_text(found)}\n\n{reason(found.chosen, found.twice, found.options)}\n")
    print(f"Plan: {folder / 'plan.md'}")
    if missing is not None:
        print(f"{prog}: no plots. {missing}", file=sys.stderr)
    return 0


def _parse(args: list[str], prog: str) -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", help="path or name of the recipe")
    parser.add_argument("--output_dir", type=Path, help="folder of the plan; what is measured there is used again")
    grid = "default: five, each twice the one before, from a quarter of the recipe's n (at least its m)"
    parser.add_argument("--num_rollouts_grid", type=int, nargs="+", metavar="N", help=f"numbers of rollouts; {grid}")
    grid = "default: the recipe's m, its half and quarter, twice and four times"
    parser.add_argument("--num_generations_grid", type=int, nargs="+", metavar="M", help=f"numbers kept; {grid}")
    rows = "rows of the micro-batches whose update memory is measured; may be none (default: around the recipe's)"
    parser.add_argument("--memory_rows", type=int, nargs="*", metavar="ROWS", help=rows)
    parser.add_argument("--steps", type=int, default=6, help="rounds measured in each process (default: 6)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before these (default: 2)")
    passes = "how often every pair has its turn: 3 where the machine has slow phases (default: 1)"
    parser.add_argument("--passes", type=int, default=1, help=passes)
    parser.add_argument("--dry_run", action="store_true", help="show what would be measured and do nothing")
    try:
        options, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if options.config is None:
        raise ValueError("--config is missing. Name a recipe, its path or that of a shipped one: --config quickstart.")
    if options.output_dir is None and not options.dry_run:
        raise ValueError("--output_dir is missing. Name the folder of the plan, for instance runs/plan.")
    for name, least in (("steps", 1), ("warmup", 0), ("passes", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"{name}={getattr(options, name)} is too few. Use for instance --{name} {least + 2}.")
    return options, {**read_recipe(find_recipe(options.config)), **read_overrides(rest)}


def read_overrides(args: list[str]) -> Settings:
    """
    Settings from a command line, with values as they would stand in a recipe.

    Args:
        args (`list[str]`):
            The command line.

    Raises:
        ValueError: If something else stands there.

    Example:

    ```python
    >>> read_overrides(["--seed", "1", "--reward-weights", "1.0", "0.5", "--use_cpu", "--beta=-1"])
    {'seed': 1, 'reward_weights': [1.0, 0.5], 'use_cpu': True, 'beta': -1}

    ```
    """
    values: dict[str, list[str]] = {}
    found: list[str] | None = None
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.removeprefix("--").partition("=")
            found = values[name.replace("-", "_")] = [value] if equals else []
        elif found is None:
            raise ValueError(f"Unexpected argument {arg!r}. A recipe is given by --config {arg}.")
        else:
            found.append(arg)
    settings: Settings = {}
    for name, texts in values.items():
        read = [yaml.safe_load(text) for text in texts]
        settings[name] = read if len(read) > 1 else (read[0] if read else True)
    return settings


def _check(recipe: Settings, processes: list[Planned]) -> None:
    """Refuse unknown settings, values of a wrong type, and what a plan cannot do, before anything is measured."""
    from ..planning.signal import check_rule
    from .arguments import check_settings

    check_rule(recipe)
    check_settings({**recipe, **processes[0].settings}, "recipe")
