import os

import pytest


# One thread per process: the tests run side by side on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


_BENCHMARKS: list[tuple[str, str]] = []


@pytest.fixture
def report():
    """Takes what a benchmark measured and its result, for the table in the end."""
    return lambda measured, result: _BENCHMARKS.append((measured, result))


def pytest_terminal_summary(terminalreporter):
    if _BENCHMARKS:
        width = max(len(measured) for measured, _ in _BENCHMARKS)
        terminalreporter.section("benchmarks")
        for measured, result in _BENCHMARKS:
            terminalreporter.write_line(f"{measured:<{width}}  {result}")
