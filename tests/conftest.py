"""What holds for all tests."""

from pathlib import Path

import pytest

from tests.faults.table import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]

WHOLE_PROGRAM = {"cases", "e2e", "faults"}
"""Folders of tests that start whole programs; `make check` leaves them to `make test`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if WHOLE_PROGRAM & set(Path(item.path).parts):
            item.add_marker(pytest.mark.slow)
