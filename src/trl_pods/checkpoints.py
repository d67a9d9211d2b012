"""
Which checkpoints are whole, and tables that always are.

A run that is killed may leave a checkpoint of which some files are missing or cut off. While one is being saved, a
flag lies beside its folder; it goes when all processes have written. For checkpoints without a flag (saved by another
trainer, copied, half deleted) the files themselves are looked at. The death of processes is provided for, not that of
the machine, which may lose files that were closed.
"""

import json
import logging
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from transformers import trainer as transformers_trainer

from .whole_files import replacing


logger = logging.getLogger(__name__)

# With `old-` it is the former one of a step that is saved again.
_CHECKPOINT = re.compile(r"(?:old-)?checkpoint-(\d+)")

# Ends the name of a file beside a checkpoint that is being saved.
_FLAG = ".unfinished"

# A file in one that transformers is saving upon a signal (`enable_jit_checkpoint`).
_FLAG_OF_TRANSFORMERS = "checkpoint-is-incomplete.txt"

_ABSENT = "not all processes have it"

# In folders of DeepSpeed and FSDP, or in files of their own.
_WEIGHTS = r"global_step|pytorch_model_fsdp|(.*/)?(?!optimizer|training_args)[^/]*\.(safetensors|bin)$"

# What there must be, by how the names of its files begin, and of those because of which it must.
_NEEDED = (
    ("trainer_state.json", r"trainer_state\.json$", None),
    ("the weights", _WEIGHTS, None),
    # Without these transformers goes on with others, and says nothing. With `save_only_model` there are none.
    ("scheduler.pt", r"scheduler\.pt$", r"optimizer\.pt$"),
    ("optimizer.pt", r"optimizer|global_step", r"scheduler\.pt$"),
    ("rng_state.pth", r"rng_state", r"scheduler\.pt$"),
)


def checkpoint_to_resume(asked_for: str | bool | None, folder: Path) -> str | bool | None:
    """
    What to pass to [`~transformers.Trainer.train`], the same on all processes.

    Args:
        asked_for (`str`, `bool` or `None`):
            `resume_from_checkpoint` as it is given: `True` is the last whole checkpoint.
        folder (`Path`):
            Output folder of the training.

    Returns:
        `str`, `bool` or `None`: the folder of a whole checkpoint, or `asked_for` if there is nothing to look at.

    Raises:
        ValueError: If there are torn checkpoints only, or the one that is asked for is torn.
    """
    # All look and then decide alike, since processes may have disks of their own.
    if asked_for is True:
        return _last_common(folder)
    if asked_for:
        _check_whole(asked_for)
    return asked_for


def _last_common(folder: Path) -> str | bool:
    found = gather_object([_reasons(folder)])
    if not any(found):
        return True
    last = _last_whole(folder, found)
    if last is None:
        raise ValueError(
            f"resume_from_checkpoint=True finds torn checkpoints only in {folder}. Use resume_from_checkpoint=None to "
            "start anew."
        )
    return str(last)


def _check_whole(asked_for: str) -> None:
    reasons = gather_object([why_torn(Path(asked_for)) if Path(asked_for).is_dir() else _ABSENT])
    reason = next(filter(None, reasons), None)
    if reason is not None and set(reasons) != {_ABSENT}:  # that nobody has it transformers says
        raise ValueError(
            f"resume_from_checkpoint={asked_for!r} is torn: {reason}. Use resume_from_checkpoint=True for the last "
            "whole checkpoint in the output folder."
        )


def last_whole_checkpoint(folder: Path) -> Path | None:
    """
    The whole checkpoint of the highest step; warns of torn ones that come after it.

    Args:
        folder (`Path`):
            Output folder of a training.

    Returns:
        `Path`, *optional*: `None` if there is none.

    Example:

    ```python
    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> for step in (9, 10):
    ...     (folder / f"checkpoint-{step}").mkdir()
    ...     _ = (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    ...     _ = (folder / f"checkpoint-{step}" / "pytorch_model.bin").write_text("weights")
    >>> last_whole_checkpoint(folder).name
    'checkpoint-10'
    >>> with saving(folder / "checkpoint-11"):  # doctest: +ELLIPSIS
    ...     raise OSError("disk full")
    Traceback (most recent call last):
        ...
    OSError: disk full
    >>> why_torn(folder / "checkpoint-11")
    'its saving did not end'

    ```
    """
    return _last_whole(folder, [_reasons(folder)])


def _reasons(folder: Path) -> dict[str, str | None]:
    """Why each checkpoint is torn, by name."""
    return {checkpoint.name: why_torn(checkpoint) for checkpoint in _checkpoints(folder)}


def _last_whole(folder: Path, found: list[dict[str, str | None]]) -> Path | None:
    """The last checkpoint that is whole on all processes, by what each of them found."""
    for checkpoint in sorted({folder / name for names in found for name in names}, key=_age, reverse=True):
        reason = next(filter(None, (names.get(checkpoint.name, _ABSENT) for names in found)), None)
        if reason is None:
            return checkpoint
        logger.warning(f"The checkpoint {checkpoint} is torn and is skipped: {reason}.")
    return None


def why_torn(checkpoint: Path) -> str | None:
    """
    What is wrong with a checkpoint.

    Args:
        checkpoint (`Path`):
            Its folder.

    Returns:
        `str`, *optional*: the reason why it is torn; `None` if it is whole.
    """
    if _flag(checkpoint).exists() or (checkpoint / _FLAG_OF_TRANSFORMERS).exists():
        return "its saving did not end"
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    cut_off = [path.name for path in files if not _is_readable(path)]
    if cut_off:
        return f"{cut_off[0]} is cut off"
    lacking = _lacking({str(path.relative_to(checkpoint)) for path in files}, checkpoint)
    return f"it lacks {lacking}" if lacking else None


