"""Servers of drivers for the tests of faults, and counts of what they try."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.audits import PROPERTY, Count
from tests.faults.drivers import Launcher, Launchers
from tests.faults.soak import SOAK

_TIMEOUT_S = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A longer plan has more points, and each point takes longer."""
    for item in items:
        if SOAK > 1 and Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S * SOAK**2))


@pytest.fixture(scope="session")
def strace() -> None:
    """Skips where no process may be traced."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        pytest.skip(f"processes may not be traced here: {tried.stderr.strip()}")


@pytest.fixture(scope="session")
def launchers(strace) -> Iterator[Launchers]:
    """Two servers of drivers."""
    with Launcher() as one, Launcher() as other:
        yield Launchers([one, other])


@pytest.fixture(scope="session")
def soak() -> int:
    """How many times the usual work is to be done."""
    return SOAK


@pytest.fixture
def count(record_property) -> Iterator[Callable[[str], Count]]:
    """Counts of what a test tries, by kind; they make rows of the table, whether it passes or not."""
    counts: dict[str, Count] = {}

    def of(kind: str) -> Count:
        return counts.setdefault(kind, Count(kind))

    yield of
    for counted in counts.values():
        record_property(PROPERTY, counted.row())
