"""GSM8K, grade-school word problems with an integer answer."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset


SPLITS = ("train", "test")

# Each tag on a line of its own: that layout earns the full reward under both sets of format rules.
SYSTEM_PROMPT = """\
You solve mathematics problems. Work through the problem step by step and check your steps before you settle on a \
result. Then give the result alone, as a number. Use exactly this layout, with every tag on its own line:
<think>
your reasoning
</think>
<answer>
your result
</answer>"""


def load_gsm8k(
    split: str = "train",
    data_dir: str | Path | None = None,
    system_prompt: str | None = SYSTEM_PROMPT,
) -> Dataset:
    r"""
    GSM8K as conversational prompts with their gold answers.

    Args:
        split (`str`, *optional*, defaults to `"train"`):
            `"train"` or `"test"`.
        data_dir (`str` or `Path`, *optional*):
            Folder with `train.jsonl` and `test.jsonl`, one object with the fields `question` and `answer` per line.
            If `None`, the data come from the hub (`openai/gsm8k`, config `main`).
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
    if split not in SPLITS:
        raise ValueError(f"GSM8K has no split {split!r}; choose one of {', '.join(map(repr, SPLITS))}.")
    rows = load_dataset("openai/gsm8k", "main", split=split) if data_dir is None else _read_jsonl(data_dir, split)
    return Dataset.from_list([_to_example(index, row, system_prompt) for index, row in enumerate(rows)])


def _read_jsonl(data_dir: str | Path, split: str) -> Iterable[dict[str, Any]]:
    path = Path(data_dir) / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(
            f"There is no file {path}. `data_dir` has to name a folder with {split}.jsonl in it; leave it at `None` "
            "to load GSM8K from the hub."
        )
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _to_example(index: int, row: Mapping[str, Any], system_prompt: str | None) -> dict[str, Any]:
    prompt = [{"role": "user", "content": row["question"]}]
    if system_prompt is not None:
        prompt.insert(0, {"role": "system", "content": system_prompt})
    return {"prompt": prompt, "solution": _gold(index, row["answer"])}


def _gold(index: int, answer: str) -> str:
    _, mark, number = answer.rpartition("####")
    gold = number.replace(",", "").strip()
    if not mark or not gold:
        raise ValueError(f"Row {index} has no gold answer: its answer needs '####' and a number. It is {answer!r}.")
    return gold
