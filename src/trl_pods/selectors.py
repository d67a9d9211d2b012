"""
Down-sampling rules: which `m` of the `n` rollouts of each prompt are trained on.

Tensors in, tensors out; no state, and no knowledge of a trainer. Every rule has the signature

    selector(rewards, num_selected, **keywords) -> indices

`rewards` is float64, on the CPU, of shape (P, N); `indices` is int64, of shape (P, M), and names M = `num_selected`
distinct columns in each row. An ineligible rollout (no finite score, or truncated where truncated ones are masked) has
the reward NaN and is chosen last. A rule that names one of the keywords `rewards_per_func` (P, N, F),
`completion_lengths` (P, N) or `generator` in its signature is given it; further keywords come from the
`selector_kwargs` of the config.

Shapes: P prompts, N rollouts per prompt, M of them kept, F reward functions. Suffixes on names give the shape.
"""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch


Selector = Callable[..., torch.Tensor]

# Keywords that the trainer fills in for a rule whose signature names them.
TRAINER_KEYWORDS = ("rewards_per_func", "completion_lengths", "generator")

# Splits whose variances differ by less than this share count as tied: rounding must not decide between them.
_TIE_TOLERANCE = 1e-12

# Rewards that are worked on at once: what is made on the way then stays in the processor's cache.
_BLOCK_SIZE = 2**16


