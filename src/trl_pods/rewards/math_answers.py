r"""
Which piece of a text is its answer, how that piece reads, and whether it equals the gold.

```
completion -> extract_answer -> piece -> read_answer -> Reading --+
                                                                  +-> is_correct -> bool
gold string ------------------> piece -> read_answer -> Reading --+
```

Plain numbers are compared exactly; all else goes to math-verify, which is imported only then.
"""

import logging
import re
import threading
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .plain_numbers import PlainNumber, last_number, read_number, same_number


logger = logging.getLogger(__name__)

# Seconds for one parse and for one comparison.
_TIMEOUT_S = 3
# No expression that answers a school problem is longer; it bounds the time where no alarm can be set.
_MAX_EXPRESSION_CHARS = 300
# Of what runs on for longer only the end is searched. Models do fill their limit with one repeated character.
_MAX_PHRASE_CHARS = 1000

_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
# As in Pandoc, a dollar that opens mathematics touches its content and the closing one is not followed by a digit;
# all other dollars are money.
_FORMULA = re.compile(
    r"\$\$(?P<display>.+?)\$\$"
    r"|(?<![\\$])\$(?![\s$])(?P<inline>(?:\\.|[^$\\])+?)(?<!\s)\$(?![0-9$])"
    r"|\\\((?P<round>.+?)\\\)"
    r"|\\\[(?P<square>.+?)\\\]"
)

_CHARACTERS: dict[int, str] = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-"),
        # LaTeX's no-break space, so that one rule below finds thousands separators of both kinds.
        **dict.fromkeys("\u00a0\u2009\u202f", "~"),
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
        **dict.fromkeys("\u00b7\u22c5", r"\cdot "),
        "\u00d7": r"\times ",
        "\u00f7": "/",
        "\u2044": "/",
        "\u00b0": r"^\circ ",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u03c0": r"\pi ",
        "\u221a": r"\sqrt",
        "\u221e": r"\infty ",
        "\u2248": "=",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2019": "'",
        **{
            vulgar: " " + unicodedata.normalize("NFKC", vulgar).replace("\u2044", "/")
            for vulgar in "\u00bc\u00bd\u00be\u2153\u2154\u2155\u2156\u2157\u2158\u2159\u215a\u215b\u215c\u215d\u215e"
        },
    }
)
_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9"
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# The order matters: each rule may rely on what the ones above it have removed.
_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\!", ""),
        (r"\{,\}", ","),
        (r"(?<=[0-9])(?:\\[ ,;:]|~)(?=[0-9]{3}(?![0-9]))", ","),
        (r"(?<!\\)\\[ ,;:>]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (_TEXT.pattern, r" \1 "),
        # A box that was never closed.
        (r"\\boxed\s*\{", " "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)(?:\s*[CF]\b)?", " "),
        # A point that touches a letter ends an abbreviation or a sentence; it starts no decimal.
        (r"(?<=[^\W\d_])\.(?=[0-9])", " "),
        (r"\\approx(?![A-Za-z])", "="),
        (r"(?i)(?<=[0-9}])\s*(?:\\%|%|per ?cent(?:age)?\b|pct\b)", "%"),
        (r"(?i)(?<=[0-9])\s*thousand\b", "e3"),
        (r"(?i)(?<=[0-9])\s*million\b", "e6"),
        (r"(?i)(?<=[0-9])\s*billion\b", "e9"),
        (r"(?<!\\)\\([$])", r"\1"),
        (r"(?<!\\)\\[()\[\]]", " "),
        (rf"(?i)\b(?:minus|negative)\s+(?=[\\.0-9{_CURRENCY}])", "-"),
        (rf"([-+])[{_CURRENCY}]\s*", r"\1"),
        (rf"[{_CURRENCY}]", " "),
        (r"(?<=[\w)])\*\*(?=[\w(])", "^"),
        (r"\*\*|__|[`#\"]", " "),
        (r"(?<=[0-9])\s*x\s*(?=[0-9])", r" \\times "),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"\\sqrt\s*\(", "sqrt("),
        (r"\s+", " "),
    ]
]

