"""One table of all faults that were tried, at the end of a run of the tests."""

from collections.abc import Iterator, Sequence

from tests.faults.audits import PROPERTY

COLUMNS = ("what was tried", "points", "acknowledged, checked", "lost", "doubled", "skipped")


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
