"""Data sets in the columns that the trainer and the rewards read."""

from .competition_math import load_math
from .gsm8k import load_gsm8k
from .prompts import CHOICE_SYSTEM_PROMPT, EXPRESSION_SYSTEM_PROMPT, SYSTEM_PROMPT
from .sciknoweval import load_sciknoweval


__all__ = [
    "CHOICE_SYSTEM_PROMPT",
    "EXPRESSION_SYSTEM_PROMPT",
    "SYSTEM_PROMPT",
    "load_gsm8k",
    "load_math",
    "load_sciknoweval",
]