_FUNCTIONS_AND_JOINERS = {"sin", "cos", "tan", "cot", "csc", "log", "ln", "exp", "sqrt", "and", "or"}
# Two or three letters that touch a number are a product of variables (2xy) unless listed here.
_SHORT_UNIT = re.compile(
    "mm|cm|dm|km|in|ft|yd|mi|sq|cu|mg|kg|lbs?|oz|ml|cl|dl|gal|qt|pt|sec|min|hrs?|day|am|pm|mph|kph|kmh|deg|rad"
    "|usd|eur|gbp|cad|aud|inr|rs|k?hz|kwh?|[kmgt]b|st|nd|rd|th"
)
_WORD = re.compile(
    r"(?<![A-Za-z\\'])(?<!\\begin\{)(?<!\\end\{)"
    # East Asian script has no spaces and one-letter words.
    r"(?P<word>[\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef]+|[^\W\d_]+'[^\W\d_]+|[^\W\d_]{2,}|a(?=\s+[^\W\d_]{2}))"
    r"(?P<power>\s?\^\s?\{?-?[23]\}?)?"
)
_MATHEMATICAL = re.compile(r"[0-9]|\\[A-Za-z]")
_OPERATOR = re.compile(r"[+*^=]")
_LEADING = re.compile(r"^(?:[\s,;:!?=']|\.(?![0-9])|(?:and|or)\b)+")
_TRAILING = re.compile(r"(?:[\s,;:?.=']|\\+(?=\s*$)|\b(?:and|or)(?=\s*$))+$")
_SPACED_UNIT = re.compile(r"(?<=[0-9}])\s+[mglLhs](?:\s*/\s*[hs])?(?:\s*\^\s*\{?-?[23]\}?)?$")
# A space between two digits separates two numbers.
_BLANK = re.compile(r"(?<![0-9]) | (?![0-9])")
_EQUALS = re.compile(r"(?<![<>!\\])=+")
_SEPARATOR = re.compile(r",(?![0-9]{3}(?![0-9]))|;|\b(?:and|or)\b")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
# What can keep a computer algebra system busy for ever: huge or stacked powers and factorials, large powers of sums
# with variables, calculus left undone. Such an answer counts only if it is the gold to the letter.
_RUNAWAY = re.compile(
    r"\^\s*\{?\s*-?[0-9]{5,}|\^\s*(?:\{[^{}]*|[0-9]+)\^|[0-9]{4,}\s*!|!\s*\)?\s*!"
    r"|(?<![\\A-Za-z])[A-Za-z][^()]*\)\s*\^\s*\{?\s*[0-9]{2,}|\\(?:i*int|sum|prod|lim)(?![A-Za-z])"
)


@dataclass(frozen=True)
class Reading:
    """
    What a piece of text says once words, units and notation are out of the way.

    Args:
        text (`str`):
            The mathematics in it, `""` if there is none.
        number (`PlainNumber` or `None`):
            Its value if it is a plain number.
    """

    text: str
    number: PlainNumber | None

    @cached_property
    def expression(self) -> list[Any]:
        """What math-verify makes of it; an empty list if nothing."""
        is_equation = _EQUALS.search(self.text) is not None
        return _parse(self.text if self.number is None or is_equation else self.number.latex)

    @property
    def is_readable(self) -> bool:
        return self.number is not None or bool(self.expression)


def extract_answer(text: str) -> str:
    r"""
    Piece of a completion that is judged as its answer.

    It is the content of the last complete `<answer>` tag; without such a tag the last closed `\boxed{...}`; without
    a box the last number. The first of these that is there counts alone. A box inside the tag is the tag's answer.

    Args:
        text (`str`):
            A completion.

    Returns:
        `str`: The piece, `""` if the text holds none of the three or an empty one.

    Example:

    ```python
    >>> extract_answer(r"so \boxed{17}. <answer>It is $18.</answer>")
    'It is $18.'
    >>> extract_answer(r"\boxed{\frac{1}{2}} of 7")
    '\\frac{1}{2}'
    >>> extract_answer("it is 18, ok.")
    '18'

    ```
    """
    marked = marked_answer(text)
    return _last_quantity(text) if marked is None else marked


