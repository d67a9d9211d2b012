"""Reward functions for mathematics and multiple choice, with a `<think>` and an `<answer>` block."""

from .accuracy import math_accuracy_reward
from .fast_accuracy import fast_accuracy_reward
from .formatting import graded_format_reward, strict_format_reward, strict_tag_count_reward, tag_count_reward
from .multiple_choice import multiple_choice_reward
from .paper import PAPER_REWARDS, RewardRecipe


__all__ = [
    "PAPER_REWARDS",
    "RewardRecipe",
    "fast_accuracy_reward",
    "graded_format_reward",
    "math_accuracy_reward",
    "multiple_choice_reward",
    "strict_format_reward",
    "strict_tag_count_reward",
    "tag_count_reward",
]
