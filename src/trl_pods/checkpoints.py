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
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from transformers import trainer as transformers_trainer


logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


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
    if asked_for is True:
        return _agreed_checkpoint(folder) if _checkpoints(folder) else True
    reason = why_torn(Path(asked_for)) if asked_for and Path(asked_for).is_dir() else None
    if reason is not None:
        raise ValueError(
            f"resume_from_checkpoint={asked_for!r} is torn: {reason}. Use resume_from_checkpoint=True for the last "
            "whole checkpoint in the output folder."
        )
    return asked_for


def _agreed_checkpoint(folder: Path) -> str:
    last = last_whole_checkpoint(folder)
    steps = gather_object([-1 if last is None else step_of(last)])  # processes may have disks of their own
    if min(steps) < 0:
        raise ValueError(
            f"resume_from_checkpoint=True finds torn checkpoints only in {folder}. Use resume_from_checkpoint=None to "
            "start anew."
        )
    return str(folder / f"checkpoint-{min(steps)}")


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
    for checkpoint in reversed(_checkpoints(folder)):
        reason = why_torn(checkpoint)
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
    if _flag(checkpoint).exists():
        return "its saving did not end"
    files = [path for path in sorted(checkpoint.rglob("*")) if path.is_file()]
    cut_off = [path.name for path in files if not _is_readable(path)]
    if cut_off:
        return f"{cut_off[0]} is cut off"
    missing = _missing({str(path.relative_to(checkpoint)) for path in files}, checkpoint)
    return f"{missing} missing" if missing else None


@contextmanager
def saving(checkpoint: Path) -> Iterator[None]:
    """
    A block in which a checkpoint is saved; until it ends well, the checkpoint counts as torn.

    Args:
        checkpoint (`Path`):
            Its folder. What is in it goes, so that old files are not taken for new ones.
    """
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    _flag(checkpoint).write_text(f"The saving of {checkpoint.name} has begun and has not ended.\n")
    if checkpoint.exists():
        shutil.rmtree(checkpoint)
    yield
    _flag(checkpoint).unlink(missing_ok=True)


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
    Delete checkpoints whose saving did not end; in a rotation they would stand for whole ones.

    Args:
        folder (`Path`):
            Output folder of a training.
    """
    for checkpoint in _checkpoints(folder):
        if _flag(checkpoint).exists():
            shutil.rmtree(checkpoint)
            _flag(checkpoint).unlink()


@contextmanager
def whole_tables() -> Iterator[None]:
    """In the block a table takes its place when all of it is written, and an empty one never takes that of another."""
    to_parquet = pd.DataFrame.to_parquet

    def to_parquet_at_once(table: pd.DataFrame, path: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(path)
        if table.empty and path.exists():  # a run that is resumed at its end has generated nothing
            return None
        part = path.with_name(f".{path.name}.part")
        to_parquet(table, part, *args, **kwargs)
        return part.replace(path)

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
    return sorted(found, key=step_of)


def _flag(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.unfinished")  # beside it: the folder may be uploaded meanwhile


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


def _missing(names: set[str], checkpoint: Path) -> str | None:
    """A file without which training would not go on as it was."""
    folders = any("/" in name for name in names)  # of DeepSpeed or FSDP: they hold weights and optimizer
    if "trainer_state.json" not in names:
        return "trainer_state.json is"
    if not folders and not any(name.startswith(("model", "adapter_model", "pytorch_model")) for name in names):
        return "the weights are"
    for index in (name for name in names if name.endswith(".index.json")):
        parts = set(json.loads((checkpoint / index).read_bytes()).get("weight_map", {}).values())
        if parts - names:
            return f"{min(parts - names)} is"
    has_optimizer = folders or any("optimizer" in name for name in names)
    random_states = {name for name in names if re.fullmatch(r"rng_state(_\d+)?\.pth", name)}
    if "optimizer.pt" in names and "scheduler.pt" not in names:
        return "scheduler.pt is"
    if "scheduler.pt" in names and not has_optimizer:
        return "optimizer.pt is"
    if has_optimizer and not random_states:
        return "rng_state.pth is"
    of_processes = {f"rng_state_{process}.pth" for process in range(len(random_states - {"rng_state.pth"}))}
    return f"{min(of_processes - names)} is" if of_processes - names else None
