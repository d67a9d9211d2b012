"""
The statistics of a comparison: curves on a common grid, their bands, and the speed-up by the paper's rule.

Arrays in, numbers out; knows no files and no plots. Names carry shapes: `R` runs of an arm, `T` times of the grid, of
which the first is 0, `D` draws of the bootstrap.

The rule is the one by which the authors of PODS (arXiv 2504.13818) compare arms, as their plotting scripts have it
(github.com/YixuanEvenXu/pods, commit 187f43b):

1. Take the mean curve of each arm over its runs. Leave t = 0 out.
2. The accuracy asked for is 0.99 times the maximum of the baseline's mean curve.
3. The time of an arm is the first time of the grid at which its mean is at least that; nothing is interpolated.
4. The speed-up is the baseline's time divided by the arm's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


PAPER_SHARE = 0.99  # of the baseline's best accuracy
_QUANTILES = (0.025, 0.5, 0.975)
_STANDARD_ERRORS = 1.96  # on either side, for 95 % of a normal distribution


@dataclass(frozen=True)
class SpeedUp:
    """
    How much sooner an arm is at a share of the baseline's best accuracy.

    Args:
        share (`float`):
            The share.
        target (`float`):
            The accuracy asked for. At 0 the baseline learned nothing, and there is no speed-up.
        baseline_time (`float`):
            When the baseline is there.
        time (`float`, *optional*):
            When the arm is there; `None` if never.
    """

    share: float
    target: float
    baseline_time: float
    time: float | None

    @property
    def ratio(self) -> float | None:
        """The speed-up; `None` if the arm is never there, or the baseline learned nothing."""
        return None if self.time is None or not self.target else self.baseline_time / self.time


@dataclass(frozen=True)
class Interval:
    """
    95 % bootstrap interval of a speed-up. An end is infinite where it is a draw in which the baseline learned nothing.

    Args:
        low (`float`, *optional*):
            2.5 % quantile; `None` if that is a draw in which the arm is never there.
        median (`float`, *optional*):
            50 % quantile, likewise.
        high (`float`, *optional*):
            97.5 % quantile, likewise.
        never (`float`):
            Share of the draws in which the arm is never there.
    """

    low: float | None
    median: float | None
    high: float | None
    never: float


def make_grid(duration: float, interval: float) -> np.ndarray:
    """
    Times from 0 to the end of the runs.

    Args:
        duration (`float`):
            Training time of a run.
        interval (`float`):
            Training time between two measurements.

    Returns:
        `np.ndarray`: (T,)

    Example:

    ```python
    >>> make_grid(60, 25).tolist()
    [0.0, 25.0, 50.0]

    ```
    """
    return np.arange(int(duration / interval + 1e-6) + 1) * float(interval)


def at_grid(times: Sequence[float], values: Sequence[float], grid: np.ndarray) -> np.ndarray:
    """
    For each time of a grid the measurement nearest to it, the earlier of two that are equally near.

    A measurement is made after the first step past its time; so it may stand for a time a little before it.

    Args:
        times (`Sequence[float]`):
            When a run was measured, ascending.
        values (`Sequence[float]`):
            What was measured.
        grid (`np.ndarray`):
            (T,)

    Returns:
        `np.ndarray`: (T,)

    Example:

    ```python
    >>> at_grid([0.0, 11.0, 25.0], [0.1, 0.5, 0.6], np.array([0.0, 10.0, 18.0, 20.0])).tolist()
    [0.1, 0.5, 0.5, 0.6]

    ```
    """
    nearest = np.abs(np.asarray(times)[None, :] - grid[:, None]).argmin(axis=1)
    return np.asarray(values, dtype=float)[nearest]


def band(values_RT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Mean over runs, and half the width of its 95 % band: 1.96 standard errors, as in the paper's plots.

    With few runs that is too narrow (with 5 it covers 88 %), and with one there is none.

    Args:
        values_RT (`np.ndarray`):
            Curves of the runs.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: mean and half width, each (T,); the latter NaN with one run.

    Example:

    ```python
    >>> mean, half = band(np.array([[1.0], [2.0], [3.0]]))  # standard deviation 1
    >>> mean.tolist(), half.round(3).tolist()
    ([2.0], [1.132])

    ```
    """
    num_runs = len(values_RT)
    mean = values_RT.mean(axis=0)
    if num_runs == 1:
        return mean, np.full_like(mean, np.nan)
    return mean, _STANDARD_ERRORS * values_RT.std(axis=0, ddof=1) / np.sqrt(num_runs)


