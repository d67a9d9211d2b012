"""The tables of a report, as Markdown."""

from collections.abc import Iterable, Mapping, Sequence

from .statistics import PAPER_SHARE, Interval, SpeedUp, band
from .summary import OTHER, PHASES, ArmSummary, Summary, best
from .units import TimeUnit, unit_for


_NONE = ""
_EQUAL_STEPS_NOTE = """\
What a step teaches, whatever it costs: where rollouts cost less than here, compared with the update, the comparison by
time moves towards this one. Empty where not all runs of an arm made so many steps."""


def report_text(summary: Summary, plots: Sequence[str] = ()) -> str:
    """
    The report.

    Args:
        summary ([`Summary`]):
            What is reported on.
        plots (`Sequence[str]`, *optional*):
            Names of plot files beside it.

    Returns:
        `str`: Markdown.
    """
    parts = [
        "# Report",
        accuracy_text(summary),
        _definition(summary),
        "## Speed-up at other shares of the baseline's best accuracy",
        _shares_table(summary),
        "## Accuracy after equally many steps",
        _equal_steps_table(summary),
        _EQUAL_STEPS_NOTE,
        "## Seconds of a step",
        _steps_table(summary),
        *map(picture, plots),
        "## Made with",
        _made_with(summary),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def accuracy_text(summary: Summary) -> str:
    """The first table alone, for the terminal, with what is missing from it."""
    parts = [_accuracy_table(summary, unit_for(summary.grid[-1])), _failed_text(summary), _nothing_text(summary)]
    return "\n\n".join(part for part in parts if part)


def speed_up_text(speed_up: SpeedUp, interval: Interval | None) -> str:
    """
    A speed-up with its interval.

    Example:

    ```python
    >>> speed_up_text(SpeedUp(0.99, 0.8, 30.0, 15.0), Interval(1.0, 1.6, 2.667, never=0.0))
    '2.00 (1.00 to 2.67)'
    >>> speed_up_text(SpeedUp(0.99, 0.8, 30.0, None), Interval(None, None, 1.2, never=0.6))
    'never reached (never to 1.20; never in 60 % of the draws)'
    >>> speed_up_text(SpeedUp(0.99, 0.8, 30.0, 15.0), None)
    '2.00 (one run: no interval)'

    ```
    """
    if not speed_up.target:
        return "none: the baseline learned nothing"
    ratio = _ratio(speed_up.ratio, "never reached")
    if interval is None:
        return f"{ratio} (one run: no interval)"
    if interval.never == 1:
        return "never reached, nor in any draw"
    parts = [] if interval.high is None else [f"{_ratio(interval.low)} to {_ratio(interval.high)}"]
    if interval.low is None:
        parts.append(f"never in {int(100 * interval.never)} % of the draws")
    return f"{ratio} ({'; '.join(parts)})"


def _failed_text(summary: Summary) -> str:
    """The arms that are not in the tables."""
    lines = []
    for name, runs in summary.failed.items():
        last_line = (runs[-1].error or "").strip().splitlines()[-1:] or ["no error was noted"]
        lines.append(f"- {name}: 0 of {len(runs)} runs finished ({last_line[0]})")
    return "\n".join(lines)


def _nothing_text(summary: Summary) -> str:
    if any(not speed_up.target for arm in summary.arms for speed_up, _ in arm.speed_ups.values()):
        return f"The baseline, {summary.baseline}, learned nothing: its accuracy is 0 at every time after the start."
    return _NONE


def _accuracy_table(summary: Summary, unit: TimeUnit) -> str:
    target = f"{PAPER_SHARE:g} of the best of {summary.baseline}"
    header = ["arm", "runs", "accuracy at the start", f"at {unit.text(summary.grid[-1])}", "best", f"time to {target}"]
    return table([*header, "speed-up (95 % interval)"], [_accuracy_row(arm, summary, unit) for arm in summary.arms])


def _accuracy_row(arm: ArmSummary, summary: Summary, unit: TimeUnit) -> list[str]:
    mean, half = band(arm.accuracy_RT)
    value, half_of_best, time = best(arm, summary.grid)
    runs = f"{len(arm.runs)}" + (f" (and {arm.num_failed} failed)" if arm.num_failed else "")
    row = [
        arm.name,
        runs,
        f"{100 * mean[0]:.1f} %",
        _percent(mean[-1], half[-1]),
        f"{_percent(value, half_of_best)} at {unit.text(time)}",
    ]
    if arm.name == summary.baseline:
        others = [other for other in summary.arms if other.speed_ups]
        found = others[0].speed_ups[PAPER_SHARE][0] if others else None
        return [*row, unit.text(found.baseline_time) if found and found.target else _NONE, "baseline"]
    speed_up, interval = arm.speed_ups[PAPER_SHARE]
    if not speed_up.target:
        return [*row, _NONE, speed_up_text(speed_up, interval)]
    if speed_up.time is None:
        return [*row, f"never reached ({100 * speed_up.target:.1f} % asked for)", speed_up_text(speed_up, interval)]
    return [*row, unit.text(speed_up.time), speed_up_text(speed_up, interval)]


def _definition(summary: Summary) -> str:
    return (
        f"Accuracy on held-out problems, one sample each: mean over runs, +- 1.96 standard errors (as in the paper; "
        f"of one run there are none). Time is training time, without evaluation, saving and measurements. The "
        f"speed-up is that of the paper: the first time at which the mean curve of {summary.baseline} is at "
        f"{PAPER_SHARE:g} of its best, divided by the first time at which that of the arm is there, on a grid of "
        f"{unit_for(summary.grid[-1]).text(summary.grid[1])}, without interpolation and without the start. Its "
        f"interval is a bootstrap over runs (4,000 draws, 2.5 and 97.5 % quantiles); a draw in which the arm is never "
        f"there counts as slower than any other, one in which the baseline learned nothing as faster (inf). With few "
        f"runs both kinds of intervals are too narrow. One step of the grid can move a speed-up by much."
    )


def _shares_table(summary: Summary) -> str:
    others = [arm for arm in summary.arms if arm.speed_ups]
    if not others:
        return _NONE
    shares = list(others[0].speed_ups)
    return table(
        ["arm", *(f"{share:g}" for share in shares)],
        [[arm.name, *(speed_up_text(*arm.speed_ups[share]) for share in shares)] for arm in others],
    )


def _equal_steps_table(summary: Summary) -> str:
    numbers = summary.numbers_of_steps()
    rows = [[arm.name, *(_after(arm, number) for number in numbers)] for arm in summary.arms]
    return table(["arm", *(f"{number} steps" for number in numbers)], rows)


def _after(arm: ArmSummary, num_steps: int) -> str:
    accuracy_R1 = arm.accuracy_after(num_steps)
    if accuracy_R1 is None:
        return _NONE
    mean, half = band(accuracy_R1)
    return _percent(mean[0], half[0])


def _steps_table(summary: Summary) -> str:
    timed = {arm.name: seconds for arm in summary.arms if (seconds := arm.phase_seconds())}
    phases = [*PHASES, OTHER] if timed else []
    rows = []
    for arm in summary.arms:
        steps, step_seconds = [run.accuracy["step"][-1] for run in arm.runs], arm.step_seconds()
        rows.append(
            [
                arm.name,
                f"{sum(steps) / len(steps):.0f}",
                f"{sum(step_seconds) / len(step_seconds):.3g}",
                f"{min(step_seconds):.3g} to {max(step_seconds):.3g}",
                *(f"{timed[arm.name][phase]:.3f}" if arm.name in timed else _NONE for phase in phases),
            ]
        )
    return table(["arm", "steps", "s a step", "fastest to slowest run", *phases], rows)


def _made_with(summary: Summary) -> str:
    runs = [run for arm in summary.arms for run in arm.runs]
    lines = []
    for title, kinds in (("Hardware", [run.hardware for run in runs]), ("Versions", [run.versions for run in runs])):
        distinct = [kind for i, kind in enumerate(kinds) if kind and kind not in kinds[:i]]
        if len(distinct) > 1:
            lines.append(f"- {title}: the runs differ ({len(distinct)} kinds), and their times do not compare.")
        lines += [f"- {title}: {listing(kind)}" for kind in distinct]
    lines += [f"- {arm.name}: {_settings(arm)}" for arm in summary.arms if arm.runs[0].settings]
    return "\n".join(lines)


def _settings(arm: ArmSummary) -> str:
    names = (
        "num_rollouts",
        "num_generations",
        "selector",
        "advantage_statistics",
        "learning_rate",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "model_name_or_path",
    )
    settings = arm.runs[0].settings
    seeds = ", ".join(str(run.seed) for run in arm.runs)
    return ", ".join([*(f"{name} {settings[name]}" for name in names if name in settings), f"seeds {seeds}"])


def picture(name: str) -> str:
    """A plot file beside the text."""
    return f"![{name.removesuffix('.png').replace('_', ' ')}]({name})"


def listing(values: Mapping[str, object]) -> str:
    """
    Names and values in a line.

    Example:

    ```python
    >>> listing({"threads": 2, "accelerators": []})
    'threads 2, accelerators none'

    ```
    """
    return ", ".join(f"{name} {_plain(value)}" for name, value in values.items())


def _plain(value: object) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _percent(value: float, half: float) -> str:
    return f"{100 * value:.1f} %" + (f" +- {100 * half:.1f}" if half == half else "")  # NaN with one run


def _ratio(value: float | None, never: str = "never") -> str:
    return never if value is None else f"{value:.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """
    A table in Markdown.

    Example:

    ```python
    >>> print(table(["n", "seconds"], [["8", "0.2"]]))
    | n | seconds |
    | --- | --- |
    | 8 | 0.2 |

    ```
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
