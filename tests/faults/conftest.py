"""Servers of drivers for the tests of faults, and one table of all that was tried."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.audits import PROPERTY, Count
from tests.faults.drivers import Launcher, Launchers
from tests.faults.soak import SOAK

COLUMNS = ("what was tried", "points", "acknowledged, checked", "lost", "doubled", "skipped")

_TIMEOUT_S = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A longer plan has more points, and each point takes longer."""
    for item in items:
        if SOAK > 1 and Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S * SOAK**2))


@pytest.fixture(scope="session")
def launchers() -> Iterator[Launchers]:
    """Two servers of drivers."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
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


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the table: tests in all workers, rows of the same kind added up."""
    totals: dict[str, list[int]] = {}
    skipped: dict[str, str] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            # The only report of a test that comes after its counts were recorded.
            if getattr(report, "when", None) != "teardown":
                continue
            for name, row in report.user_properties:
                if name == PROPERTY:
                    kind, *numbers, reason = row
                    before = totals.get(kind, [0] * len(numbers))
                    totals[kind] = [sum(pair) for pair in zip(before, numbers, strict=True)]
                    skipped[kind] = reason or skipped.get(kind, "")
    if totals:
        rows = [(kind, *map(str, totals[kind]), skipped[kind]) for kind in sorted(totals)]
        terminalreporter.section("faults")
        for line in _table([COLUMNS, *rows]):
            terminalreporter.write_line(line)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows in columns: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        words = [
            cell.ljust(width) if place in {0, len(row) - 1} else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(words).rstrip()
