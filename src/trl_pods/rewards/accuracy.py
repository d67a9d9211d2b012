"""The accuracy reward."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from .completions import Completion, completion_text
from .math_answers import answer_words, extract_answer, gold_words, is_correct, read_answer


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
    judge = _judge_of_one_call()
    rewards = [judge(gold, answer) for gold, answer in zip(solution, answers, strict=True)]
    if log_extra is not None:
        log_extra("extracted_answer", answers)
        log_extra("solution", list(solution))
    return rewards


def _judge_of_one_call() -> Callable[[str | None, str], float | None]:
    # The rollouts of a prompt share their gold and often their answers. The caches go with the call that made them.
    read = cache(read_answer)

    @cache
    def judge(gold: str | None, answer: str) -> float | None:
        gold = "" if gold is None else str(gold)
        reference = read(gold)
        if reference.is_readable:
            return float(is_correct(reference, read(answer)))
        words = gold_words(gold)
        return None if words is None else float(words == answer_words(answer))

    return judge
