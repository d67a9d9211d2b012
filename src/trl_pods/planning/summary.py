"""From measurements to what the tables and plots of a plan show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .costs import Costs, fit_costs
from .measurement import Measurement, join_passes
from .pairs import CHECK, FIT, MEMORY, Grid
from .recommendation import Option, expect, options, recommend
from .signal import Pools, pool


@dataclass(frozen=True)
class Check:
    """A measured step that the fit did not see, and what the fit says of it."""

    measured: Measurement
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured.step_seconds() - 1


@dataclass(frozen=True)
class Plan:
    """
    All that is shown.

    Args:
        fitted (`list[Measurement]`):
            What the costs were fitted to, one for each pair.
        checks (`list[Check]`):
            What they were checked on.
        memory (`list[Measurement]`):
            What was measured of the update's memory, failed processes too.
        costs ([`Costs`]):
            Seconds over n and m.
        pools ([`Pools`]):
            Rewards by prompt.
        options (`list[Option]`):
            The grid.
        chosen ([`Option`], *optional*):
            The recommended pair.
        twice ([`Option`], *optional*):
            The same m with twice the n.
        same_hardware (`bool`):
            Whether all pairs were measured on the same.
    """

    fitted: list[Measurement]
    checks: list[Check]
    memory: list[Measurement]
    costs: Costs
    pools: Pools
    options: list[Option]
    chosen: Option | None
    twice: Option | None
    same_hardware: bool

    @property
    def timed(self) -> list[Measurement]:
        """All measured pairs."""
        return [*self.fitted, *(check.measured for check in self.checks)]

    @property
    def num_prompts(self) -> int:
        """Prompts of a round, on all processes."""
        return self.fitted[0].rollouts // self.fitted[0].n


def summarize(measurements: Sequence[Measurement], recipe: Mapping[str, Any], grid: Grid) -> Plan:
    """
    Make a plan from measurements.

    Args:
        measurements (`Sequence[Measurement]`):
            Those of the plan.
        recipe (`Mapping[str, Any]`):
            The recipe.
        grid ([`Grid`]):
            The pairs that are looked at.
    """
    memory = [found for found in measurements if found.purpose == MEMORY]
    timed = [found for found in measurements if found.purpose != MEMORY]
    pairs = join_passes(timed)
    fitted = [found for found in pairs if found.purpose == FIT]
    costs, pools = fit_costs(fitted), pool(pairs, recipe)
    found = options(grid, costs, pools)
    chosen = recommend(found)
    return Plan(
        fitted,
        [Check(found, costs.step_seconds(found.n, found.m)) for found in pairs if found.purpose == CHECK],
        memory,
        costs,
        pools,
        found,
        chosen,
        None if chosen is None else expect(2 * chosen.n, chosen.m, costs, pools),
        len({str(measurement.hardware) for measurement in timed}) == 1,
    )
