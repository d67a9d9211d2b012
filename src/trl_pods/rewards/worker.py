r"""
A process that judges answers: the far end of [`~trl_pods.rewards.worker_pool.WorkerPool`].

When it has imported what it needs it says so. Then it reads one request a line, calls the function that is named and
writes what it returns, as JSON. math-verify limits its own time by an alarm, which Python allows in the main thread
only; here all is done in it. What no alarm can interrupt (one long operation on huge integers, say) the kernel ends,
and the process with it, by a limit on the time of the processor, also when the process that asked has been killed. One
without work ends when its input does.
"""

import contextlib
import gc
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from . import shortcuts
from .math_answers import is_correct, read_answer


# Those of TRL's reward, for one text and for one comparison.
PARSING_SECONDS = 10
VERIFY_SECONDS = 5
# What an alarm can interrupt it has interrupted by then.
_GRACE = 1
# Its first line.
READY = "ready\n"

_INTEGER = r"(-?(?:0|[1-9][0-9]{0,17}))"
_EXACT = re.compile(rf"{_INTEGER}|\\frac\{{{_INTEGER}\}}\{{([1-9][0-9]{{0,17}})\}}")


def serve() -> None:
    """Answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # nothing else may write among the replies
    # Parsers and algebra make many small objects, most of which need no search for cycles to go.
    gc.set_threshold(100_000, 20, 20)
    functions: dict[str, Callable[..., Any]] = {
        "read_gold": read_gold,
        "read_answer": answer_reading,
        "judge": judge,
        "can_read": can_read,
        "judge_reading": judge_reading,
    }
    shortcuts.install()
    replies.write(READY)
    replies.flush()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            reply = {"value": functions[name](*arguments)}
        except Exception as error:
            reply = {"error": [type(error).__name__, str(error)]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def read_gold(solution: str) -> tuple[str, str | None] | None:
    """
    How TRL's accuracy reward reads a gold, for its log, and its value if it is an integer or a fraction.

    `None` if it cannot be read.
    """
    with _killed_after(PARSING_SECONDS):
        parsed = _gold(solution)
        return (str(parsed), _exact_value(parsed)) if parsed else None


def answer_reading(content: str) -> tuple[str, str | None, str | None] | None:
    r"""
    What decides how TRL's accuracy reward reads a completion: a key, which is the same for texts that are read alike.

    math-verify searches a text for LaTeX, brings what it finds into a normal form and parses that. Its own search is
    run here, and what it would parse is taken down instead. Where this is an integer or a fraction of two, its value
    and the entry in the log follow.

    `None` if nothing is found.

    Example:

    ```python
    >>> answer_reading(r"so it is \boxed{\frac{2}{4}}.")[1:]
    ('1/2', "[1/2, '\\\\frac{2}{4}']")
    >>> answer_reading(r"I think \boxed{\sqrt{2}}") == answer_reading(r"or $\boxed{\sqrt{2}}$")
    True

    ```
    """
    from math_verify import parser
    from sympy import Symbol

    found: list[str] = []

    def take_down(latex: str) -> Symbol:
        found.append(latex)
        return Symbol(f"found_{len(found)}")

    genuine = parser.parse_latex_cached
    parser.parse_latex_cached = take_down
    try:
        with _killed_after(PARSING_SECONDS):
            answer = _answer(content)
    finally:
        parser.parse_latex_cached = genuine
    if not answer:
        return None
    # Beside what is parsed, the form of the result tells apart percentages and lists.
    form = str(answer)
    number = _EXACT.fullmatch(found[0]) if found and form == f"[found_1, {found[0]!r}]" else None
    if number is None:
        return json.dumps([found, form]), None, None
    value = Fraction(int(number[1] or number[2]), int(number[3] or 1))
    return json.dumps([found, form]), str(value), f"[{value}, {found[0]!r}]"


def judge(solution: str, content: str) -> tuple[float, str]:
    """The reward that TRL's accuracy reward gives where it can read the gold, and how it reads the answer."""
    from math_verify import verify

    with _killed_after(PARSING_SECONDS):
        gold = _gold(solution)
    with _killed_after(PARSING_SECONDS):
        answer = _answer(content)
        text = str(answer) if answer else "[unparseable]"
    with _killed_after(VERIFY_SECONDS):
        return float(verify(gold, answer, timeout_seconds=VERIFY_SECONDS)), text


def can_read(gold: str) -> bool:
    """Whether `math_accuracy_reward` can read a gold."""
    with _killed_after(PARSING_SECONDS):
        return _reading(gold).is_readable


def judge_reading(gold: str, answer: str) -> float:
    """The reward of `math_accuracy_reward` for an extracted answer by a gold that it can read."""
    with _killed_after(PARSING_SECONDS):
        return float(is_correct(_reading(gold), _reading(answer)))


_reading = lru_cache(maxsize=1024)(read_answer)


@lru_cache(maxsize=1024)
def _gold(solution: str) -> list[Any]:
    from math_verify import parse

    return parse(solution, parsing_timeout=PARSING_SECONDS)


def _exact_value(parsed: list[Any]) -> str | None:
    from sympy import Rational

    is_exact = len(parsed) == 2 and isinstance(parsed[0], Rational) and isinstance(parsed[1], str)
    return str(parsed[0]) if is_exact else None


def _answer(content: str) -> list[Any]:
    from math_verify import parse

    return parse(
        content,
        extraction_config=[_extraction()],
        extraction_mode="first_match",
        parsing_timeout=PARSING_SECONDS,
    )


@cache
def _extraction() -> Any:
    """As TRL has it."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    return LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )


@contextlib.contextmanager
def _killed_after(seconds: float) -> Iterator[None]:
    """End this process if the block takes so much time of the processor."""
    signal.setitimer(signal.ITIMER_PROF, seconds + _GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
