r"""
Numbers that are written out: integers, decimals, fractions, mixed numbers and percentages, kept exact.

Text comes in as [`~trl_pods.rewards.math_answers.clean`] leaves it: ASCII signs, `,` as the only thousands separator,
`%` as the only percent sign, no currency. No parser is needed, so that the many plain answers of a step cost little.
"""

import re
from dataclasses import dataclass
from fractions import Fraction


_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?![A-Za-z0-9]))?)"
_RATIO = rf"{_DECIMAL}(?:(?:\s*/\s*|:){_DECIMAL})?"
_MIXED = r"[0-9]+\s+(?:and\s+)?[0-9]+\s*/\s*[0-9]+"
_FRAC_PART = r"(?:\{\s*(-?[0-9]+)\s*\}|([0-9]))"
_FRAC = re.compile(rf"\\frac\s*{_FRAC_PART}\s*{_FRAC_PART}")
_ROOT = r"(?:\\sqrt\s*(?:\{[^{}]*\}|[0-9])|\\pi(?![A-Za-z]))"
_POWER = r"\s*\^\s*(?:\{[^{}]*\}|-?[0-9]+)"

# Digits that are part of a name (H2O), an index, an exponent or a denominator do not stand for themselves.
_STANDS_ALONE = r"(?<![A-Za-z0-9^_{/])(?<![0-9]\.)"
_FRAC_TOKEN = r"\\frac\s*(?:\{\s*-?[0-9]+\s*\}|[0-9])\s*(?:\{\s*-?[0-9]+\s*\}|[0-9])"
_TOKEN = re.compile(
    rf"{_STANDS_ALONE}"
    rf"(?:(?:(?:[0-9]+\s*)?{_FRAC_TOKEN}|{_MIXED}|{_RATIO})(?:\s*{_ROOT}|{_POWER})*|{_ROOT}+)(?:\s*/\s*[0-9]+)?(?:\s*%)?"
)

# A single letter straight after a number is taken for a unit only if it is one of these; others are variables.
_LETTER_UNIT = r"\s*[mglLhs](?:\s*/\s*[hs])?(?:\s*\^\s*\{?\s*-?[23]\s*\}?)?"
_PLAIN = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>[0-9]+)\s+(?:and\s+)?(?=[0-9]+\s*/))?"
    rf"(?P<top>-?{_DECIMAL})(?:\s*[/:]\s*(?P<bottom>-?{_DECIMAL}))?\s*(?P<percent>%)?(?:{_LETTER_UNIT})?"
)
_SPACED_THOUSANDS = re.compile(r"[-+]?[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?")

# Where a spaced minus is a sign and not a dash, a bullet or a subtraction.
_SIGN_MAY_FOLLOW = ("=", "(", "[", ":", ",")

# Python refuses to read integers much longer than this, and no answer is.
_MAX_CHARS = 1000


@dataclass(frozen=True)
class PlainNumber:
    r"""
    A number as it was written.

    Args:
        value (`Fraction`):
            Its value; of `50%` this is 50.
        is_percent (`bool`):
            Whether a percent sign followed.
        is_decimal (`bool`):
            Whether it had a decimal point, and so may be a rounded value.
        latex (`str`):
            The same number for a LaTeX parser.
    """

    value: Fraction
    is_percent: bool
    is_decimal: bool
    latex: str


def read_number(text: str) -> PlainNumber | None:
    r"""
    Number that the whole of `text` stands for, or `None`.

    Example:

    ```python
    >>> read_number("2 1/2").value
    Fraction(5, 2)
    >>> read_number(r"-\frac{1}{2}").value
    Fraction(-1, 2)
    >>> read_number("17 or 18") is None
    True

    ```
    """
    text = _FRAC.sub(_with_slash, text).rstrip("!").strip()
    # In brackets a comma separates coordinates.
    if "," not in text:
        text = text.strip("()[]{} ")
    if len(text) > _MAX_CHARS:
        return None
    if _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    match = _PLAIN.fullmatch(text)
    return _from_match(match) if match else None


def last_number(text: str) -> str | None:
    r"""
    Last number written in `text`, with its sign, or `None`.

    A fraction, a mixed number, a ratio, a root and a power are one number each. A minus between two quantities is a
    subtraction, not a sign.

    Example:

    ```python
    >>> last_number("she has 10-5")
    '5'
    >>> last_number("so x = -5")
    '-5'
    >>> last_number("it takes 1/2 of 7 m^2")
    '7'

    ```
    """
    tokens = list(_TOKEN.finditer(text))
    if not tokens:
        return None
    last = tokens[-1]
    return ("-" if _is_negative(text[: last.start()]) else "") + last.group().strip()


def same_number(gold: PlainNumber, answer: PlainNumber) -> bool:
    """
    Whether two numbers are the same.

    A percentage is read as its number or as its hundredth when the other one is none: 50% is 50 and is 0.5. A decimal
    may be rounded: it needs to agree to six places, as in math-verify, with a digit left to compare.

    Example:

    ```python
    >>> same_number(read_number("0.5"), read_number("50%"))
    True
    >>> same_number(read_number("50"), read_number("0.5"))
    False

    ```
    """
    may_be_rounded = gold.is_decimal or answer.is_decimal
    return any(
        left == right or (may_be_rounded and round(left, 6) == round(right, 6) != 0)
        for left in _values(gold, answer)
        for right in _values(answer, gold)
    )


def _values(number: PlainNumber, other: PlainNumber) -> tuple[Fraction, ...]:
    if number.is_percent and not other.is_percent:
        return number.value, number.value / 100
    return (number.value,)


def _with_slash(frac: re.Match[str]) -> str:
    top, bottom = frac[1] or frac[2], frac[3] or frac[4]
    return f" {top}/{bottom}"


def _from_match(match: re.Match[str]) -> PlainNumber | None:
    top, bottom = _exact(match["top"]), _exact(match["bottom"] or "1")
    if bottom == 0:
        return None
    value = _exact(match["whole"] or "0") + top / bottom
    value = -value if match["sign"] == "-" else value
    is_percent = bool(match["percent"])
    is_decimal = "." in match["top"] + (match["bottom"] or "")
    latex = _latex(match, value) + (r"\%" if is_percent else "")
    return PlainNumber(value, is_percent, is_decimal, latex)


def _exact(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def _latex(match: re.Match[str], value: Fraction) -> str:
    # A decimal keeps its point: that tells math-verify that it may be rounded.
    if match["bottom"] is None and "e" not in match["top"].lower():
        return match["sign"] + match["top"].replace(",", "")
    if value.denominator == 1:
        return str(value.numerator)
    return rf"{'-' if value < 0 else ''}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _is_negative(before: str) -> bool:
    """Whether the number that follows `before` is negative."""
    if not before.rstrip().endswith("-"):
        return False
    operand = before.rstrip()[:-1]
    if not before.endswith("-"):
        return operand.rstrip().endswith(_SIGN_MAY_FOLLOW)
    return re.search(r"[A-Za-z0-9)\]}%-]$|[0-9)\]}%]\s+$", operand) is None
