"""What holds for all tests."""

from pathlib import Path

import pytest

from tests.faults.table import pytest_terminal_summary
from tests.s3.fixtures import aws, moto, rclone, weed

__all__ = ["aws", "moto", "pytest_terminal_summary", "rclone", "weed"]

WHOLE_PROGRAM = {"cases", "e2e", "faults", "s3", "test_cli.py", "test_limiting.py"}
"""Where tests start whole programs; `make check` leaves them to `make test`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.path).relative_to(Path(__file__).parent).parts[0] in WHOLE_PROGRAM:
            item.add_marker(pytest.mark.slow)
