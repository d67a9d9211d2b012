"""A plan in words and tables, as Markdown."""

from collections.abc import Sequence

import numpy as np

from ..report.tables import listing, picture, table
from .costs import OF_ROLLOUTS, Line
from .measurement import PHASES
from .recommendation import reason
from .summary import Plan


_GRID_NOTE = """\
Seconds are those of a step in generation, rewards, selection, scoring and update; loading of data, logging, evaluation
and saving are not in them. The variance is the expected one of the kept rewards of a prompt: rewards are drawn from
those that were measured of it, and the recipe's own rule selects; a reward that was never seen is never drawn, so that
a larger n may find more than this says. `signal a second` is the root of m x variance, by the seconds, relative to the
best pair."""


def plan_text(plan: Plan, plots: Sequence[str] = ()) -> str:
    """
    The whole plan.

    Args:
        plan ([`Plan`]):
            The plan.
        plots (`Sequence[str]`, *optional*):
            Names of plot files beside it.

    Returns:
        `str`: Markdown.
    """
    parts = [
        "# Plan",
        reason(plan.chosen, plan.twice, plan.options),
        *map(picture, plots),
        "## Pairs",
        grid_table(plan),
        _GRID_NOTE,
        "## Check of the prediction",
        check_text(plan),
        "## Seconds of a step, measured and fitted",
        _measured_table(plan),
        _fit_text(plan),
        "## Rewards",
        _rewards_table(plan),
        _memory_text(plan),
        "## Made with",
        _made_with(plan),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def grid_table(plan: Plan) -> str:
    """Seconds, variance and their quotient of all pairs, the recommended one in bold."""
    best = max(option.signal_per_second for option in plan.options)
    rows = []
    for option in plan.options:
        of_m = option.seconds["score"] + option.seconds["update"]
        cells = [
            f"{option.n}",
            f"{option.m}",
            f"{option.n / option.m:g}",
            _short(option.step_seconds),
            _short(option.step_seconds - of_m),
            _short(of_m),
            f"{option.variance:.4f}",
            f"{option.plain_variance:.4f}",
            f"{option.signal_per_second / best:.2f}" if best else "",
        ]
        rows.append([f"**{cell}**" if option is plan.chosen else cell for cell in cells])
    header = ["n", "m", "n / m", "s a step", "of these by n", "by m", "kept variance", "without selection"]
    return table([*header, "signal a second"], rows)


def check_text(plan: Plan) -> str:
    """What was predicted of pairs that were not fitted, and what was measured."""
    rows = [
        [
            f"{check.measured.n}",
            f"{check.measured.m}",
            _short(check.predicted),
            _short(check.measured.step_seconds()),
            " to ".join(map(_short, check.measured.step_range())),
            f"{100 * check.error:+.1f} %",
        ]
        for check in plan.checks
    ]
    return table(["n", "m", "predicted s a step", "measured", "fastest to slowest round", "error"], rows)


def _measured_table(plan: Plan) -> str:
    rows = []
    for found in plan.timed:
        is_check = any(found is check.measured for check in plan.checks)
        seconds = [_short(found.seconds(phase)) for phase in PHASES]
        length = np.median(found.rounds["length"]) if "length" in found.rounds else float("nan")
        rows.append([f"{found.n}", f"{found.m}", *seconds, f"{length:.1f}", "check" if is_check else "fit"])
    return table(["n", "m", *PHASES, "tokens of a completion", "used for"], rows)


def _fit_text(plan: Plan) -> str:
    lines = ["- generate: interpolated between the fitted n, continued beyond them"]
    for phase, curve in plan.costs.curves.items():
        if isinstance(curve, Line):
            lines.append(f"- {phase}: {curve.start:.3g} + {curve.per_row:.3g} {'n' if phase in OF_ROLLOUTS else 'm'}")
    return "\n".join(lines)


def _rewards_table(plan: Plan) -> str:
    rates = plan.pools.pass_rates().numpy()
    totals = np.array([float(total.nanmean()) for total in plan.pools.totals()])
    name = plan.pools.rule.functions[0]
    rows = [
        [kind, *(f"{value:.3f}" for value in (values.mean(), *np.quantile(values, (0, 0.25, 0.5, 0.75, 1))))]
        for kind, values in (
            (f"pass rate ({name} of 1 or more)", rates),
            ("weighted reward", totals[totals == totals]),
        )
        if len(values)
    ]
    header = ["of a prompt", "mean", "least", "1st quartile", "median", "3rd quartile", "most"]
    never, always = 100 * np.mean(rates == 0), 100 * np.mean(rates == 1)
    return f"{table(header, rows)}\n\n{len(rates)} prompts, {never:.0f} % never right, {always:.0f} % always."


def _memory_text(plan: Plan) -> str:
    if not plan.memory:
        return ""
    rows = []
    for found in plan.memory:
        size = str(found.settings["per_device_train_batch_size"])
        peak = found.rounds.get("memory")
        last_line = (found.error or "").splitlines()[-1:]
        rows.append([size, f"{max(peak):.3g}" if peak else f"failed: {''.join(last_line)}".replace("|", "/")])
    return "## Memory of the update\n\n" + table(["rows of a micro-batch", f"peak, GiB ({memory_kind(plan)})"], rows)


def memory_kind(plan: Plan) -> str:
    """What the peak of memory is of."""
    on_gpu = any(found.hardware.get("accelerators") and not found.settings.get("use_cpu") for found in plan.memory)
    return "allocated on the GPU" if on_gpu else "tensors of the update"


def _made_with(plan: Plan) -> str:
    first = plan.fitted[0]
    names = ("model_name_or_path", "selector", "max_completion_length", "use_vllm", "vllm_mode", "num_processes")
    shown = [f"{name} {first.settings[name]}" for name in names if name in first.settings]
    num_rounds = len(first.rounds["generate"])
    lines = [
        f"- {plan.num_prompts} prompts a round, medians over {num_rounds} rounds of each pair; learning rate 0, so "
        "that all have the same policy and prompts",
        f"- Settings: {', '.join(shown)}",
        *([] if plan.same_hardware else ["- They were measured on different hardware: their times do not compare."]),
        f"- Hardware: {listing(first.hardware)}",
        f"- Versions: {listing(first.versions)}",
    ]
    return "\n".join(lines)


def _short(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"
