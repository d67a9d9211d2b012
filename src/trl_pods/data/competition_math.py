"""MATH, competition problems with an expression as answer, and MATH-500, the part of its test set in common use."""

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from ..rewards.math_answers import last_box
from .files import read_rows
from .prompts import EXPRESSION_SYSTEM_PROMPT, drop_long_prompts, make_messages


logger = logging.getLogger(__name__)

SPLITS = ("train", "test", "math_500")
SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)
_FRAME = re.compile(r"\\fbox(?=\s*\{)")
# A few solutions box a single symbol without braces; it ends with the formula.
_BARE_BOX = re.compile(r"\\boxed\s*([^\s{$][^$\n]*)")


def load_math(
    split: str = "train",
    data_dir: str | Path | None = None,
    system_prompt: str | None = EXPRESSION_SYSTEM_PROMPT,
    max_prompt_tokens: int | None = None,
    tokenizer: str | None = None,
) -> Dataset:
    r"""
    MATH as conversational prompts with their gold answers.

    Args:
        split (`str`, *optional*, defaults to `"train"`):
            `"train"` (7,500 problems), `"test"` (5,000), or `"math_500"`, 500 problems of the test split.
        data_dir (`str` or `Path`, *optional*):
            Folder with the hub's repositories under their names: `hendrycks_math/<subject>/train-*.parquet` for each
            of the seven subjects, `MATH-500/test.jsonl`. If `None`, the data come from the hub
            (`EleutherAI/hendrycks_math` and `HuggingFaceH4/MATH-500`).
        system_prompt (`str`, *optional*, defaults to `EXPRESSION_SYSTEM_PROMPT`):
            System message before each problem. `None` leaves it out.
        max_prompt_tokens (`int`, *optional*):
            Leave out problems whose prompt is longer.
        tokenizer (`str`, *optional*):
            Folder or repository of the tokenizer that counts them.

    Returns:
        `Dataset`: With the columns `prompt` (messages) and `solution`: of MATH what the last box of the reference
        solution holds, of MATH-500 its answer. Problems without one are left out, with a warning.

    Raises:
        `ValueError`: If there is no such split, no such file, or no problem is left.

    Example:

    ```python
    >>> import json, tempfile
    >>> from pathlib import Path
    >>> from trl_pods.data import load_math

    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "MATH-500").mkdir()
    >>> row = {"problem": "What is half of 3?", "solution": "It is $\\boxed{\\frac{3}{2}}$.", "answer": "\\frac{3}{2}"}
    >>> _ = (folder / "MATH-500" / "test.jsonl").write_text(json.dumps(row))
    >>> load_math("math_500", data_dir=folder, system_prompt=None)[0]
    {'prompt': [{'role': 'user', 'content': 'What is half of 3?'}], 'solution': '\\frac{3}{2}'}

    ```
    """
    if split not in SPLITS:
        raise ValueError(f"MATH has no split {split!r}; choose one of {', '.join(map(repr, SPLITS))}.")
    rows = list(_math_500_rows(data_dir) if split == "math_500" else _rows(split, data_dir))
    golds = [row["answer"].strip() if split == "math_500" else _gold(row["solution"]) for row in rows]
    examples = [
        {"prompt": make_messages(row["problem"], system_prompt), "solution": gold}
        for row, gold in zip(rows, golds, strict=True)
        if gold
    ]
    _report_missing(golds)
    return drop_long_prompts(Dataset.from_list(examples), max_prompt_tokens, tokenizer)


def _rows(split: str, data_dir: str | Path | None) -> Iterable[Mapping[str, Any]]:
    for subject in SUBJECTS:
        if data_dir is None:
            yield from load_dataset("EleutherAI/hendrycks_math", subject, split=split)
        else:
            yield from read_rows(data_dir, f"hendrycks_math/{subject}/{split}-*.parquet")


def _math_500_rows(data_dir: str | Path | None) -> Iterable[Mapping[str, Any]]:
    if data_dir is None:
        return load_dataset("HuggingFaceH4/MATH-500", split="test")
    return read_rows(data_dir, "MATH-500/test.jsonl")


def _gold(solution: str) -> str:
    """What the last box of a reference solution holds, `""` without one."""
    solution = _FRAME.sub(r"\\boxed", solution)
    # From the last box on: where that one is not closed, an earlier one holds something else.
    end = solution[max(solution.rfind(r"\boxed"), 0) :]
    bare = _BARE_BOX.match(end)
    return bare[1].strip(" .,") if bare else (last_box(end) or "").strip()


def _report_missing(golds: list[str]) -> None:
    missing = [index for index, gold in enumerate(golds) if not gold]
    if len(missing) == len(golds):
        raise ValueError("No row of MATH has a gold answer: a solution needs a closed \\boxed{...}.")
    if missing:
        logger.warning(
            "%d problems without a gold answer are left out, the first is row %d.", len(missing), missing[0]
        )