def speed_up(grid: np.ndarray, baseline_RT: np.ndarray, arm_RT: np.ndarray, share: float = PAPER_SHARE) -> SpeedUp:
    """
    The speed-up by the paper's rule, see this module.

    Args:
        grid (`np.ndarray`):
            (T,), the first 0.
        baseline_RT (`np.ndarray`):
            Curves of the baseline.
        arm_RT (`np.ndarray`):
            Curves of the arm.
        share (`float`, *optional*, defaults to 0.99):
            Share of the baseline's best accuracy that is asked for.

    Returns:
        [`SpeedUp`]

    Example:

    ```python
    >>> grid = np.array([0.0, 10.0, 20.0, 30.0])
    >>> grpo, pods = np.array([[0.1, 0.2, 0.4, 0.5]]), np.array([[0.1, 0.5, 0.6, 0.6]])
    >>> speed_up(grid, grpo, pods).ratio, speed_up(grid, pods, grpo).ratio
    (3.0, None)

    ```
    """
    baseline, arm = baseline_RT.mean(axis=0), arm_RT.mean(axis=0)
    target = share * baseline[1:].max()
    first, baseline_first = _first_at(arm[None, 1:], target), _first_at(baseline[None, 1:], target)
    times = grid[1:]
    return SpeedUp(
        share=share,
        target=float(target),
        baseline_time=float(times[baseline_first[0]]),
        time=None if first[0] < 0 else float(times[first[0]]),
    )


def bootstrap(
    grid: np.ndarray,
    baseline_RT: np.ndarray,
    arm_RT: np.ndarray,
    share: float = PAPER_SHARE,
    num_draws: int = 4000,
    seed: int = 0,
) -> Interval | None:
    """
    How sure a speed-up is: the same with runs drawn anew.

    Each draw takes as many runs of each arm as there are, with replacement, and goes by the rule from the start, the
    accuracy asked for included. A draw in which the arm is never there counts as slower than any other, one in which
    the baseline learned nothing as faster. With few runs the interval is too narrow.

    Args:
        grid (`np.ndarray`):
            (T,), the first 0.
        baseline_RT (`np.ndarray`):
            Curves of the baseline.
        arm_RT (`np.ndarray`):
            Curves of the arm.
        share (`float`, *optional*, defaults to 0.99):
            Share of the baseline's best accuracy that is asked for.
        num_draws (`int`, *optional*, defaults to 4000):
            Number of draws.
        seed (`int`, *optional*, defaults to 0):
            Seed of the draws.

    Returns:
        [`Interval`] or `None`: `None` if an arm has one run, as all draws would be that one, or if the baseline
        learned nothing.

    Example:

    ```python
    >>> grid = np.array([0.0, 10.0, 20.0])
    >>> always, sometimes = np.array([[0, 0.2, 0.4]] * 2), np.array([[0, 0.4, 0.4], [0, 0.1, 0.1]])
    >>> bootstrap(grid, always, sometimes).low is None  # a quarter of the draws has the second run alone
    True

    ```
    """
    if min(len(baseline_RT), len(arm_RT)) == 1 or not baseline_RT[:, 1:].any():
        return None
    rng = np.random.default_rng(seed)
    baseline_DT, arm_DT = (
        curves_RT[rng.integers(len(curves_RT), size=(num_draws, len(curves_RT)))].mean(axis=1)[:, 1:]
        for curves_RT in (baseline_RT, arm_RT)
    )
    target_D = share * baseline_DT.max(axis=1)
    times = grid[1:]
    arm_D = _first_at(arm_DT, target_D)
    ratio_D = np.where(arm_D < 0, 0.0, times[_first_at(baseline_DT, target_D)] / times[arm_D])
    ratio_D[target_D == 0] = np.inf
    quantiles = np.quantile(ratio_D, _QUANTILES, method="inverted_cdf")
    low, median, high = (None if quantile == 0 else float(quantile) for quantile in quantiles)
    return Interval(low, median, high, never=float((arm_D < 0).mean()))


def _first_at(curves_DT: np.ndarray, target: np.ndarray | float) -> np.ndarray:
    """(D,): index of the first value that is at least the target, -1 if there is none."""
    there_DT = curves_DT >= np.reshape(target, (-1, 1))
    return np.where(there_DT.any(axis=1), there_DT.argmax(axis=1), -1)
