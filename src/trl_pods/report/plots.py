"""The plots of a report, each as PNG and SVG. Needs matplotlib."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .figures import BASELINE_COLOR, COLORS, drawing, figure_with_axes, save, title
from .statistics import PAPER_SHARE, band
from .summary import OTHER, PHASES, ArmSummary, Summary
from .units import unit_for


if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LINE_STYLES = ("-", "--", ":", "-.")  # the next one where all colours have been used
_PHASE_COLORS = {
    "generation": "#56B4E9",
    "reward, selection": "#009E73",
    "scoring": "#E69F00",
    "update": "#D55E00",
    OTHER: "#BBBBBB",
}
_LEGEND_CHARACTERS = 90  # of the labels beside each other
_FEW_POINTS = 15  # fewer are marked, so that a point alone is seen


def draw_plots(summary: Summary, folder: Path) -> list[str]:
    """
    Draw all plots for which there is data.

    Args:
        summary ([`Summary`]):
            What is reported on.
        folder (`Path`):
            Where the files go.

    Returns:
        `list[str]`: names of the PNG files; each has an SVG file beside it.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    with drawing():
        return [name for draw in (_accuracy, _speed_up, _steps, _lengths, _rewards) if (name := draw(summary, folder))]


def _accuracy(summary: Summary, folder: Path) -> str:
    figure, axes = figure_with_axes(height=4.2)
    times = _times(summary)
    for (arm, color), style in zip(_colored(summary), _line_styles(summary), strict=True):
        mean, half = (100 * curve for curve in band(arm.accuracy_RT))
        low, high = np.clip((mean - half, mean + half), 0, 100)
        axes.fill_between(times, low, high, color=color, alpha=0.15, linewidth=0)
        label = arm.name + (" (one run: no band)" if len(arm.runs) == 1 else "")
        axes.plot(times, mean, color=color, linestyle=style, label=label, zorder=3)
    reached = [arm.speed_ups[PAPER_SHARE][0] for arm in summary.arms if arm.speed_ups]
    reached = [found for found in reached if found.target]
    subtitle = "mean over runs with 95 % bands"
    if reached:
        target = 100 * reached[0].target
        axes.axhline(target, color=BASELINE_COLOR, linewidth=0.9, linestyle=(0, (4, 3)))
        _mark_times(axes, summary, target)
        subtitle += f"; dashed: {PAPER_SHARE:g} of the best of {summary.baseline}, {target:.1f} %; points: first there"
    axes.set_ylabel("accuracy on held-out problems, %")
    title(axes, f"Accuracy, {_num_runs(summary)}", subtitle)
    _time_axis(axes, summary)
    _legend(axes)
    return save(figure, folder, "accuracy")


def _mark_times(axes: "Axes", summary: Summary, target: float) -> None:
    """A point where the mean curve of an arm reaches the accuracy that is asked for."""
    unit = unit_for(summary.grid[-1])
    for arm, color in _colored(summary):
        mean = 100 * band(arm.accuracy_RT)[0]
        there = np.flatnonzero(mean[1:] >= target)
        if len(there):
            at = there[0] + 1
            axes.plot(
                summary.grid[at] / unit.seconds,
                mean[at],
                "o",
                color=color,
                markeredgecolor="white",
                markersize=7,
                zorder=4,
                clip_on=False,
            )


def _speed_up(summary: Summary, folder: Path) -> str | None:
    others = [(arm, color) for arm, color in _colored(summary) if arm.speed_ups]
    found_of_all = [found for arm, _ in others for found in arm.speed_ups.values()]
    if not any(speed_up.target for speed_up, _ in found_of_all):
        return None
    ratios = [found.ratio or 0 for found, _ in found_of_all]
    highs = [interval.high or 0 for _, interval in found_of_all if interval is not None]
    top = 1.1 * max(end for end in [1.0, *ratios, *highs] if end < np.inf)  # an interval may have no end
    figure, axes = figure_with_axes(height=3.6)
    shares = list(others[0][0].speed_ups)
    places = np.arange(len(shares))
    axes.axhline(1, color=BASELINE_COLOR, linewidth=1)
    at = shares.index(PAPER_SHARE)
    axes.axvspan(at - 0.5, at + 0.5, color="#F4F1E4", zorder=0)
    axes.set_xlim(-0.5, len(shares) - 0.5)
    shift = 0.7 / len(others)
    for number, (arm, color) in enumerate(others):
        where = places + (number - (len(others) - 1) / 2) * shift
        is_sure = all(interval is not None for _, interval in arm.speed_ups.values())
        label = arm.name + ("" if is_sure else " (one run: no interval)")
        axes.plot([], [], "o", color=color, markersize=7, label=label)
        for x, (found, interval) in zip(where, arm.speed_ups.values(), strict=True):
            if interval is not None and interval.high is not None:
                ends = np.clip((interval.low or 0, interval.high), 0, top)
                axes.plot([x, x], ends, color=color, linewidth=2, alpha=0.45)
            marker = "x" if found.ratio is None else "o"
            axes.plot(x, found.ratio or 0, marker, color=color, markersize=7, clip_on=False)
    axes.set_xticks(places, [f"{share:g}" for share in shares])
    axes.set_ylim(bottom=0)
    axes.grid(axis="x", visible=False)
    axes.set(
        xlabel=f"share of the best of {summary.baseline} that is asked for",
        ylabel=f"speed-up over {summary.baseline}",
    )
    subtitle = f"with 95 % bootstrap intervals over runs; shaded: the paper's {PAPER_SHARE:g}"
    if any(found.ratio is None for found, _ in found_of_all):
        subtitle += "; x: never reached"
    title(axes, f"Speed-up, {_num_runs(summary)}", subtitle)
    _legend(axes)
    return save(figure, folder, "speed_up")


