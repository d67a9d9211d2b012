"""
The embedded task: sums of two two-digit numbers, and a tiny policy that gets few of them right.

It needs no download, and a policy with 0.1 million parameters learns it in minutes on two CPU cores. Prompts are plain
text such as `"27+58="`; the answer is the sum, digit by digit.
"""

import random
from pathlib import Path
from typing import Any

from datasets import Dataset


# Unordered pairs of summands set aside for the test split, so that 58+27 is not trained on where 27+58 is asked.
_NUM_TEST_PAIRS = 500
_SPLIT_SEED = 20250418


def load_addition(split: str = "train") -> Dataset:
    """
    Problems `a+b=` with 10 <= a, b <= 99.

    The splits share no pair of summands, in either order.

    Args:
        split (`str`, *optional*, defaults to `"train"`):
            `"train"` (about 7,100 problems) or `"test"` (about 1,000), in a fixed shuffled order.

    Returns:
        [`~datasets.Dataset`]: columns `prompt` (`str`) and `solution` (`str`).

    Raises:
        ValueError: If the split is unknown.

    Example:

    ```python
    >>> problems = load_addition("test")
    >>> problems.column_names, problems[0]["prompt"][-1]
    (['prompt', 'solution'], '=')

    ```
    """
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} is unknown. Use 'train' or 'test'.")
    shuffle = random.Random(_SPLIT_SEED).shuffle
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    shuffle(pairs)
    pairs = pairs[:_NUM_TEST_PAIRS] if split == "test" else pairs[_NUM_TEST_PAIRS:]
    problems = sorted({problem for a, b in pairs for problem in ((a, b), (b, a))})
    shuffle(problems)
    return Dataset.from_dict(
        {"prompt": [f"{a}+{b}=" for a, b in problems], "solution": [str(a + b) for a, b in problems]}
    )


def addition_reward(completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
    """
    1 for exactly the right digits, else 0.

    Args:
        completions (`list[str]`):
            What the policy wrote after the equals sign.
        solution (`list[str]`):
            The sums.
        **kwargs:
            Further columns and arguments of the trainer, unused.

    Returns:
        `list[float]`: one reward per completion.

    Example:

    ```python
    >>> addition_reward(["85", "95"], ["85", "85"])
    [1.0, 0.0]

    ```
    """
    return [float(completion.strip() == sum_) for completion, sum_ in zip(completions, solution, strict=True)]


def embedded_policy_path() -> Path:
    """
    Folder of the policy that ships with the package, made by `python -m trl_pods.scripts.make_addition_policy`.

    Example:

    ```python
    >>> (embedded_policy_path() / "config.json").is_file()
    True

    ```
    """
    return Path(__file__).parent / "addition_policy"
