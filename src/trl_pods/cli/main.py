import argparse
import signal
import sys

from .. import __version__
from ..scripts.recipe import shipped_recipes


PROG = "trl-pods"


def main(argv: list[str] | None = None) -> int:
    """
    Run `trl-pods`.

    Args:
        argv (`list[str]`, *optional*):
            The command line. Default: that of the process.

    Returns:
        `int`: the exit code: 0, 2 if the command line or the recipe is wrong, 130 if interrupted, otherwise that of
        the command that failed.
    """
    parser = _make_parser()
    namespace, arguments = parser.parse_known_args(argv)
    if namespace.command is None:
        parser.print_help()
        return 0
    try:
        return _COMMANDS[namespace.command](arguments)
    except (ValueError, OSError, ImportError) as error:
        print(f"{PROG}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="PODS for TRL: generate n rollouts per prompt, train GRPO on m of them.",
        epilog=f"Shipped recipes: {', '.join(shipped_recipes()) or 'none'}.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", title="commands")
    commands.add_parser(
        "grpo",
        help=f"train; all settings: {PROG} grpo --help",
        add_help=False,  # the settings are those of the training script, which imports torch
    )
    commands.add_parser("compare", help="run arms of a recipe over seeds for the same training time", add_help=False)
    commands.add_parser(
        "plan", help="find n and m for a recipe on this machine, from a few measured steps", add_help=False
    )
    commands.add_parser("report", help="tables and plots of such a comparison", add_help=False)
    return parser


def _grpo(arguments: list[str]) -> int:
    from ..scripts.grpo import make_parser
    from .arguments import separate
    from .launcher import launch

    parser = make_parser(prog=f"{PROG} grpo")
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        return 0
    plan = separate(arguments, parser)
    return launch("trl_pods.scripts.grpo", plan)


def _compare(arguments: list[str]) -> int:
    from .compare import compare

    return compare(arguments, prog=f"{PROG} compare")


def _plan(arguments: list[str]) -> int:
    from .plan import plan

    return plan(arguments, prog=f"{PROG} plan")


def _report(arguments: list[str]) -> int:
    from .report import report

    return report(arguments, prog=f"{PROG} report")


_COMMANDS = {"grpo": _grpo, "compare": _compare, "plan": _plan, "report": _report}
