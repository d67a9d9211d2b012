"""
Which pair to take: the one whose steps have the most signal for their seconds.

Signal is the root of the sum of squared deviations of the kept rewards of a prompt, `(m x variance) ** 0.5`. Rollouts
push in proportion to how far their rewards deviate: what they push together grows with the sum of the squares, and the
noise in it with the root of that. So the root is what the signal-to-noise ratio of the gradient is proportional to,
and as long as that is small, it is how far a step of Adam, which divides by the size of the gradient, gets.

That is a heuristic. It knows nothing of learning itself, nor of the rollouts of other prompts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .costs import Costs
from .measurement import PHASES
from .pairs import Grid
from .signal import Pools


_AS_GOOD = 0.95  # of the best: what is within the error of a few measured steps
_PAPER = (
    "The paper (arXiv 2504.13818) found n near 64 and n / m of 2 to 4 to work best, and ever larger n to cost more "
    "than it brings."
)


@dataclass(frozen=True)
class Option:
    """
    A pair with what is expected of it.

    Args:
        n (`int`):
            Rollouts of a prompt.
        m (`int`):
            Those kept.
        seconds (`Mapping[str, float]`):
            Of a step, by phase.
        variance (`float`):
            Of the rewards of the kept rollouts of a prompt.
        plain_variance (`float`):
            That of m rollouts without selection.
    """

    n: int
    m: int
    seconds: Mapping[str, float]
    variance: float
    plain_variance: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def signal_per_second(self) -> float:
        """Root of the sum of squared deviations of the kept rewards of a prompt, for each second of a step."""
        return math.sqrt(self.m * self.variance) / self.step_seconds


def options(grid: Grid, costs: Costs, pools: Pools) -> list[Option]:
    """All pairs of a grid."""
    return [expect(n, m, costs, pools) for n, m in grid.pairs()]


def expect(n: int, m: int, costs: Costs, pools: Pools) -> Option:
    """What is expected of a pair."""
    seconds = {phase: costs.seconds(phase, n, m) for phase in PHASES}
    return Option(n, m, seconds, pools.kept_variance(n, m), pools.plain_variance(m))


def recommend(found: Sequence[Option]) -> Option | None:
    """
    Of the pairs that are nearly as good as the best the one with the smallest n, and then the smallest m.

    Args:
        found (`Sequence[Option]`):
            The pairs.

    Returns:
        [`Option`], *optional*: the pair; `None` if no pair has any variance.

    Example:

    ```python
    >>> pairs = [(16, 8, 2.0, 0.2), (32, 8, 2.1, 0.24), (64, 8, 4.0, 0.25)]
    >>> found = [Option(n, m, {"generate": seconds}, variance, 0.1) for n, m, seconds, variance in pairs]
    >>> [round(option.signal_per_second, 3) for option in found]
    [0.632, 0.66, 0.354]
    >>> recommend(found).n
    16

    ```
    """
    best = max(option.signal_per_second for option in found)
    if best <= 0:
        return None
    return min(
        (option for option in found if option.signal_per_second >= _AS_GOOD * best),
        key=lambda option: (option.n, option.m),
    )


def reason(chosen: Option | None, twice: Option | None, found: Sequence[Option]) -> str:
    """
    The recommendation in words.

    Args:
        chosen ([`Option`], *optional*):
            The pair.
        twice ([`Option`], *optional*):
            The same m with twice the n.
        found (`Sequence[Option]`):
            The pairs that it was chosen from.
    """
    if chosen is None or twice is None:
        return (
            "No recommendation: in every prompt all rollouts got the same reward, so that no choice of n and m gives "
            "GRPO anything to learn from. Use easier or harder prompts, another reward, or another policy."
        )
    more_variance = 100 * (twice.variance / chosen.variance - 1)
    more_seconds = 100 * (twice.step_seconds / chosen.step_seconds - 1)
    sizes = (
        (chosen.n, "num_rollouts", max(o.n for o in found)),
        (chosen.m, "num_generations", max(o.m for o in found)),
    )
    at_the_edge = " and ".join(f"{name}={size}" for size, name, most in sizes if size == most)
    sentences = (
        f"Recommended: num_rollouts={chosen.n}, num_generations={chosen.m} (n / m = {chosen.n / chosen.m:g}).",
        f"Its steps train on {chosen.m} rollouts of a prompt with variance {chosen.variance:.3g} (without selection "
        f"{chosen.plain_variance:.3g}) in {chosen.step_seconds:.3g} s; of the pairs within 5 % of the most signal in "
        "a second, the root of m x variance, it has the smallest n.",
        f"Twice the n would change the variance by {more_variance:+.0f} % and the seconds by {more_seconds:+.0f} %.",
        *([f"{at_the_edge} is the most in the grid: more may be better still."] if at_the_edge else []),
        _PAPER,
        "The rule is a heuristic of ours: it knows costs and rewards of the policy as it is now, and not what is "
        "learned from them.",
    )
    return " ".join(sentences)
