"""TRL's accuracy reward, several times faster."""

from collections.abc import Callable, Sequence
from typing import Any

from .worker_pool import map_distinct


# Reward and log entry of an answer
_Verdict = tuple[float | None, str]

_UNREADABLE = "[unparseable]"
_NOT_AN_ANSWER: _Verdict = (0.0, _UNREADABLE)
_TOOK_TOO_LONG: _Verdict = (0.0, "[took too long]")
_NOT_JUDGED: _Verdict = (None, "[skipped]")


def fast_accuracy_reward(
    completions: Sequence[Sequence[dict[str, str]]],
    solution: Sequence[str],
    log_extra: Callable[[str, list], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""
    Reward function that gives what `trl.rewards.accuracy_reward` gives, several times faster.

    What math-verify finds in a completion decides its reward: equal finds are judged once for a gold, integers and
    fractions by their value. Searching and judging are spread over worker processes, which are kept for later calls.
    The limits of time are TRL's (10 s for reading a text, 5 s for a comparison), but hold in any thread and also for
    what TRL's cannot interrupt. An answer that takes longer is wrong, a gold unreadable.

    Args:
        completions (`list[list[dict[str, str]]]`):
            Completions as chat messages, of which the content of the first is judged.
        solution (`list[str]`):
            Gold answer of each completion, as text that math-verify reads, say in dollars.
        log_extra (`callable`, *optional*):
            Receives the columns `"solution"`, `"gold_parsed"` and `"answer_parsed"` for the completions table. The
            trainer provides it.
        **kwargs:
            Other columns of the data set and what else the trainer passes. Not used.

    Returns:
        `list[float | None]`: 1.0 for a right answer, 0.0 for any other, `None` where the gold cannot be read.

    Raises:
        `ValueError`: If there are not as many golds as completions.

    Example:

    ```python
    >>> from trl_pods.rewards import fast_accuracy_reward

    >>> completions = [[{"content": r"It is \boxed{\frac{1}{2}}"}], [{"content": r"\boxed{2}"}], [{"content": "3"}]]
    >>> fast_accuracy_reward(completions, ["$0.5$", "$0.5$", "no number"])
    [1.0, 0.0, None]

    ```
    """
    contents = [completion[0]["content"] for completion in completions]
    pairs = [(gold, content) for content, gold in zip(contents, solution, strict=True)]
    # What is not text math-verify reads as nothing.
    golds = map_distinct("read_gold", [(gold,) for gold in solution if isinstance(gold, str)], if_ended=None)
    readings = [golds.get((gold,)) if isinstance(gold, str) else None for gold in solution]
    verdicts_of_readable = iter(_judge([(*pair, gold[1]) for pair, gold in zip(pairs, readings, strict=True) if gold]))
    verdicts = [next(verdicts_of_readable) if gold else _NOT_JUDGED for gold in readings]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [gold[0] if gold else _UNREADABLE for gold in readings])
        log_extra("answer_parsed", [text for _, text in verdicts])
    return [reward for reward, _ in verdicts]


def _judge(cases: Sequence[tuple[str, Any, str | None]]) -> list[_Verdict]:
    """Verdict on each (gold, completion, exact value of the gold), of golds that can be read."""
    texts = [(content,) for _, content, _ in cases if isinstance(content, str)]
    readings = map_distinct("read_answer", texts, if_ended=None)
    examples: dict[tuple[str, str], tuple[str, str]] = {}
    judged: list[_Verdict | tuple[str, str]] = []
    for gold, content, gold_value in cases:
        reading = readings.get((content,)) if isinstance(content, str) else None
        if reading is None:
            judged.append(_NOT_AN_ANSWER)
            continue
        key, value, text = reading
        if gold_value is not None and value is not None:
            judged.append((float(gold_value == value), text))
        else:
            # One text stands for all that are read alike.
            judged.append(examples.setdefault((gold, key), (gold, content)))
    verdicts = map_distinct("judge", examples.values(), if_ended=_TOOK_TOO_LONG)
    return [tuple(verdicts.get(each, each)) for each in judged]
