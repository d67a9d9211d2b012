"""
Statistics of the rewards of all generated rollouts, by the formulas of GRPO as TRL has them.

TRL takes them over the rows it trains on; down-sampling needs them over all rows as well. Shapes: R = P x N rollouts
(the N of one prompt adjacent), F reward functions.
"""

import torch
from trl.trainer.utils import nanstd


# A standard deviation that is zero but for rounding, as TRL judges it for `frac_reward_zero_std`.
NO_SPREAD = 1e-8
# TRL adds it to the standard deviation before dividing by it.
_EPSILON = 1e-4


def total_rewards(rewards_per_func: torch.Tensor, reward_weights: torch.Tensor) -> torch.Tensor:
    """
    Weighted sum over the reward functions; a function that gave NaN (does not apply) counts nothing.

    Args:
        rewards_per_func (`torch.Tensor`):
            Float tensor of shape (R, F).
        reward_weights (`torch.Tensor`):
            Float tensor of shape (F,).

    Returns:
        `torch.Tensor`: shape (R,), of the dtype of `rewards_per_func`; NaN where no function gave a number.

    Example:

    ```python
    >>> nan = float("nan")
    >>> total_rewards(torch.tensor([[1.0, 0.5], [nan, 0.5], [nan, nan]]), torch.tensor([1.0, 2.0]))
    tensor([2., 1., nan])

    ```
    """
    totals = (rewards_per_func * reward_weights.to(rewards_per_func)).nansum(dim=1)
    return totals.masked_fill(rewards_per_func.isnan().all(dim=1), torch.nan)


def reward_std(
    rewards_per_func: torch.Tensor,
    reward_weights: torch.Tensor,
    num_rollouts: int,
    scale_rewards: str,
    multi_objective_aggregation: str,
) -> torch.Tensor:
    """
    Standard deviation (with n - 1) that stands behind the advantage of each rollout.

    Args:
        rewards_per_func (`torch.Tensor`):
            Float tensor of shape (R, F).
        reward_weights (`torch.Tensor`):
            Float tensor of shape (F,).
        num_rollouts (`int`):
            N, rollouts per prompt.
        scale_rewards (`str`):
            TRL's setting: over the group of a prompt (`"group"`, `"none"`) or over all rows (`"batch"`).
        multi_objective_aggregation (`str`):
            TRL's setting: `"sum_then_normalize"` or `"normalize_then_sum"`; the latter always goes over all rows.

    Returns:
        `torch.Tensor`: shape (R,).

    Example:

    ```python
    >>> rewards = torch.tensor([[0.0], [1.0], [1.0], [1.0]])
    >>> reward_std(rewards, torch.ones(1), 2, "group", "sum_then_normalize")
    tensor([0.7071, 0.7071, 0.0000, 0.0000])

    ```
    """
    if multi_objective_aggregation == "normalize_then_sum":
        grouped = rewards_per_func.view(-1, num_rollouts, rewards_per_func.shape[1])
        mean, std = grouped.nanmean(dim=1, keepdim=True), nanstd(grouped, dim=1, keepdim=True)
        normalised = ((grouped - mean) / (std + _EPSILON)).view_as(rewards_per_func)
        return nanstd(total_rewards(normalised, reward_weights)).expand(len(rewards_per_func))
    totals = total_rewards(rewards_per_func, reward_weights)
    if scale_rewards == "batch":
        return nanstd(totals).expand_as(totals)
    return nanstd(totals.view(-1, num_rollouts), dim=1).repeat_interleave(num_rollouts)


def advantages_over_all(
    rewards_per_func: torch.Tensor, reward_weights: torch.Tensor, num_rollouts: int, scale_rewards: str
) -> torch.Tensor:
    """
    GRPO's advantages with mean and standard deviation over all N rollouts of a prompt.

    Args:
        rewards_per_func (`torch.Tensor`):
            Float tensor of shape (R, F).
        reward_weights (`torch.Tensor`):
            Float tensor of shape (F,).
        num_rollouts (`int`):
            N, rollouts per prompt.
        scale_rewards (`str`):
            TRL's setting: divide by the standard deviation of the `"group"`, of the `"batch"`, or not (`"none"`).

    Returns:
        `torch.Tensor`: shape (R,); 0 for a rollout without a score.

    Example:

    ```python
    >>> advantages_over_all(torch.tensor([[0.0], [1.0]]), torch.ones(1), 2, "none")
    tensor([-0.5000,  0.5000])

    ```
    """
    totals = total_rewards(rewards_per_func, reward_weights)
    advantages = totals - totals.view(-1, num_rollouts).nanmean(dim=1).repeat_interleave(num_rollouts)
    if scale_rewards != "none":
        std = reward_std(rewards_per_func, reward_weights, num_rollouts, scale_rewards, "sum_then_normalize")
        advantages = advantages / (std + _EPSILON)
    return advantages.nan_to_num(nan=0.0)