@contextmanager
def saving(checkpoint: Path) -> Iterator[None]:
    """
    A block in which a checkpoint is saved; until it ends well, the checkpoint counts as torn.

    Args:
        checkpoint (`Path`):
            Its folder. What is in it goes, so that old files are not taken for new ones; if it is whole, it stays as
            `old-checkpoint-N` until then.
    """
    # Several processes may do this on one disk, with `save_on_each_node`: what one of them finds another may move.
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    old = checkpoint.with_name(f"old-{checkpoint.name}")
    with suppress(OSError):
        (checkpoint / _FLAG_OF_TRANSFORMERS).unlink(missing_ok=True)  # of this saving
        if why_torn(checkpoint) is None:
            checkpoint.rename(old)
    _flag(checkpoint).write_text(f"The saving of {checkpoint.name} has begun and has not ended.\n")
    shutil.rmtree(checkpoint, ignore_errors=True)
    yield
    _flag(checkpoint).unlink(missing_ok=True)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def rotation_after(trainer: Any) -> Iterator[None]:
    """
    In the block transformers deletes no older checkpoints, as the new one is not whole yet, but when it is over.

    Args:
        trainer ([`~transformers.Trainer`]):
            The trainer that saves.
    """
    is_function = hasattr(transformers_trainer, "rotate_checkpoints")  # transformers 5
    owner, name = (transformers_trainer, "rotate_checkpoints") if is_function else (trainer, "_rotate_checkpoints")
    rotate, calls = getattr(owner, name), []
    with patch.object(owner, name, lambda *args, **kwargs: calls.append((args, kwargs))):
        yield
    for args, kwargs in calls:
        rotate(*args, **kwargs)


def delete_unfinished(folder: Path) -> None:
    """
    Delete checkpoints whose saving did not end, as in a rotation they would stand for whole ones, and what was there
    before them.

    Args:
        folder (`Path`):
            Output folder of a training.
    """
    for checkpoint in _checkpoints(folder):
        if _flag(checkpoint).exists() or checkpoint.name.startswith("old-"):
            shutil.rmtree(checkpoint, ignore_errors=True)
            _flag(checkpoint).unlink(missing_ok=True)


def delete_stray_flags(folder: Path) -> None:
    """
    Delete flags of checkpoints that are not there, so that none is taken for that of one which another trainer saves.

    Args:
        folder (`Path`):
            Output folder of a training.
    """
    for flag in folder.glob(f"checkpoint-*{_FLAG}"):
        if not flag.with_suffix("").exists():
            flag.unlink(missing_ok=True)


@contextmanager
def whole_tables(folder: Path) -> Iterator[None]:
    """
    In the block a table takes its place when all of it is written, and an empty one never takes that of another.

    Args:
        folder (`Path`):
            Where the tables are. All others are left alone.
    """
    to_parquet = pd.DataFrame.to_parquet

    def to_parquet_at_once(table: pd.DataFrame, path: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, str | Path) or Path(path).parent != folder:
            return to_parquet(table, path, *args, **kwargs)
        path = Path(path)
        if table.empty and path.exists():  # a run that is resumed at its end has generated nothing
            return None
        with replacing(path) as unfinished:
            return to_parquet(table, unfinished, *args, **kwargs)

    with patch.object(pd.DataFrame, "to_parquet", to_parquet_at_once):
        yield


def step_of(checkpoint: Path) -> int:
    """
    The step of a checkpoint.

    Args:
        checkpoint (`Path`):
            Its folder.

    Example:

    ```python
    >>> step_of(Path("output/checkpoint-120"))
    120

    ```
    """
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def _checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and _CHECKPOINT.fullmatch(path.name)]
    return sorted(found, key=_age)


def _age(checkpoint: Path) -> tuple[int, bool]:
    return step_of(checkpoint), not checkpoint.name.startswith("old-")


def _flag(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}{_FLAG}")  # beside it: the folder may be uploaded meanwhile


def _is_readable(path: Path) -> bool:
    """Whether a file is as long as it says itself, as far as its format tells."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):  # reads the header and compares sizes
                pass
        elif path.suffix in (".pt", ".pth", ".bin"):
            with path.open("rb") as file:
                start = file.read(2)
            # Those that torch wrote before it wrote zip files are taken as they are.
            return zipfile.is_zipfile(path) if start == b"PK" else start != b""
    except (ValueError, SafetensorError):
        return False
    return True


def _lacking(names: set[str], checkpoint: Path) -> str | None:
    """A file without which training would not go on as it was."""
    for what, pattern, because_of in _NEEDED:
        if (because_of is None or _any_is(because_of, names)) and not _any_is(pattern, names):
            return what
    return min(_parts_of_weights(names, checkpoint) - names, default=None)


def _any_is(pattern: str, names: set[str]) -> bool:
    return any(re.match(pattern, name) for name in names)


def _parts_of_weights(names: set[str], checkpoint: Path) -> set[str]:
    """The files that hold weights by the index of those in several parts."""
    indices = [name for name in names if name.endswith(".index.json")]
    maps = {index: json.loads((checkpoint / index).read_bytes()).get("weight_map", {}) for index in indices}
    return {str(Path(index).with_name(part)) for index, parts in maps.items() for part in parts.values()}
