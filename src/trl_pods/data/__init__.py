"""Data sets in the columns that the trainer and the rewards read."""

from .gsm8k import SYSTEM_PROMPT, load_gsm8k


__all__ = ["SYSTEM_PROMPT", "load_gsm8k"]
