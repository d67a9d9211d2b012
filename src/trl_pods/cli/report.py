"""The arguments of `trl-pods report`. Imports no torch."""

import argparse
from pathlib import Path


_DESCRIPTION = """\
From the runs of `trl-pods compare`: a table (report.md) and plots (PNG and SVG) of accuracy against training time, the
speed-up over the baseline, seconds of a step, completion length and reward."""


def report(args: list[str], prog: str) -> int:
    """
    Run `trl-pods report`.

    Args:
        args (`list[str]`):
            The command line behind the command.
        prog (`str`):
            Name of the program in `--help`.

    Returns:
        `int`: the exit code, 0.

    Raises:
        ImportError: If plots are asked for and matplotlib is not installed.
        ValueError: If a setting is wrong, or the runs do not compare.
    """
    options = _parse(args, prog)
    from ..report.figures import check_matplotlib
    from ..report.plots import draw_plots
    from ..report.summary import SHARES, read_summary
    from ..report.tables import accuracy_text, report_text
    from ..whole_files import write_text

    if not options.no_plots:
        check_matplotlib()
    if not options.folder.is_dir():
        raise ValueError(f"There is no folder {options.folder}. Name the output_dir of `trl-pods compare`.")
    summary = read_summary(options.folder, options.baseline, options.shares or SHARES)
    folder = options.output_dir or options.folder / "report"
    plots = [] if options.no_plots else draw_plots(summary, folder)
    write_text(report_text(summary, plots), folder / "report.md")
    print(accuracy_text(summary))
    print(f"\nReport: {folder / 'report.md'}")
    return 0


def _parse(args: list[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help="output_dir of `trl-pods compare`, or a folder with files of runs"
    )
    parser.add_argument("--output_dir", type=Path, help="where the report goes (default: FOLDER/report)")
    parser.add_argument(
        "--baseline", help="arm that the others are measured against (default: that of the comparison)"
    )
    parser.add_argument(
        "--shares", type=_share, nargs="+", help="shares of the baseline's best accuracy (0.99 is always among them)"
    )
    parser.add_argument("--no_plots", action="store_true", help="write the table alone, without matplotlib")
    try:
        options = parser.parse_args(args)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if options.folder is None:
        raise ValueError("The folder is missing. Name the output_dir of `trl-pods compare`.")
    return options


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share. Use numbers above 0 and up to 1, for instance 0.95")
    return value
