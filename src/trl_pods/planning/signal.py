"""
What the rewards of measured rollouts say: how often each prompt is solved, and which variance of rewards is kept.

Shapes: P prompts, each with a pool of measured rollouts; D draws, N rollouts of a draw, M of them kept, F reward
functions.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from trl.trainer.utils import nanstd

from ..reward_statistics import NO_SPREAD, total_rewards
from ..scripts.task import make_current_directory_importable
from ..selectors import resolve_selector, select
from .measurement import Measurement


_DRAWS = 4096  # of all prompts together
_RIGHT = 1.0  # reward of a right answer, as for the held-out accuracy


@dataclass(frozen=True)
class Rule:
    """
    How a recipe rewards and selects.

    Args:
        functions (`tuple[str, ...]`):
            Names of the reward functions.
        settings (`Mapping[str, Any]`):
            The recipe.
    """

    functions: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def weights(self) -> torch.Tensor:
        """Weights of the reward functions (F,)."""
        given = self.settings.get("reward_weights")
        return torch.tensor([1.0] * len(self.functions) if given is None else given, dtype=torch.float64)

    def kept_squares(self, rewards: torch.Tensor, num_kept: int) -> torch.Tensor:
        """
        Select as in training: of each draw the sum over what is kept of squared deviations of the weighted reward.

        Args:
            rewards (`torch.Tensor`):
                (D, N, F), NaN for no score.
            num_kept (`int`):
                M.

        Returns:
            `torch.Tensor`: (D,); 0 for a draw without signal.
        """
        num_draws, num_rollouts, num_functions = rewards.shape
        names, weights = self.settings.get("selection_reward_funcs"), self.weights()
        names = [names] if isinstance(names, str) else names
        seen = [i for i, name in enumerate(self.functions) if names is None or name in names]
        seen = [i for i in seen if weights[i] != 0] or seen
        rows = rewards.view(-1, num_functions)
        looked_at_DN = total_rewards(rows[:, seen], weights[seen]).view(num_draws, num_rollouts)
        keywords = self.settings.get("selector_kwargs")
        kept_DM = select(
            resolve_selector(self.settings.get("selector") or "max_variance", keywords),
            looked_at_DN,
            num_kept,
            selector_kwargs=keywords,
            rewards_per_func=rewards,
            generator=torch.Generator().manual_seed(0),
        )
        totals_DM = total_rewards(rows, weights).view(num_draws, num_rollouts).gather(1, kept_DM)
        squares_D = (totals_DM - totals_DM.nanmean(dim=1, keepdim=True)).square().nansum(dim=1)
        least = self.settings.get("min_reward_std") or 0.0
        if names is not None or least > 0:
            squares_D = squares_D * (nanstd(looked_at_DN, dim=1) > max(least, NO_SPREAD))
        return squares_D


@dataclass(frozen=True)
class Pools:
    """
    The rewards of all measured rollouts of each prompt.

    Args:
        rule ([`Rule`]):
            How the recipe rewards and selects.
        rewards (`Sequence[torch.Tensor]`):
            For each prompt (K, F), K measured rollouts.
    """

    rule: Rule
    rewards: Sequence[torch.Tensor]

    def totals(self) -> list[torch.Tensor]:
        """The weighted rewards of each prompt."""
        return [total_rewards(rewards, self.rule.weights()) for rewards in self.rewards]

    def pass_rates(self) -> torch.Tensor:
        """Share of rollouts of each prompt that the first reward function gives 1 or more, (P,)."""
        return torch.stack([(rewards[:, 0] >= _RIGHT).double().mean() for rewards in self.rewards])

    def kept_variance(self, num_rollouts: int, num_kept: int) -> float:
        """
        Expected variance of the rewards of the kept: the mean over prompts, and over draws from the pool of each with
        replacement. A reward that was never seen is never drawn, so what a larger N would find is underestimated.

        Args:
            num_rollouts (`int`):
                N.
            num_kept (`int`):
                M.
        """
        generator = torch.Generator().manual_seed(0)
        num_draws = max(1, _DRAWS // len(self.rewards))
        squares = []
        for rewards in self.rewards:
            drawn_DN = torch.randint(len(rewards), (num_draws, num_rollouts), generator=generator)
            squares.append(self.rule.kept_squares(rewards[drawn_DN], num_kept).mean())
        return float(torch.stack(squares).mean()) / num_kept

    def plain_variance(self, num_kept: int) -> float:
        """The same without selection, as in GRPO: that of M rollouts of a prompt."""
        variances = [totals[~totals.isnan()] for totals in self.totals()]
        of_pool = [float(found.var(correction=0)) if len(found) else 0.0 for found in variances]
        return sum(of_pool) / len(of_pool) * (num_kept - 1) / num_kept


def pool(measurements: Sequence[Measurement], settings: Mapping[str, Any]) -> Pools:
    """
    Put together what was measured of the same prompt; the policy is the same in all measurements.

    Args:
        measurements (`Sequence[Measurement]`):
            The measurements.
        settings (`Mapping[str, Any]`):
            The recipe.

    Returns:
        [`Pools`]
    """
    by_prompt: dict[tuple, list] = {}
    for measurement in measurements:
        for prompt, counts in measurement.rewards:
            for scores, count in counts:
                row = [torch.nan if score is None else score for score in scores]
                by_prompt.setdefault(tuple(prompt), []).extend([row] * count)
    rule = Rule(tuple(measurements[0].functions), settings)
    return Pools(rule, [torch.tensor(rows, dtype=torch.float64) for rows in by_prompt.values()])


def check_rule(settings: Mapping[str, Any]) -> None:
    """
    Refuse a rule that looks at what the tables of completions do not hold.

    Args:
        settings (`Mapping[str, Any]`):
            The recipe.

    Raises:
        ValueError: If the rule is unknown, or what it sees depends on the lengths of completions.
    """
    make_current_directory_importable()  # as it is in the processes that are measured
    selector = settings.get("selector") or "max_variance"
    rule = resolve_selector(selector, settings.get("selector_kwargs"))
    if "completion_lengths" in inspect.signature(rule).parameters:
        raise ValueError(
            f"selector={selector!r} looks at the lengths of completions, and a plan draws rewards alone. Plan with "
            "--selector max_variance."
        )
    if settings.get("mask_truncated_completions"):
        raise ValueError(
            f"mask_truncated_completions={settings['mask_truncated_completions']!r} takes what is cut off out of the "
            "selection, and a plan draws rewards alone. Plan with --mask_truncated_completions false."
        )
