"""
The file of a run: its curve, with what it was made with. Written whole or not at all. Imports no torch.

A JSON object:

- `format`: `"trl_pods.run/1"`
- `arm`, `seed`: which run of the comparison
- `status`: `"finished"` or `"failed"`
- `error`: of a failed run, how it ended and the end of its output
- `settings`: the recipe with all that the arm, the comparison and the seed set otherwise
- `started`, `wall_seconds`: when it was started (UTC), and how long it took with start-up and measurements
- `versions`, `hardware`: of packages, and of the machine
- `duration`, `interval`: seconds of training that the run was given, and between two measurements
- `rounds_per_step`: rounds of generation for each step of the optimizer
- `accuracy`: columns `seconds` (of training), `step`, `sampled`, `greedy` (shares of held-out problems)
- `log`: columns of the training log, one value per entry. `time/train` is seconds of training so far; `time/generate`,
  `time/reward`, `time/select`, `time/score`, `time/update` are seconds of a round
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..whole_files import write_text


_Content = TypeVar("_Content")

FORMAT = "trl_pods.run/1"
FINISHED, FAILED = "finished", "failed"

# Columns of the log that are kept, as far as they are logged.
LOG_COLUMNS = (
    "step",
    "time/train",
    "time/generate",
    "time/reward",
    "time/select",
    "time/score",
    "time/update",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "pods/kept_reward",
    "pods/kept_reward_std",
    "pods/kept_length",
    "completions/mean_length",
    "num_tokens",
    "entropy",
    "grad_norm",
    "loss",
)
_SIGNIFICANT = 6  # digits


@dataclass
class Run:
    """What a run left; the fields are those of the file, see this module."""

    arm: str
    seed: int
    status: str
    settings: dict[str, Any]
    duration: float
    interval: float
    error: str | None = None
    started: str | None = None
    wall_seconds: float | None = None
    rounds_per_step: float = 1.0
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[str, list] = field(default_factory=dict)
    log: dict[str, list] = field(default_factory=dict)


def write_run(run: Run, path: Path) -> None:
    """
    Write a run to its file.

    Args:
        run ([`Run`]):
            The run.
        path (`Path`):
            The file; what is there is replaced.
    """
    write_json({"format": FORMAT, **asdict(run)}, path)


def read_run(path: Path) -> Run:
    """
    Read a run from its file.

    Args:
        path (`Path`):
            The file.

    Returns:
        [`Run`]

    Raises:
        ValueError: If it is not such a file, or of another format.

    Example:

    ```python
    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> write_run(Run("pods", 1, FINISHED, {"num_rollouts": 32}, duration=60.0, interval=10.0), folder / "run.json")
    >>> read_run(folder / "run.json").settings
    {'num_rollouts': 32}

    ```
    """
    return read_as(Run, path, FORMAT, "a run")


def read_as(kind: type[_Content], path: Path, file_format: str, what: str) -> _Content:
    """
    The content of a JSON file whose fields are those of a dataclass, and its format.

    Args:
        kind (`type`):
            The dataclass.
        path (`Path`):
            The file.
        file_format (`str`):
            The format that is read.
        what (`str`):
            What it is the file of, for messages.

    Raises:
        ValueError: If it is not such a file, or of another format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format", None)
        if found != file_format:
            raise ValueError(f"{path} is of the format {found!r}; this trl_pods reads {file_format!r}.")
        return kind(**content)
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the file of {what}: {error}.") from error


def read_runs(folder: Path) -> list[Run]:
    """
    All runs whose files lie in a folder, by the names of the files.

    Args:
        folder (`Path`):
            The folder.
    """
    return [read_run(path) for path in sorted(folder.glob("*.json"))]


def check_same_settings(path: Path, found: Mapping[str, Any], asked_for: Mapping[str, Any]) -> None:
    """
    Refuse what was run with other settings than are asked for now.

    Args:
        path (`Path`):
            The file it is in.
        found (`Mapping[str, Any]`):
            Its settings.
        asked_for (`Mapping[str, Any]`):
            Those of now.

    Raises:
        ValueError: If they differ.
    """
    now = json.loads(json.dumps(asked_for))
    for name in sorted(now.keys() | found.keys()):
        if now.get(name) != found.get(name):
            raise ValueError(
                f"{path} is of a run with {name}={found.get(name)!r}, and {name}={now.get(name)!r} is asked for now. "
                "Use another output_dir, or delete the file to run it again."
            )


def columns(entries: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list]:
    """
    Log entries as columns, numbers cut to six digits; a column that no entry has is left out.

    Args:
        entries (`Iterable[Mapping[str, Any]]`):
            The entries.
        names (`Iterable[str]`):
            The columns.

    Example:

    ```python
    >>> columns([{"step": 1, "loss": 0.123456789}, {"step": 2}], ["step", "loss", "reward"])
    {'step': [1, 2], 'loss': [0.123457, None]}

    ```
    """
    entries = list(entries)
    table = {name: [_short(entry.get(name)) for entry in entries] for name in names}
    return {name: column for name, column in table.items() if any(value is not None for value in column)}


def write_json(content: Any, path: Path) -> None:
    """
    Write a JSON file whole or not at all.

    Args:
        content (`Any`):
            What to write.
        path (`Path`):
            The file.
    """
    write_text(json.dumps(content, separators=(",", ":")) + "\n", path)


def _short(value: Any) -> Any:
    return float(f"{value:.{_SIGNIFICANT}g}") if isinstance(value, float) else value
