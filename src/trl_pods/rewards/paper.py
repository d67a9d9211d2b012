"""
The two sets of rewards that the experiments of the PODS paper (https://huggingface.co/papers/2504.13818) add up.

`"single_gpu"` sums to at most 1.2, `"multi_gpu"` to at most 3.0. Layout rules and weights are those of the authors'
two programs. Answers are read by [`math_accuracy_reward`] in both, since the programs' own readings pass a wrong sign
or miss a plain number.

Example:

```python
>>> from trl_pods.rewards import PAPER_REWARDS

>>> recipe = PAPER_REWARDS["single_gpu"]
>>> [function.__name__ for function in recipe.reward_funcs]
['math_accuracy_reward', 'graded_format_reward', 'tag_count_reward']
>>> recipe.reward_weights
(1.0, 0.1, 0.1)

```
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from .accuracy import math_accuracy_reward
from .formatting import graded_format_reward, strict_format_reward, strict_tag_count_reward, tag_count_reward


@dataclass(frozen=True)
class RewardRecipe:
    """
    Reward functions and what each counts for in the sum.

    Args:
        reward_funcs (`tuple[Callable, ...]`):
            The reward functions; the trainer takes them as a list, into which it writes.
        reward_weights (`tuple[float, ...]`):
            One weight per function, for the field of the config of this name.
    """

    reward_funcs: tuple[Callable[..., list], ...]
    reward_weights: tuple[float, ...]


PAPER_REWARDS = MappingProxyType(
    {
        "single_gpu": RewardRecipe(
            reward_funcs=(math_accuracy_reward, graded_format_reward, tag_count_reward),
            reward_weights=(1.0, 0.1, 0.1),
        ),
        "multi_gpu": RewardRecipe(
            reward_funcs=(math_accuracy_reward, strict_format_reward, strict_tag_count_reward),
            reward_weights=(1.0, 1.0, 1.0),
        ),
    }
)