def _steps(summary: Summary, folder: Path) -> str | None:
    timed = [(arm, arm.phase_seconds()) for arm in summary.arms]
    if not all(phases for _, phases in timed):
        return None
    figure, axes = figure_with_axes(height=1.3 + 0.42 * len(timed))
    names = [arm.name for arm, _ in timed]
    left = np.zeros(len(timed))
    for phase in (*PHASES, OTHER):
        widths = np.array([phases[phase] for _, phases in timed])
        axes.barh(names, widths, left=left, color=_PHASE_COLORS[phase], label=phase, height=0.62)
        left += widths
    for (arm, _), total in zip(timed, left, strict=True):
        axes.annotate(f"{total:.3g} s", (total, arm.name), xytext=(4, 0), textcoords="offset points", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="seconds, mean over runs", title="Where the time of a step goes")
    _legend(axes)
    return save(figure, folder, "step_seconds")


def _lengths(summary: Summary, folder: Path) -> str | None:
    return _over_time(
        summary,
        folder,
        "completion_length",
        [("completions/mean_length", "-"), ("pods/kept_length", ":")],
        "tokens of a completion",
        "Completion length",
    )


def _rewards(summary: Summary, folder: Path) -> str | None:
    return _over_time(
        summary,
        folder,
        "reward",
        [("reward", "-"), ("pods/kept_reward", ":")],
        "mean reward",
        "Reward",
    )


def _over_time(
    summary: Summary, folder: Path, name: str, columns: list[tuple[str, Any]], ylabel: str, heading: str
) -> str | None:
    drawn = set()
    figure, axes = figure_with_axes(height=3.6)
    times = _times(summary)
    for arm, color in _colored(summary):
        for column, style in columns:
            series = arm.series(column, summary.grid)
            there = ~np.isnan(series)
            if not there.any():
                continue
            label = arm.name if style == "-" else None
            marker = "." if there.sum() <= _FEW_POINTS else ""
            axes.plot(times[there], series[there], color=color, linestyle=style, marker=marker, label=label)
            drawn.add(style)
    if not drawn:
        return None
    axes.set_ylabel(ylabel)
    of_kept = "; dotted: of the kept ones alone" if ":" in drawn else ""
    title(axes, f"{heading}, {_num_runs(summary)}", f"mean over all rollouts of all runs{of_kept}")
    _time_axis(axes, summary)
    _legend(axes)
    return save(figure, folder, name)


def _colored(summary: Summary) -> list[tuple[ArmSummary, str]]:
    colors = iter(COLORS * (1 + len(summary.arms) // len(COLORS)))
    return [(arm, BASELINE_COLOR if arm.name == summary.baseline else next(colors)) for arm in summary.arms]


def _line_styles(summary: Summary) -> list[str]:
    colors = [color for _, color in _colored(summary)]
    return [_LINE_STYLES[colors[:number].count(color) % len(_LINE_STYLES)] for number, color in enumerate(colors)]


def _times(summary: Summary) -> np.ndarray:
    return summary.grid / unit_for(summary.grid[-1]).seconds


def _time_axis(axes: "Axes", summary: Summary) -> None:
    axes.set_xlabel(f"training time, {unit_for(summary.grid[-1]).name}")
    axes.set_xlim(0, _times(summary)[-1])


def _num_runs(summary: Summary) -> str:
    numbers = sorted({len(arm.runs) for arm in summary.arms})
    if numbers == [1]:
        return "1 run"
    return f"{numbers[0]} runs" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} runs"


def _legend(axes: "Axes") -> None:
    _, labels = axes.get_legend_handles_labels()
    columns = min(len(labels), 5, max(1, _LEGEND_CHARACTERS // max(map(len, labels))))
    axes.figure.legend(loc="outside lower center", ncols=columns, handlelength=1.6)
