"""Benchmarks measure ratios within one run and print them in the end: `pytest -m benchmark`."""

import pytest


_ROWS: list[tuple[str, str]] = []


@pytest.fixture
def report():
    """Takes what was measured and its result, for the table."""
    return lambda measured, result: _ROWS.append((measured, result))


def pytest_terminal_summary(terminalreporter):
    if _ROWS:
        width = max(len(measured) for measured, _ in _ROWS)
        terminalreporter.section("benchmarks")
        for measured, result in _ROWS:
            terminalreporter.write_line(f"{measured:<{width}}  {result}")