def marked_answer(text: str) -> str | None:
    r"""
    What a completion marks as its answer: the content of the last complete `<answer>` tag, without such a tag that of
    the last closed `\boxed{...}`, `None` without either.

    Example:

    ```python
    >>> marked_answer("<answer> B </answer>"), marked_answer("18")
    ('B', None)

    ```
    """
    tags = _TAG.findall(text)
    scope = tags[-1] if tags else text
    box = last_box(scope)
    if box is not None:
        return box.strip()
    return scope.strip() if tags else None


def read_answer(piece: str) -> Reading:
    r"""
    Reading of an answer or a gold as a person would read it.

    Args:
        piece (`str`):
            A number or an expression, with or without LaTeX, units, currency and words around it. If words separate
            several numbers, the last number counts.

    Returns:
        [`Reading`]

    Example:

    ```python
    >>> read_answer("The answer is $1{,}000.").number.value
    Fraction(1000, 1)
    >>> read_answer(r"x = 2\sqrt{5}\text{ km}").text
    'x = 2\\sqrt{5}'

    ```
    """
    box = last_box(piece)
    phrase = piece if box is None else box
    text = _without_words(clean(phrase)) if len(phrase) <= _MAX_PHRASE_CHARS else None
    if text is None:
        text = _trim(clean(_last_quantity(phrase)))
    return Reading(text, read_number(text) or read_number(_right_side(text)))


def is_correct(gold: Reading, answer: Reading) -> bool:
    """
    Whether an answer equals the gold. Text that no one can read equals nothing.

    Args:
        gold ([`Reading`]):
            The reference.
        answer ([`Reading`]):
            What the completion gave.

    Returns:
        `bool`

    Example:

    ```python
    >>> is_correct(read_answer("18"), read_answer("18 km"))
    True
    >>> is_correct(read_answer("18"), read_answer("-18"))
    False

    ```
    """
    is_plain = is_plainly_correct(gold, answer)
    return _verify(gold.expression, answer.expression) if is_plain is None else gold.is_readable and is_plain


def is_plainly_correct(gold: Reading, answer: Reading) -> bool | None:
    """
    Whether an answer equals a gold that can be read, as far as numbers and text show it; `None` if they do not.

    Args:
        gold ([`Reading`]):
            The reference.
        answer ([`Reading`]):
            What the completion gave.

    Returns:
        `bool` or `None`

    Example:

    ```python
    >>> is_plainly_correct(read_answer("18"), read_answer("18 km"))
    True
    >>> is_plainly_correct(read_answer("x + 1"), read_answer("1 + x")) is None
    True

    ```
    """
    if not answer.text:
        return False
    if gold.number and answer.number and not ("=" in gold.text and "=" in answer.text):
        return same_number(gold.number, answer.number)
    if _BLANK.sub("", gold.text) == _BLANK.sub("", answer.text):
        return True
    return False if _RUNAWAY.search(answer.text) else None


def gold_words(gold: str) -> str | None:
    r"""
    Words of a gold that is set in LaTeX as nothing but text, ready to be compared, else `None`.

    Example:

    ```python
    >>> gold_words(r"\text{(Even)}"), gold_words("even")
    ('even', None)

    ```
    """
    return (answer_words(gold) or None) if _TEXT.fullmatch(gold.strip()) else None


def answer_words(piece: str) -> str:
    r"""
    An answer as bare words: no markup, brackets, full stop or capitals.

    Example:

    ```python
    >>> answer_words(r"$\text{Even}$."), answer_words("**(B)**")
    ('even', 'b')

    ```
    """
    return " ".join(_TEXT.sub(r" \1 ", piece).casefold().replace("*", "").strip(" $.,()\n").split())


