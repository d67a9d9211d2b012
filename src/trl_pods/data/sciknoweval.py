"""SciKnowEval, questions about science in five levels; of these the multiple-choice ones, chemistry by default."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset
from huggingface_hub import hf_hub_download

from .files import read_rows
from .prompts import CHOICE_SYSTEM_PROMPT, drop_long_prompts, make_messages


logger = logging.getLogger(__name__)

SPLITS = ("train", "test")
DOMAINS = ("Biology", "Chemistry", "Material", "Physics")
LEVELS = ("L1", "L2", "L3", "L4", "L5")
_REPOSITORY = "hicai-zju/SciKnowEval"
_REVISION = "92ef969ad0a8bd6e195e0ac18af2c46e307e0cc2"
_FILE = "data/v2/sciknoweval_test_v2.jsonl"
_ONE_IN = 5


def load_sciknoweval(
    split: str = "train",
    data_dir: str | Path | None = None,
    system_prompt: str | None = CHOICE_SYSTEM_PROMPT,
    domain: str = "Chemistry",
    level: str = "L3",
    max_prompt_tokens: int | None = None,
    tokenizer: str | None = None,
) -> Dataset:
    r"""
    Multiple-choice questions of SciKnowEval as conversational prompts with the letter of the right option.

    The published data are one test set. It is divided here by a hash of the question: about a fifth is the test split,
    whatever the order of the rows, and the same question with other options stays on one side.

    Args:
        split (`str`, *optional*, defaults to `"train"`):
            `"train"` or `"test"`.
        data_dir (`str` or `Path`, *optional*):
            Folder with the hub's repository under its name, `SciKnowEval/data/v2/sciknoweval_test_v2.jsonl`. If
            `None`, that file comes from the hub (`hicai-zju/SciKnowEval`).
        system_prompt (`str`, *optional*, defaults to `CHOICE_SYSTEM_PROMPT`):
            System message before each question, in place of the instruction of the row, which asks for an answer
            without reasoning. `None` leaves it out.
        domain (`str`, *optional*, defaults to `"Chemistry"`):
            `"Biology"`, `"Chemistry"`, `"Material"` or `"Physics"`.
        level (`str`, *optional*, defaults to `"L3"`):
            `"L1"` to `"L5"`; the third is reasoning.
        max_prompt_tokens (`int`, *optional*):
            Leave out questions whose prompt is longer.
        tokenizer (`str`, *optional*):
            Folder or repository of the tokenizer that counts them.

    Returns:
        `Dataset`: With the columns `prompt` (messages) and `solution` (a letter), in a fixed mixed order. Questions
        whose options, letters and key do not fit together are left out, with a warning.

    Raises:
        `ValueError`: If there is no such split, domain, level or file, or no question is left.

    Example:

    ```python
    >>> import json, tempfile
    >>> from pathlib import Path
    >>> from trl_pods.data import load_sciknoweval

    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "SciKnowEval" / "data" / "v2").mkdir(parents=True)
    >>> row = {"question": "Which of these is a salt?", "choices": {"text": ["NaCl", "H2O"], "label": ["A", "B"]}}
    >>> row |= {"answerKey": "A", "type": "mcq-2-choices", "domain": "Chemistry", "details": {"level": "L3"}}
    >>> _ = (folder / "SciKnowEval/data/v2/sciknoweval_test_v2.jsonl").write_text(json.dumps(row))
    >>> load_sciknoweval("train", data_dir=folder, system_prompt=None)[0]
    {'prompt': [{'role': 'user', 'content': 'Which of these is a salt?\n\nA. NaCl\nB. H2O'}], 'solution': 'A'}

    ```
    """
    for name, value, choices in (("split", split, SPLITS), ("domain", domain, DOMAINS), ("level", level, LEVELS)):
        if value not in choices:
            raise ValueError(f"SciKnowEval has no {name} {value!r}; choose one of {', '.join(map(repr, choices))}.")
    asked = [row for row in _rows(data_dir) if _is_asked_for(row, domain, level)]
    usable = [row for row in asked if _is_consistent(row)]
    if len(usable) < len(asked):
        logger.warning("%d questions with unfit options are left out.", len(asked) - len(usable))
    chosen = sorted((row for row in usable if _split_of(row) == split), key=_digest)
    if not chosen:
        raise ValueError(f"SciKnowEval has no multiple-choice question in {domain!r} at {level!r} for {split!r}.")
    examples = [
        {"prompt": make_messages(_with_options(row), system_prompt), "solution": row["answerKey"].strip()}
        for row in chosen
    ]
    return drop_long_prompts(Dataset.from_list(examples), max_prompt_tokens, tokenizer)


def _rows(data_dir: str | Path | None) -> list[dict[str, Any]]:
    if data_dir is not None:
        return read_rows(data_dir, f"SciKnowEval/{_FILE}")
    path = Path(hf_hub_download(_REPOSITORY, _FILE, repo_type="dataset", revision=_REVISION))
    return read_rows(path.parent, path.name)


def _is_asked_for(row: Mapping[str, Any], domain: str, level: str) -> bool:
    return row["type"].startswith("mcq") and row["domain"] == domain and row["details"]["level"] == level


def _is_consistent(row: Mapping[str, Any]) -> bool:
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    return len(labels) == len(texts) == len(set(labels)) and row["answerKey"].strip() in labels


def _digest(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(" ".join(row["question"].split()).encode()).hexdigest()


def _split_of(row: Mapping[str, Any]) -> str:
    # The last digits: the first ones set the order.
    return "test" if int(_digest(row)[-8:], 16) % _ONE_IN == 0 else "train"


def _with_options(row: Mapping[str, Any]) -> str:
    options = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
    return "\n".join([row["question"].strip(), "", *(f"{label}. {text}" for label, text in options)])
