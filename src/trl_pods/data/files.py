"""Rows of a data set from files on disk."""

import json
from pathlib import Path
from typing import Any


def read_rows(data_dir: str | Path, *patterns: str) -> list[dict[str, Any]]:
    """
    Rows of the files that a data set has in a folder.

    Args:
        data_dir (`str` or `Path`):
            The folder.
        *patterns (`str`):
            Where the files may lie in it, JSON lines or Parquet. The first pattern that matches any file counts.

    Returns:
        `list[dict[str, Any]]`: their rows, file by file in the order of their names.

    Raises:
        ValueError: If no pattern matches.

    Example:

    ```python
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "test.jsonl").write_text('{"question": "?"}')
    >>> read_rows(folder, "gsm8k/main/test-*.parquet", "test.jsonl")
    [{'question': '?'}]

    ```
    """
    for pattern in patterns:
        paths = sorted(Path(data_dir).glob(pattern))
        if paths:
            return [row for path in paths for row in _read(path)]
    places = " or ".join(str(Path(data_dir) / pattern) for pattern in patterns)
    raise ValueError(
        f"There is no file {places}. `data_dir` has to name a folder with it; leave it at `None` to load from the hub."
    )


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(path).to_pylist()
    # Not str.splitlines: a JSON string may hold other line separators.
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
