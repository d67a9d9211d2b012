"""The arguments of `trl-pods compare`. Imports no torch."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..comparison.arms import BUILT_IN_ARMS
from ..comparison.plan import Comparison, read_comparison, read_value
from ..scripts.recipe import find_comparison, shipped_comparisons


_DESCRIPTION = f"""\
Run arms of one recipe over seeds, each for the same training time from the same start, in turn on this machine.

Built-in arms:
  grpo      m rollouts a prompt, all trained on
  grpo-all  n rollouts a prompt, all trained on by gradient accumulation, the same number of prompts a step
  pods      the recipe: n rollouts, m trained on

A comparison is a YAML file (--config: its path, or the name of a shipped one), flags, or both; flags win:

  recipe: quickstart          # the recipe all arms start from, with num_rollouts (n) above num_generations (m)
  minutes: 1.5                # training time of a run, without evaluation, saving and measurements
  accuracy_minutes: 0.1       # between two points of a curve
  num_accuracy_problems: 988  # of the test split, for a point
  seeds: [1, 2, 3]
  baseline: grpo
  settings:                   # for all arms: any setting of `trl-pods grpo`
    logging_steps: 20
  arms:                       # default: the three built-in ones
    grpo: {{learning_rate: 3.0e-4}}
    pods:
    random: {{like: pods, selector: random}}

Seeds are the outer loop, and each starts with another arm, so that a slow phase of the machine meets all arms. Every
run is a process of its own. It leaves one JSON file in OUTPUT_DIR/runs (its fields: the head of
trl_pods/comparison/run_file.py); a run that has finished is not run again, one that failed or was interrupted is. The
learning rate is constant unless the comparison sets lr_scheduler_type, and nothing is saved or evaluated by TRL unless
it sets save_strategy or eval_strategy; what the recipe says of that, of the hub and of resuming is left out.

Shipped comparisons: {", ".join(shipped_comparisons()) or "none"}."""


def compare(args: list[str], prog: str) -> int:
    """
    Run `trl-pods compare`.

    Args:
        args (`list[str]`):
            The command line behind the command.
        prog (`str`):
            Name of the program in `--help`.

    Returns:
        `int`: the exit code: 0, 1 if runs failed, 130 if interrupted.

    Raises:
        FileNotFoundError: If there is no such comparison or recipe.
        ValueError: If a setting is wrong.
    """
    options = _parse(args, prog)
    comparison = read_comparison(find_comparison(options.config) if options.config else None, _flags(options))
    runs = comparison.runs()
    if options.dry_run:
        print("\n".join(run.name for run in runs))
        return 0
    _check_settings(comparison)
    from ..comparison.running import run_comparison

    try:
        done = run_comparison(comparison, options.output_dir, options.keep_models, options.run_timeout_minutes)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    failed = [f"{run.arm} seed {run.seed}" for run in done if run.error is not None]
    if failed:
        print(f"{prog}: {len(failed)} of {len(done)} runs failed: {', '.join(failed)}.", file=sys.stderr)
    print(f"Runs: {options.output_dir / 'runs'}\nReport: trl-pods report {options.output_dir}")
    return 1 if failed else 0


def _parse(args: list[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", help="the comparison: a file, or the name of a shipped one")
    parser.add_argument("--output_dir", type=Path, help="folder of the comparison; its runs are gone on with")
    parser.add_argument("--recipe", help="path or name of the recipe")
    parser.add_argument("--minutes", type=float, help="training time of a run")
    parser.add_argument("--accuracy_minutes", type=float, help="training time between two points of a curve")
    parser.add_argument("--num_accuracy_problems", type=int, help="held-out problems for a point")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--arms", nargs="+", help=f"arms to run: of the file, or {', '.join(BUILT_IN_ARMS)}")
    parser.add_argument(
        "--arm",
        nargs="+",
        action="append",
        default=[],
        metavar="NAME [SETTING=VALUE]",
        help="another arm, for instance: --arm random selector=random; `like=grpo` makes it a kind of that arm",
    )
    parser.add_argument("--baseline", help="arm that the others are measured against (default: grpo)")
    parser.add_argument("--run_timeout_minutes", type=float, help="end a run after so many minutes on the wall clock")
    parser.add_argument("--keep_models", action="store_true", help="keep what finished runs wrote, in OUTPUT_DIR/work")
    parser.add_argument("--dry_run", action="store_true", help="show the runs in their order and do nothing")
    try:
        options = parser.parse_args(args)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if options.output_dir is None and not options.dry_run:
        raise ValueError("--output_dir is missing. Name the folder of the comparison, for instance runs/comparison.")
    return options


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    names = ("recipe", "minutes", "accuracy_minutes", "num_accuracy_problems", "seeds", "arms", "baseline")
    flags = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    more = {name: dict(read_value(text) for text in overrides) for name, *overrides in options.arm}
    if more and options.arms:
        flags["arms"] = [*options.arms, *(name for name in more if name not in options.arms)]
    return flags | {"more_arms": more}


def _check_settings(comparison: Comparison) -> None:
    """Refuse what is wrong in the settings of an arm before the first run."""
    from .arguments import check_settings

    first_of_each_arm = {run.arm: run for run in reversed(comparison.runs())}
    for run in first_of_each_arm.values():
        check_settings(run.settings, f"arm {run.arm}")
