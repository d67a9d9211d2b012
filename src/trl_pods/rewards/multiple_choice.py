"""The accuracy reward for multiple-choice questions."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from .completions import Completion, completion_text
from .math_answers import marked_answer


_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)(?=\s*\{)|[*_`$\"{}]")
_LETTER = re.compile(r"[(\[]?\s*([A-Za-z])\s*[)\]]?[.:,]?")
_LETTER_AND_OPTION = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s.*", re.DOTALL)
# A letter that a word announces. A lone A before a word in small letters is an article.
_ANNOUNCED = re.compile(r"(?i:\b(?:answer(?:\s+is)?\s*:?|option|choice))\s*[(\[]?([A-Z])(?![\w'])(?!(?<=A)\s+[a-z])")


def multiple_choice_reward(
    completions: Sequence[Completion],
    solution: Sequence[str | None],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that checks by direct match whether a completion names the right option.

    The answer is the content of the last complete `<answer>` tag; without one, the last `\boxed{...}`. It has to be a
    letter: alone, with its option after it (`B. water`), or announced (`the answer is B`). Without either, it is the
    last letter that the text announces, or a letter alone on the last line. Two letters are no answer, and neither is
    the text of an option.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or as chat messages.
        solution (`list[str]`):
            Letter of the right option for each completion.
        log_extra (`callable`, *optional*):
            Receives the columns `"extracted_answer"` and `"solution"` for the completions table. The trainer provides
            it.
        **kwargs:
            Other columns of the data set and what else the trainer passes. Not used.

    Returns:
        `list[float | None]`: 1.0 for the right letter, 0.0 for any other or none, `None` where the gold is no letter.

    Raises:
        `ValueError`: If there are not as many golds as completions.

    Example:

    ```python
    >>> from trl_pods.rewards import multiple_choice_reward

    >>> completions = ["<answer>\nB\n</answer>", "A is wrong. The answer is (B).", "<answer>A or B</answer>", "B"]
    >>> multiple_choice_reward(completions, ["B", "B", "B", "water"])
    [1.0, 1.0, 0.0, None]

    ```
    """
    answers = [read_choice(completion_text(completion)) for completion in completions]
    rewards = [_score(gold, answer) for gold, answer in zip(solution, answers, strict=True)]
    if log_extra is not None:
        log_extra("extracted_answer", answers)
        log_extra("solution", list(solution))
    return rewards


def read_choice(text: str) -> str:
    r"""
    Letter of the option that a completion settles on, `""` if it names none.

    Example:

    ```python
    >>> read_choice(r"so it is \boxed{\text{(C)}}"), read_choice("<answer>D: methane</answer>"), read_choice("A bond")
    ('C', 'D', '')

    ```
    """
    marked = marked_answer(text)
    if marked is None:
        return _last_announced(_MARKUP.sub("", text).strip())
    marked = _MARKUP.sub("", marked).strip()
    if match := _LETTER.fullmatch(marked):
        return match[1].upper()
    if match := _LETTER_AND_OPTION.fullmatch(marked):
        return match[1] or match[2]
    announced = set(_ANNOUNCED.findall(marked))
    return announced.pop() if len(announced) == 1 else ""


def _last_announced(text: str) -> str:
    last_line = text.rpartition("\n")[2].strip()
    if match := _LETTER.fullmatch(last_line):
        return match[1].upper()
    announced = _ANNOUNCED.findall(text)
    return announced[-1] if announced else ""


def _score(gold: str | None, answer: str) -> float | None:
    match = _LETTER.fullmatch(str(gold or "").strip())
    return float(match[1].upper() == answer) if match else None
