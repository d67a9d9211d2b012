"""The accuracy reward."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from .completions import Completion, completion_text
from .math_answers import answer_words, extract_answer, gold_words, is_plainly_correct, read_answer
from .worker_pool import map_distinct


def math_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str | None],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that checks whether a completion gives the right answer.

    The answer is the content of the last complete `<answer>` tag; without one, the last `\boxed{...}`; without either,
    the last number. The first of these that is there is judged alone. It is read as a person would read it (units,
    currency, thousands separators and words around it do not matter) and compared by math-verify. Correctness is part
    of the rewards of the PODS paper (https://huggingface.co/papers/2504.13818); the authors' two programs read answers
    in two other ways, one of which misses plain numbers and the other the sign.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or as chat messages.
        solution (`list[str]`):
            Gold answer of each completion, a number or a mathematical expression. Words count only where they are
            set as `\text{...}`, as in MATH, and then as they stand.
        log_extra (`callable`, *optional*):
            Receives the columns `"extracted_answer"` and `"solution"` for the completions table. The trainer provides
            it.
        **kwargs:
            Other columns of the data set and what else the trainer passes. Not used.

    Returns:
        `list[float | None]`: 1.0 for a right answer, 0.0 for any other, `None` where the gold cannot be read.

    Raises:
        `ValueError`: If there are not as many golds as completions.

    Example:

    ```python
    >>> from trl_pods.rewards import math_accuracy_reward

    >>> completions = ["<answer>18 dollars</answer>", r"\boxed{-18}", "it is 18, ok.", "no idea"]
    >>> math_accuracy_reward(completions, ["18", "18", "18", "Paris"])
    [1.0, 0.0, 1.0, None]

    ```
    """
    answers = [extract_answer(completion_text(completion)) for completion in completions]
    golds = ["" if gold is None else str(gold) for gold in solution]
    pairs = list(zip(golds, answers, strict=True))
    judged = _judge(list(dict.fromkeys(pairs)))
    if log_extra is not None:
        log_extra("extracted_answer", answers)
        log_extra("solution", list(solution))
    return [judged[pair] for pair in pairs]


def _judge(pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float | None]:
    """Rewards of answers by their golds. What is not decided by a glance at numbers and text goes to the workers."""
    read = cache(read_answer)
    unread = [(gold,) for gold, _ in pairs if read(gold).number is None]
    can_read = map_distinct("can_read", unread, if_ended=False)
    judged: dict[tuple[str, str], float | None] = {}
    hard = []
    for gold, answer in pairs:
        if can_read.get((gold,), True):
            is_right = is_plainly_correct(read(gold), read(answer))
            if is_right is None:
                hard.append((gold, answer))
            else:
                judged[gold, answer] = float(is_right)
        else:
            judged[gold, answer] = _compare_words(gold, answer)
    return judged | map_distinct("judge_reading", hard, if_ended=0.0)


def _compare_words(gold: str, answer: str) -> float | None:
    words = gold_words(gold)
    return None if words is None else float(words == answer_words(answer))
