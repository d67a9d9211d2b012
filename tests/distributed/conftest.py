"""The runs of geometries.py, one for each number of processes."""

import json
from functools import cache
from pathlib import Path

import pytest
from launching import launch, once


SCRIPT = Path(__file__).parent / "geometries.py"


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """What the processes of a world wrote; a world is run once, when first asked for."""
    return lambda world: once(
        tmp_path_factory, f"geometries-{world}", lambda folder: launch(SCRIPT, folder, num_processes=world)
    )


@pytest.fixture(scope="session")
def seen_in(folder_of):
    """What each process of a world saw."""
    return cache(lambda w: [json.loads((folder_of(w) / f"rank{rank}.json").read_text()) for rank in range(w)])