def max_variance(rewards: torch.Tensor, num_selected: int) -> torch.Tensor:
    """
    The subset with the largest variance of rewards: the rule of PODS (section 3 of arXiv 2504.13818).

    An optimal subset is always the k highest rewards and the M - k lowest for some k. One sort and prefix sums compare
    all M + 1 splits, in O(N log N) a prompt.

    Conventions: among splits of equal variance the one with the fewest top rewards is taken; among equal rewards the
    rollout with the lowest index. Binary rewards give half ones and half zeros as far as there are enough of each.
    When all rewards are equal the first M rollouts are kept.

    Args:
        rewards (`torch.Tensor`):
            Float tensor of shape (P, N); NaN marks an ineligible rollout, which is chosen only when fewer than M
            others are left.
        num_selected (`int`):
            M, the number of rollouts to keep per prompt, 1 <= M <= N.

    Returns:
        `torch.Tensor`: int64 tensor of shape (P, M), ascending in each row.

    Example:

    ```python
    >>> max_variance(torch.tensor([[0.1, 0.9, 0.5, 0.45, 0.0, 1.0, 0.55, 0.6]]), 4)
    tensor([[0, 1, 4, 5]])
    >>> max_variance(torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 1.0]]), 4)  # not half and half
    tensor([[0, 1, 2, 7]])

    ```
    """
    rows_at_once = max(1, _BLOCK_SIZE // rewards.shape[1])
    return torch.cat([_max_variance(block_PN, num_selected) for block_PN in rewards.split(rows_at_once)])


def max_reward(rewards: torch.Tensor, num_selected: int) -> torch.Tensor:
    """
    The M highest rewards, among equal ones those with the lowest index (a rule the paper compares with).

    Args:
        rewards (`torch.Tensor`):
            Float tensor of shape (P, N); NaN marks an ineligible rollout, chosen last.
        num_selected (`int`):
            M, the number of rollouts to keep per prompt, 1 <= M <= N.

    Returns:
        `torch.Tensor`: int64 tensor of shape (P, M), ascending in each row.

    Example:

    ```python
    >>> max_reward(torch.tensor([[0.0, 1.0, float("nan"), 0.5, 1.0, 1.0]]), 2)
    tensor([[1, 4]])

    ```
    """
    _, descending_PN, _ = _sort_ascending(-rewards)
    return _ascending(descending_PN[:, :num_selected])


def random(rewards: torch.Tensor, num_selected: int, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """
    M rollouts drawn uniformly without replacement (a rule the paper compares with).

    Args:
        rewards (`torch.Tensor`):
            Float tensor of shape (P, N), read only for its NaNs: an ineligible rollout is chosen last.
        num_selected (`int`):
            M, the number of rollouts to keep per prompt, 1 <= M <= N.
        generator (`torch.Generator`, *optional*):
            Source of randomness, on the CPU. `None` is torch's global one. The trainer passes one that depends on the
            seed and the training step alone, so that a resumed run draws what the straight run would have drawn.

    Returns:
        `torch.Tensor`: int64 tensor of shape (P, M), ascending in each row.

    Example:

    ```python
    >>> random(torch.tensor([[1.0, float("nan"), 0.0]]), 2, generator=torch.Generator().manual_seed(0))
    tensor([[0, 2]])

    ```
    """
    keys_PN = torch.rand(rewards.shape, generator=generator, dtype=torch.float64)
    keys_PN[~rewards.isfinite()] = torch.inf
    return _ascending(keys_PN.argsort(dim=1, stable=True)[:, :num_selected])


def percentile(rewards: torch.Tensor, num_selected: int) -> torch.Tensor:
    """
    Rollouts spread evenly over the distribution of rewards (a rule the paper compares with).

    Of the rewards in ascending order (equal ones by index) it takes those at positions floor((j + 1/2) N / M) for
    j = 0 .. M - 1, where N counts the eligible rollouts alone.

    Args:
        rewards (`torch.Tensor`):
            Float tensor of shape (P, N); NaN marks an ineligible rollout, chosen last.
        num_selected (`int`):
            M, the number of rollouts to keep per prompt, 1 <= M <= N.

    Returns:
        `torch.Tensor`: int64 tensor of shape (P, M), ascending in each row.

    Example:

    ```python
    >>> percentile(torch.tensor([[0.7, 0.0, 0.6, 0.1, 0.5, 0.2, 0.4, 0.3]]), 4)  # the values .1, .3, .5 and .7
    tensor([[0, 3, 4, 7]])

    ```
    """
    _, order_PN, num_eligible_P = _sort_ascending(rewards)
    j_M = torch.arange(num_selected)
    spread_PM = (2 * j_M + 1) * num_eligible_P[:, None] // (2 * num_selected)
    # With fewer than M eligible rollouts all of them are taken, and the ineligible ones behind them fill up.
    position_PM = torch.where(num_eligible_P[:, None] >= num_selected, spread_PM, j_M)
    return _ascending(order_PN.gather(1, position_PM))


def shortest(rewards: torch.Tensor, num_selected: int, *, completion_lengths: torch.Tensor) -> torch.Tensor:
    """
    The M shortest rollouts, whatever their rewards: a rule of GFPO (arXiv 2508.09726), against growing lengths.

    Args:
        rewards (`torch.Tensor`):
            Float tensor of shape (P, N), read only for its NaNs: an ineligible rollout is chosen last.
        num_selected (`int`):
            M, the number of rollouts to keep per prompt, 1 <= M <= N.
        completion_lengths (`torch.Tensor`):
            Generated tokens, integer tensor of shape (P, N).

    Returns:
        `torch.Tensor`: int64 tensor of shape (P, M), ascending in each row.

    Example:

    ```python
    >>> shortest(torch.tensor([[1.0, 0.0, float("nan"), 1.0]]), 2, completion_lengths=torch.tensor([[9, 5, 2, 7]]))
    tensor([[1, 3]])

    ```
    """
    return max_reward(-completion_lengths.double().masked_fill(~rewards.isfinite(), torch.nan), num_selected)


def token_efficiency(rewards: torch.Tensor, num_selected: int, *, completion_lengths: torch.Tensor) -> torch.Tensor:
    """
    The M rollouts with the highest reward per token: the other rule of GFPO (arXiv 2508.09726).

    Args:
        rewards (`torch.Tensor`):
            Float tensor of shape (P, N); NaN marks an ineligible rollout, chosen last.
        num_selected (`int`):
            M, the number of rollouts to keep per prompt, 1 <= M <= N.
        completion_lengths (`torch.Tensor`):
            Generated tokens, integer tensor of shape (P, N).

    Returns:
        `torch.Tensor`: int64 tensor of shape (P, M), ascending in each row.

    Example:

    ```python
    >>> lengths = torch.tensor([[10, 5, 2, 8]])
    >>> token_efficiency(torch.tensor([[1.0, 1.0, 0.0, 2.0]]), 2, completion_lengths=lengths)
    tensor([[1, 3]])

    ```
    """
    return max_reward(rewards / completion_lengths.clamp(min=1), num_selected)


BUILT_IN_SELECTORS: Mapping[str, Selector] = {
    "max_variance": max_variance,
    "max_reward": max_reward,
    "random": random,
    "percentile": percentile,
    "shortest": shortest,
    "token_efficiency": token_efficiency,
}


def resolve_selector(selector: str | Selector, selector_kwargs: Mapping[str, Any] | None = None) -> Selector:
    """
    Find the rule that a config names and check that it can be called with the keywords configured for it.

    Args:
        selector (`str` or `Callable`):
            A built-in name (a key of `BUILT_IN_SELECTORS`), the dotted import path of a rule, or a rule itself.
        selector_kwargs (`Mapping[str, Any]`, *optional*):
            Keywords that are passed to the rule on every call.

    Returns:
        `Callable`: the rule.

    Raises:
        ValueError: If the name is unknown, the path cannot be imported or is not callable, or the rule cannot take the
            keywords.

    Example:

    ```python
    >>> resolve_selector("max_reward").__name__
    'max_reward'
    >>> resolve_selector("best")
    Traceback (most recent call last):
    ...
    ValueError: selector='best' is not a rule. Use 'max_variance', 'max_reward', 'random', 'percentile', 'shortest', \
'token_efficiency', a callable, or a dotted import path such as 'my_package.my_rules.my_rule'.

    ```
    """
    rule = _import_selector(selector) if isinstance(selector, str) else selector
    if not callable(rule):
        raise ValueError(
            f"selector={selector!r} is a {type(rule).__name__}, which cannot be called. Use {_choices()}."
        )
    _check_keywords(rule, selector_kwargs or {})
    return rule


def select(
    selector: Selector,
    rewards: torch.Tensor,
    num_selected: int,
    *,
    selector_kwargs: Mapping[str, Any] | None = None,
    **trainer_keywords: Any,
) -> torch.Tensor:
    """
    Call a rule with those of the trainer's keywords that its signature names, and check what it returns.

    Whatever the rule, an ineligible rollout is kept only if no eligible one is left: where a rule chose otherwise, the
    eligible rollouts with the lowest indices take the places.

    Args:
        selector (`Callable`):
            The rule.
        rewards (`torch.Tensor`):
            Float64 tensor of shape (P, N), NaN where ineligible.
        num_selected (`int`):
            M, the number of rollouts to keep per prompt.
        selector_kwargs (`Mapping[str, Any]`, *optional*):
            Keywords configured for the rule.
        **trainer_keywords:
            Values for `rewards_per_func`, `completion_lengths` and `generator`.

    Returns:
        `torch.Tensor`: int64 tensor of shape (P, M), on the CPU, ascending in each row: kept rollouts stay in their
        original order.

    Raises:
        ValueError: If the rule returns anything else than M distinct indices in 0 .. N - 1 per prompt.

    Example:

    ```python
    >>> def longest(rewards, num_selected, *, completion_lengths):
    ...     return completion_lengths.argsort(dim=1, descending=True)[:, :num_selected]
    >>> lengths = torch.tensor([[3, 9, 5]])
    >>> select(longest, torch.zeros(1, 3), 2, completion_lengths=lengths, generator=None)
    tensor([[1, 2]])
    >>> select(longest, torch.tensor([[0.0, float("nan"), 0.0]]), 2, completion_lengths=lengths, generator=None)
    tensor([[0, 2]])

    ```
    """
    accepted = _accepted_keywords(selector)
    wanted = {name: value for name, value in trainer_keywords.items() if accepted is None or name in accepted}
    # A clone, since a user's rule may write into what it is given.
    indices = selector(rewards.clone(), num_selected, **wanted, **(selector_kwargs or {}))
    _check_kind(indices, selector_name(selector), rewards, num_selected)
    ascending_PM = _ascending(indices.cpu())
    _check_range(ascending_PM, selector_name(selector), rewards, num_selected)
    return _ineligible_last(ascending_PM, rewards)


def selector_name(selector: str | Selector) -> str:
    """
    A name for a rule in messages and saved configs: the dotted path of a function, else that of its class.

    Example:

    ```python
    >>> selector_name(max_variance)
    'trl_pods.selectors.max_variance'
    >>> selector_name("random")
    'random'

    ```
    """
    if isinstance(selector, str):
        return selector
    named: Any = selector if hasattr(selector, "__qualname__") else type(selector)
    return f"{named.__module__}.{named.__qualname__}"


def _max_variance(rewards_PN: torch.Tensor, num_selected: int) -> torch.Tensor:
    rewards_PN = _with_nan(rewards_PN)
    # numpy sorts values many times faster than it or torch finds their order, which is not needed.
    sorted_PN = torch.from_numpy(np.sort(rewards_PN.numpy(), axis=1))
    num_eligible_P1 = (~rewards_PN.isnan()).sum(dim=1, keepdim=True)
    top_P1 = _best_split(sorted_PN, num_eligible_P1, num_selected)
    bottom_P1 = num_eligible_P1.clamp(max=num_selected) - top_P1
    kept_PN = _lowest_and_highest(rewards_PN, sorted_PN, num_eligible_P1, bottom_P1, top_P1)
    return _to_indices(_fill_up(kept_PN, rewards_PN, num_eligible_P1, num_selected), num_selected)


def _with_nan(rewards_PN: torch.Tensor) -> torch.Tensor:
    """The rewards in float64, NaN where they are not finite."""
    rewards_PN = rewards_PN.detach().double()
    return rewards_PN.masked_fill(~rewards_PN.isfinite(), torch.nan)


def _sort_ascending(rewards_PN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards in ascending order (not finite ones last, as NaN; equal ones by index), that order, the finite count."""
    sorted_PN, order_PN = _with_nan(rewards_PN).sort(dim=1, stable=True)
    return sorted_PN, order_PN, (~sorted_PN.isnan()).sum(dim=1)


def _best_split(sorted_PN: torch.Tensor, num_eligible_P1: torch.Tensor, num_selected: int) -> torch.Tensor:
    """
    For each prompt the number k of top rewards whose union with the lowest ones has the largest variance.

    It is 0 where all eligible rollouts are kept, and all splits are the same.
    """
    highest_PM = _at(sorted_PN, num_eligible_P1 - 1 - torch.arange(num_selected))
    lowest_PM = sorted_PN[:, :num_selected]
    ends_2PM = _scale_to_unit(torch.stack([lowest_PM, highest_PM]))

    def sum_of_split(values_2PM: torch.Tensor) -> torch.Tensor:
        prefix_2PK = torch.nn.functional.pad(values_2PM.cumsum(dim=2), (1, 0))  # K = M + 1
        return prefix_2PK[0].flip(1) + prefix_2PK[1]  # M - k from the bottom, k from the top

    # num_selected times the variance
    spread_PK = sum_of_split(ends_2PM.square()) - sum_of_split(ends_2PM).square() / num_selected
    best_P1 = spread_PK.amax(dim=1, keepdim=True)
    tied_PK = spread_PK >= best_P1 - best_P1.clamp(min=1) * _TIE_TOLERANCE
    top_P1 = tied_PK.byte().argmax(dim=1, keepdim=True)  # the first, so the fewest top rewards
    return top_P1.masked_fill(num_eligible_P1 <= num_selected, 0)


def _scale_to_unit(ends_2PM: torch.Tensor) -> torch.Tensor:
    """
    Map the rewards of each prompt linearly onto [-1, 1], of which the first lowest and the first highest are the ends.

    The variance of a subset with both extremes in it is then of order one, so that sums of squares do not cancel,
    whatever the offset and the unit of the rewards.
    """
    low_P1, high_P1 = ends_2PM[:, :, :1]
    centre_P1 = low_P1 / 2 + high_P1 / 2  # halves first: the range of two large values overflows
    half_range_P1 = high_P1 / 2 - low_P1 / 2
    return (ends_2PM - centre_P1) / half_range_P1.masked_fill(half_range_P1 == 0, 1)


def _lowest_and_highest(
    rewards_PN: torch.Tensor,
    sorted_PN: torch.Tensor,
    num_eligible_P1: torch.Tensor,
    bottom_P1: torch.Tensor,
    top_P1: torch.Tensor,
) -> torch.Tensor:
    """Mark in each row the `bottom` lowest rewards and the `top` highest, among equal ones those of lowest index."""
    # The largest of the lowest and the smallest of the highest, each with its neighbour that is not kept.
    low_P1 = _at(sorted_PN, bottom_P1 - 1).masked_fill(bottom_P1 == 0, -torch.inf)
    high_P1 = _at(sorted_PN, num_eligible_P1 - top_P1).masked_fill(top_P1 == 0, torch.inf)
    left_out_equals_low_P1 = _at(sorted_PN, bottom_P1) == low_P1
    left_out_equals_high_P1 = _at(sorted_PN, num_eligible_P1 - top_P1 - 1) == high_P1
    kept_PN = (rewards_PN <= low_P1) | (rewards_PN >= high_P1)
    too_many_P = (left_out_equals_low_P1 | left_out_equals_high_P1)[:, 0]
    if too_many_P.any():
        per_row = (rewards_PN, low_P1, high_P1, bottom_P1, top_P1)
        kept_PN[too_many_P] = _first_among_equals(*(values[too_many_P] for values in per_row))
    return kept_PN


def _first_among_equals(
    rewards_PN: torch.Tensor,
    low_P1: torch.Tensor,
    high_P1: torch.Tensor,
    bottom_P1: torch.Tensor,
    top_P1: torch.Tensor,
) -> torch.Tensor:
    """Mark the rewards below `low` and above `high`, and the first equal to either up to `bottom` and `top` in all."""
    below_PN, above_PN = rewards_PN < low_P1, rewards_PN > high_P1
    num_low_P1 = bottom_P1 - below_PN.sum(dim=1, keepdim=True)
    num_high_P1 = top_P1 - above_PN.sum(dim=1, keepdim=True)
    # Where both ends reach into one run of equal rewards, its first ones serve both.
    is_one_run_P1 = low_P1 == high_P1
    num_low_P1, num_high_P1 = num_low_P1 + num_high_P1 * is_one_run_P1, num_high_P1 + num_low_P1 * is_one_run_P1
    return (
        below_PN
        | above_PN
        | _first_marks(rewards_PN == low_P1, num_low_P1)
        | _first_marks(rewards_PN == high_P1, num_high_P1)
    )


def _fill_up(
    kept_PN: torch.Tensor, rewards_PN: torch.Tensor, num_eligible_P1: torch.Tensor, num_selected: int
) -> torch.Tensor:
    """Mark the first ineligible rollouts too where there are not enough others."""
    missing_P1 = (num_selected - num_eligible_P1).clamp(min=0)
    return kept_PN | _first_marks(rewards_PN.isnan(), missing_P1) if missing_P1.any() else kept_PN


def _first_marks(marked_PN: torch.Tensor, count_P1: torch.Tensor) -> torch.Tensor:
    """Of the marks in each row only the first `count`."""
    return marked_PN & (marked_PN.cumsum(dim=1, dtype=torch.int32) <= count_P1)


def _at(values_PN: torch.Tensor, positions_PM: torch.Tensor) -> torch.Tensor:
    return values_PN.gather(1, positions_PM.clamp(0, values_PN.shape[1] - 1))


def _to_indices(kept_PN: torch.Tensor, num_selected: int) -> torch.Tensor:
    """Columns of the marks, of which each row has `num_selected`."""
    num_rows, num_columns = kept_PN.shape
    position_PM = torch.from_numpy(np.flatnonzero(kept_PN.numpy())).view(num_rows, num_selected)  # torch takes longer
    return position_PM - torch.arange(num_rows)[:, None] * num_columns


def _ascending(indices_PM: torch.Tensor) -> torch.Tensor:
    return indices_PM.sort(dim=1).values


def _choices() -> str:
    names = ", ".join(repr(name) for name in BUILT_IN_SELECTORS)
    return f"{names}, a callable, or a dotted import path such as 'my_package.my_rules.my_rule'"


def _import_selector(path: str) -> Any:
    if path in BUILT_IN_SELECTORS:
        return BUILT_IN_SELECTORS[path]
    if "." not in path:
        raise ValueError(f"selector={path!r} is not a rule. Use {_choices()}.")
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"selector={path!r} cannot be imported ({error}). Use {_choices()}.") from error


def _accepted_keywords(selector: Selector) -> set[str] | None:
    """Names that a rule takes as keywords; `None` if it takes any."""
    parameters = inspect.signature(selector).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _check_keywords(selector: Selector, selector_kwargs: Mapping[str, Any]) -> None:
    reserved = sorted({"rewards", "num_selected", *TRAINER_KEYWORDS} & selector_kwargs.keys())
    if reserved:
        raise ValueError(
            f"selector_kwargs={dict(selector_kwargs)!r} sets {reserved}, which the trainer passes itself. Leave "
            "these keys out."
        )
    try:
        signature = inspect.signature(selector)
    except (TypeError, ValueError):
        raise ValueError(
            f"The signature of selector={selector_name(selector)!r} cannot be read. Wrap it in a function "
            "`def rule(rewards, num_selected): ...`."
        ) from None
    accepted = _accepted_keywords(selector)
    from_trainer = {name: None for name in TRAINER_KEYWORDS if accepted is None or name in accepted}
    try:
        signature.bind(None, None, **from_trainer, **selector_kwargs)
    except TypeError as error:
        raise ValueError(
            f"selector={selector_name(selector)!r} with the signature {signature} cannot be called as "
            f"selector(rewards, num_selected) with selector_kwargs={dict(selector_kwargs)!r}: {error}. Name every "
            f"further argument in selector_kwargs, or take some of {list(TRAINER_KEYWORDS)} from the trainer."
        ) from None


def _ineligible_last(chosen_PM: torch.Tensor, rewards_PN: torch.Tensor) -> torch.Tensor:
    """The chosen rollouts, ascending, but ineligible ones only where no eligible one is left."""
    is_eligible_PN = rewards_PN.isfinite()
    to_correct_P = ~is_eligible_PN.gather(1, chosen_PM).all(dim=1)
    if to_correct_P.any():
        is_chosen_PN = torch.zeros_like(is_eligible_PN).scatter(1, chosen_PM, True)[to_correct_P]
        # Eligible before ineligible, and among either kind the chosen first.
        rank_PN = 2 * (~is_eligible_PN[to_correct_P]).int() + (~is_chosen_PN).int()
        chosen_PM[to_correct_P] = _ascending(rank_PN.argsort(dim=1, stable=True)[:, : chosen_PM.shape[1]])
    return chosen_PM


def _check_kind(indices: Any, name: str, rewards_PN: torch.Tensor, num_selected: int) -> None:
    if not isinstance(indices, torch.Tensor):
        _refuse(f"a {type(indices).__name__}", name, rewards_PN, num_selected)
    if tuple(indices.shape) != (len(rewards_PN), num_selected):
        _refuse(f"shape {tuple(indices.shape)}", name, rewards_PN, num_selected)
    if indices.dtype != torch.int64:
        _refuse(f"dtype {indices.dtype}", name, rewards_PN, num_selected)


def _check_range(ascending_PM: torch.Tensor, name: str, rewards_PN: torch.Tensor, num_selected: int) -> None:
    num_prompts, num_rollouts = rewards_PN.shape
    if num_prompts and (ascending_PM[:, 0].min() < 0 or ascending_PM[:, -1].max() >= num_rollouts):
        found = f"indices from {ascending_PM[:, 0].min().item()} to {ascending_PM[:, -1].max().item()}"
        _refuse(found, name, rewards_PN, num_selected)
    is_repeated_P = (ascending_PM[:, 1:] == ascending_PM[:, :-1]).any(dim=1)
    if is_repeated_P.any():
        row = int(is_repeated_P.int().argmax())
        found = f"the row {ascending_PM[row].tolist()} (prompt {row}), in which an index is repeated"
        _refuse(found, name, rewards_PN, num_selected)


def _refuse(found: str, name: str, rewards_PN: torch.Tensor, num_selected: int) -> NoReturn:
    num_prompts, num_rollouts = rewards_PN.shape
    raise ValueError(
        f"The selector {name!r} returned {found}. It must return an int64 tensor of shape ({num_prompts}, "
        f"{num_selected}) with distinct indices from 0 to {num_rollouts - 1} in each row."
    )
