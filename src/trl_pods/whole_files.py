"""Files that are written whole or not at all. Imports no torch."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """
    A block that writes a file so that whoever is killed meanwhile leaves the old one or the new one.

    Gives the path of a temporary file beside it, which takes its place at the end of the block.

    Args:
        path (`Path`):
            The file.

    Example:

    ```python
    >>> path = Path(tempfile.mkdtemp()) / "report.md"
    >>> with replacing(path) as unfinished:
    ...     _ = unfinished.write_text("# Report")
    >>> path.read_text(), len(list(path.parent.iterdir()))
    ('# Report', 1)

    ```
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    unfinished = Path(name)
    try:
        yield unfinished
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.chmod(0o644)  # a temporary file is for its owner alone
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_text(text: str, path: Path) -> None:
    """
    Write a text file whole or not at all, see [`replacing`].

    Args:
        text (`str`):
            What to write.
        path (`Path`):
            The file.
    """
    with replacing(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