def clean(text: str) -> str:
    r"""
    The same text in one notation: ASCII signs, few LaTeX commands, no currency, no emphasis.

    Example:

    ```python
    >>> clean(r"**-\$1\,000**").strip()
    '-1,000'

    ```
    """
    text = text.translate(_CHARACTERS)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def last_box(text: str) -> str | None:
    r"""
    Content of the last `\boxed{...}` that is closed, whatever braces it holds, or `None`.

    Example:

    ```python
    >>> last_box(r"\boxed{\frac{1}{2}} or \boxed{3")
    '\\frac{1}{2}'

    ```
    """
    open_braces: list[re.Match[str]] = []
    start, end = -1, -1
    for brace in _BRACE.finditer(text):
        # Escaped braces are matched only to be passed over.
        if brace.group() == "{" or brace.group().startswith(r"\boxed"):
            open_braces.append(brace)
        elif brace.group() == "}" and open_braces:
            opening = open_braces.pop()
            if opening.group() != "{" and opening.end() > start:
                start, end = opening.end(), brace.start()
    return None if start < 0 else text[start:end]


def _last_quantity(text: str) -> str:
    """Last number in a text, or the formula in which it stands."""
    for line in reversed(text.splitlines()):
        line = line[-_MAX_PHRASE_CHARS:]
        if not _has_digit(line):
            continue
        formulas = list(_FORMULA.finditer(line))
        if formulas and not _has_digit(line[formulas[-1].end() :]) and _has_digit(formulas[-1].group()):
            return str(formulas[-1][formulas[-1].lastgroup or 0]).strip()
        number = last_number(clean(line))
        if number is not None:
            return number
    return ""


def _has_digit(text: str) -> bool:
    return any(map(str.isnumeric, text))


def _without_words(text: str) -> str | None:
    """The mathematics between the words of a cleaned text; `None` if words separate several pieces of it."""
    pieces, start = [], 0
    for word in _WORD.finditer(text):
        if _is_prose(word):
            pieces.append(text[start : word.start()])
            start = word.end()
    if start == 0:
        return _trim(text)
    pieces = [piece for piece in [*pieces, text[start:]] if _MATHEMATICAL.search(piece)]
    if len(pieces) > 1:
        return None
    return _trim(pieces[0]) if pieces else ""


def _is_prose(match: re.Match[str]) -> bool:
    word = match["word"].lower()
    if word in _FUNCTIONS_AND_JOINERS:
        return False
    if len(word) == 1 or len(word) > 3 or not word.isascii() or _SHORT_UNIT.fullmatch(word):
        return True
    before, after = match.string[: match.start()][-1:], match.string[match.end("word") :][:1]
    return not (before and before in "0123456789+-*/^={}" or after and after in "+-*/^=_({")


def _trim(text: str) -> str:
    return _SPACED_UNIT.sub("", _TRAILING.sub("", _LEADING.sub("", text)))


def _right_side(text: str) -> str:
    """What a chain of equalities ends in; the whole text if it lists several."""
    sides = _EQUALS.split(text)
    return text if _SEPARATOR.search(text) else sides[-1].strip()


def _parse(text: str) -> list[Any]:
    if len(text) > _MAX_EXPRESSION_CHARS or not (_MATHEMATICAL.search(text) or _OPERATOR.search(text)):
        return []
    # math-verify adds numbers that stand side by side.
    if re.search(r"[0-9]\s+[0-9]", text):
        return []
    if not text.startswith(("(", "[", r"\{")):
        text = _THOUSANDS.sub("", text)
    # It also drops the base of 12_5; as a factor it takes part in the comparison.
    text = re.sub(r"(?<=[0-9])_\{?([0-9]+)\}?", r" b_{\1}", text)

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from math_verify.errors import TimeoutException

    # Units are dropped above; math-verify's own list would also drop variables such as the t of 2x + 3t.
    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last")
    config = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)
    try:
        return parse(
            rf"\boxed{{{text}}}",
            extraction_config=[config],
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=_timeout(),
        )
    except (Exception, TimeoutException):
        logger.debug("math-verify could not parse an answer", exc_info=True)
        return []


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        return bool(verify(gold, answer, timeout_seconds=_timeout()))
    except (Exception, TimeoutException):
        logger.debug("math-verify could not compare an answer", exc_info=True)
        return False


def _timeout() -> int | None:
    # math-verify times itself with signal.alarm, which Python allows in the main thread only.
    return _TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
