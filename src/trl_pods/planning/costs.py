"""
Seconds of a step as a function of n and m, from what was measured at a few of them.

Reward, selection, scoring and update work through their rows in equal portions, so that a line `a + b x` fits them,
with neither a start nor a cost of a row below 0. Generation does not: as long as a batch is small, more rows are
almost free, and when the device is full they come in waves. So between two measured n its seconds are interpolated,
and beyond the last they go on as between the last two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .measurement import PHASES, Measurement


# The phases whose seconds depend on n; those of the others depend on m.
OF_ROLLOUTS = ("generate", "reward", "select")


@dataclass(frozen=True)
class Line:
    """Seconds `start + per_row * rows`."""

    start: float
    per_row: float

    def __call__(self, rows: float) -> float:
        return self.start + self.per_row * rows


@dataclass(frozen=True)
class Polyline:
    """Seconds at measured numbers of rows, straight lines between them."""

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: float) -> float:
        last = len(self.rows) - 1
        if last == 0:
            return self.seconds[0]
        right = min(max(int(np.searchsorted(self.rows, rows)), 1), last)
        x, y = self.rows[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return max(0.0, y[0] + (rows - x[0]) * (y[1] - y[0]) / (x[1] - x[0]))


def fit_line(rows: Sequence[float], seconds: Sequence[float]) -> Line:
    """
    The line with the least squares of relative errors, without negative coefficients.

    Args:
        rows (`Sequence[float]`):
            Numbers of rows.
        seconds (`Sequence[float]`):
            Seconds measured at each.

    Returns:
        [`Line`]

    Example:

    ```python
    >>> fit_line([8, 16, 32], [0.5, 0.9, 1.7])
    Line(start=0.1, per_row=0.05)
    >>> fit_line([8, 16], [0.2, 0.6])  # through 0, where it would start at -0.2
    Line(start=0.0, per_row=0.0288462)

    ```
    """
    x, y = np.asarray(rows, dtype=float), np.asarray(seconds, dtype=float)
    if not y.any():
        return Line(0.0, 0.0)
    weights = 1 / np.maximum(y, 1e-3 * y.max())
    starts, slopes = weights, weights * x  # columns of the design
    if len(set(rows)) == 1:
        return Line(_rounded(float(y.mean())), 0.0)
    start, per_row = np.linalg.lstsq(np.stack([starts, slopes], axis=1), weights * y, rcond=None)[0]
    if start < 0:
        start, per_row = 0.0, slopes @ (weights * y) / (slopes @ slopes)
    elif per_row < 0:
        start, per_row = starts @ (weights * y) / (starts @ starts), 0.0
    return Line(_rounded(start), _rounded(per_row))


@dataclass(frozen=True)
class Costs:
    """
    Seconds of a step by phase.

    Args:
        curves (`Mapping[str, Line | Polyline]`):
            For each phase, over n or m.
    """

    curves: Mapping[str, Line | Polyline]

    def seconds(self, phase: str, n: int, m: int) -> float:
        """Seconds of a step in a phase."""
        return self.curves[phase](n if phase in OF_ROLLOUTS else m)

    def step_seconds(self, n: int, m: int) -> float:
        """Seconds of a step in all phases."""
        return sum(self.seconds(phase, n, m) for phase in PHASES)


def fit_costs(measurements: Sequence[Measurement]) -> Costs:
    """
    The costs that fit what was measured.

    Args:
        measurements (`Sequence[Measurement]`):
            Those to fit.
    """
    curves: dict[str, Line | Polyline] = {}
    for phase in PHASES:
        by_size: dict[int, list[float]] = {}
        for found in measurements:
            by_size.setdefault(found.n if phase in OF_ROLLOUTS else found.m, []).append(found.seconds(phase))
        sizes = sorted(by_size)
        seconds = [float(np.mean(by_size[size])) for size in sizes]
        curves[phase] = Polyline(tuple(sizes), tuple(seconds)) if phase == "generate" else fit_line(sizes, seconds)
    return Costs(curves)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
