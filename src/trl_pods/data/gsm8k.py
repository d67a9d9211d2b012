"""GSM8K, grade-school word problems with an integer answer, and GSM8K-Platinum, its revised test set."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from .files import read_rows
from .prompts import SYSTEM_PROMPT, make_messages


# Of each split: the hub's repository, its name there, and where the files lie in a folder.
_SOURCES = {
    "train": ("openai/gsm8k", "train", ("train.jsonl", "gsm8k/main/train-*.parquet")),
    "test": ("openai/gsm8k", "test", ("test.jsonl", "gsm8k/main/test-*.parquet")),
    "platinum": ("madrylab/gsm8k-platinum", "test", ("platinum.jsonl", "gsm8k-platinum/main/test-*.parquet")),
}
SPLITS = tuple(_SOURCES)


def load_gsm8k(
    split: str = "train",
    data_dir: str | Path | None = None,
    system_prompt: str | None = SYSTEM_PROMPT,
) -> Dataset:
    r"""
    GSM8K as conversational prompts with their gold answers.

    Args:
        split (`str`, *optional*, defaults to `"train"`):
            `"train"`, `"test"`, or `"platinum"` for GSM8K-Platinum, the test set with its errors mended.
        data_dir (`str` or `Path`, *optional*):
            Folder with `train.jsonl`, `test.jsonl` and `platinum.jsonl`, one object with the fields `question` and
            `answer` per line, or with the hub's repositories under their names (`gsm8k/main/train-*.parquet`,
            `gsm8k-platinum/main/test-*.parquet`). If `None`, the data come from the hub (`openai/gsm8k` and
            `madrylab/gsm8k-platinum`, config `main`).
        system_prompt (`str`, *optional*, defaults to `SYSTEM_PROMPT`):
            System message before each question. `None` leaves it out.

    Returns:
        `Dataset`: With the columns `prompt` (messages) and `solution` (the number after the last `####` of the
        reference answer, without commas).

    Raises:
        `ValueError`: If there is no such split, no such file, or a row without a gold answer.

    Example:

    ```python
    >>> import json, tempfile
    >>> from pathlib import Path
    >>> from trl_pods.data import load_gsm8k

    >>> folder = Path(tempfile.mkdtemp())
    >>> row = {"question": "What is 600 + 400?", "answer": "Add them up.\n#### 1,000"}
    >>> _ = (folder / "test.jsonl").write_text(json.dumps(row))
    >>> load_gsm8k("test", data_dir=folder, system_prompt=None)[0]
    {'prompt': [{'role': 'user', 'content': 'What is 600 + 400?'}], 'solution': '1000'}

    ```
    """
    if split not in _SOURCES:
        raise ValueError(f"GSM8K has no split {split!r}; choose one of {', '.join(map(repr, SPLITS))}.")
    rows = _rows(split, data_dir)
    return Dataset.from_list([_to_example(index, row, system_prompt) for index, row in enumerate(rows)])


def _rows(split: str, data_dir: str | Path | None) -> Iterable[Mapping[str, Any]]:
    repository, hub_split, patterns = _SOURCES[split]
    if data_dir is None:
        return load_dataset(repository, "main", split=hub_split)
    return read_rows(data_dir, *patterns)


def _to_example(index: int, row: Mapping[str, Any], system_prompt: str | None) -> dict[str, Any]:
    return {"prompt": make_messages(row["question"], system_prompt), "solution": _gold(index, row["answer"])}


def _gold(index: int, answer: str) -> str:
    _, mark, number = answer.rpartition("####")
    gold = number.replace(",", "").strip()
    if not mark or not gold:
        raise ValueError(f"Row {index} has no gold answer: its answer needs '####' and a number. It is {answer!r}.")
    return gold
