"""The plots of a plan, each as PNG and SVG. Needs matplotlib."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report.figures import BASELINE_COLOR, COLORS, drawing, figure_with_axes, save, title
from .costs import OF_ROLLOUTS
from .recommendation import Option
from .summary import Plan
from .tables import memory_kind


if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PHASE_COLORS = {
    "generate": "#56B4E9",
    "reward": "#009E73",
    "select": "#CC79A7",
    "score": "#E69F00",
    "update": "#D55E00",
}
_CHECK: dict[str, Any] = {"markerfacecolor": "white", "markersize": 6.5, "markeredgewidth": 1.6}


def draw_plots(plan: Plan, folder: Path) -> list[str]:
    """
    Draw all plots for which there is data.

    Args:
        plan ([`Plan`]):
            The plan.
        folder (`Path`):
            Where the files go.

    Returns:
        `list[str]`: names of the PNG files; each has an SVG file beside it.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    with drawing():
        return [draw(plan, folder) for draw in (_pairs, _seconds, _pass_rates, _motivation)]


def _pairs(plan: Plan, folder: Path) -> str:
    figure, (left, middle, right) = figure_with_axes(height=3.9, ncols=3)
    best = max(option.signal_per_second for option in plan.options) or 1.0
    panels: list[tuple[Any, str, Callable[[Option], float]]] = [
        (left, "seconds of a step", lambda option: option.step_seconds),
        (middle, "variance of kept rewards", lambda option: option.variance),
        (right, "signal a second (best: 1)", lambda option: option.signal_per_second / best),
    ]
    for m, color in _colored(sorted({option.m for option in plan.options})):
        of_m = [option for option in plan.options if option.m == m]
        for axes, _, value in panels:
            axes.plot([o.n for o in of_m], [value(o) for o in of_m], color=color, marker=".", label=f"m = {m}")
        middle.axhline(of_m[0].plain_variance, color=color, linewidth=0.9, linestyle=":")
    for check in plan.checks:
        left.plot(
            check.measured.n, check.measured.step_seconds(), "D", color=BASELINE_COLOR, label="measured", **_CHECK
        )
    for axes, heading, value in panels:
        axes.set_title(heading, fontsize=10)
        axes.set_ylim(bottom=0)
        _size_axis(axes, "n", [option.n for option in plan.options])
        if plan.chosen is not None:
            at = (plan.chosen.n, value(plan.chosen))
            axes.plot(*at, "o", markersize=12, markerfacecolor="none", markeredgecolor="black", markeredgewidth=1.2)
    _legend(figure, left)
    figure.suptitle(_pairs_title(plan), fontsize=9, color="#555555", x=0.01, ha="left")
    return save(figure, folder, "pairs")


def _pairs_title(plan: Plan) -> str:
    chosen = "" if plan.chosen is None else f"circle: recommended, n = {plan.chosen.n}, m = {plan.chosen.m}; "
    return f"{chosen}dotted: variance without selection; diamond: measured, not fitted"


def _seconds(plan: Plan, folder: Path) -> str:
    figure, (left, right) = figure_with_axes(height=3.6, ncols=2, sharey=True)
    for axes, letter in ((left, "n"), (right, "m")):
        sizes = sorted({getattr(option, letter) for option in plan.options})
        line = np.linspace(sizes[0], sizes[-1], 200)
        for phase, curve in plan.costs.curves.items():
            if (phase in OF_ROLLOUTS) != (letter == "n") or not any(found.seconds(phase) for found in plan.timed):
                continue
            color = _PHASE_COLORS[phase]
            axes.plot(line, [curve(size) for size in line], color=color, label=phase)
            for found in plan.fitted:
                axes.plot(getattr(found, letter), found.seconds(phase), "o", color=color, markersize=5)
            for check in plan.checks:
                axes.plot(getattr(check.measured, letter), check.measured.seconds(phase), "D", color=color, **_CHECK)
        axes.set_xlabel(f"{letter}, rollouts of a prompt that are {'generated' if letter == 'n' else 'kept'}")
        axes.set_ylim(bottom=0)
    left.set_ylabel("seconds of a step")
    title(left, "Seconds by n and by m", "points: fitted; diamonds: measured, not fitted")
    _legend(figure, left, right)
    return save(figure, folder, "seconds")


def _pass_rates(plan: Plan, folder: Path) -> str:
    figure, axes = figure_with_axes(height=3.0)
    rates = plan.pools.pass_rates().numpy()
    axes.hist(rates, bins=np.linspace(0, 1, 21), color=_PHASE_COLORS["generate"], edgecolor="white")
    axes.axvline(rates.mean(), color=BASELINE_COLOR, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set(xlabel=f"share of rollouts with {plan.pools.rule.functions[0]} of 1 or more", ylabel="prompts")
    axes.set_xlim(0, 1)
    never, always = 100 * np.mean(rates == 0), 100 * np.mean(rates == 1)
    subtitle = f"dashed: the mean, {rates.mean():.2f}; {never:.0f} % are never solved, {always:.0f} % always"
    title(axes, f"Pass rate of {len(rates)} prompts", subtitle)
    return save(figure, folder, "pass_rates")


def _motivation(plan: Plan, folder: Path) -> str:
    sized = [found for found in plan.memory if found.rounds.get("memory")]
    figure, panels = figure_with_axes(height=3.6, ncols=2 if sized else 1)
    left, right = panels if sized else (panels, None)
    batches = sorted(
        {f.rollouts: f.seconds_per_token() for f in [*plan.memory, *plan.timed] if f.error is None}.items()
    )
    sizes, seconds = zip(*batches, strict=True)
    unit, factor = ("milliseconds", 1e3) if seconds[0] > 1e-3 else ("microseconds", 1e6)
    left.plot(sizes, [factor * value for value in seconds], marker="o", color=_PHASE_COLORS["generate"], markersize=5)
    left.set_ylim(bottom=0)
    left.set_ylabel(f"{unit} a token")
    _size_axis(left, "rollouts generated at once", sizes)
    title(left, "Generation", f"up to {seconds[0] / min(seconds):.3g} times cheaper than in the smallest batch")
    if right is not None:
        _memory(right, plan, sized)
    return save(figure, folder, "motivation")


def _memory(axes: "Axes", plan: Plan, sized: list[Any]) -> None:
    rows = [found.settings["per_device_train_batch_size"] for found in sized]
    axes.plot(rows, [max(f.rounds["memory"]) for f in sized], marker="o", color=_PHASE_COLORS["update"], markersize=5)
    failed = [found.settings["per_device_train_batch_size"] for found in plan.memory if found.error is not None]
    for size in failed:
        axes.plot(size, axes.get_ylim()[1], "x", color="black", markersize=9, clip_on=False)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"GiB, {memory_kind(plan)}")
    axes.set_xticks([found.settings["per_device_train_batch_size"] for found in plan.memory])
    axes.set_xlabel("rollouts trained on at once, on a device")
    title(axes, "Update", "peak of memory" + ("; x: failed" if failed else ""))


def _colored(values: list[int]) -> list[tuple[int, str]]:
    return [(value, COLORS[i % len(COLORS)]) for i, value in enumerate(values)]


def _size_axis(axes: "Axes", label: str, sizes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(sizes)), [str(size) for size in sorted(set(sizes))])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _legend(figure: Any, *panels: Any) -> None:
    entries: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=min(len(entries), 6), handlelength=1.6
    )
