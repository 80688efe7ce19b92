"""What a run folder owes to those who were told that it has something."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from tests.edges import audit
from tests.faults.store_driver import Plan

PROPERTY = "faults"
"""The property of a test's report that holds rows of the table."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An audit of one run folder, counted from its files alone.

    Attributes:
        checked: acknowledged records and failures that were looked for.
        lost: those that are not there.
        doubled: records that stand there more than once.
        leading: indices in ``.done_indices`` without a record.
    """

    checked: int
    lost: frozenset[int]
    doubled: frozenset[int]
    leading: frozenset[int]

    @property
    def is_good(self) -> bool:
        """Whether both promises were kept."""
        return not (self.lost or self.doubled or self.leading)


def verdict_on(files, folder: Path, acked: Iterable[int], acked_failures: Iterable[int] = ()) -> Verdict:
    """Audit a folder in whatever state; ``files`` is a file port."""
    records, failures = frozenset(acked), frozenset(acked_failures)
    seen = audit.counts(files, folder)
    failed = folder / "failed.jsonl"
    lines = audit.whole_lines(files.read(failed)) if files.exists(failed) else []
    known = set(seen) | {line["index"] for line in lines}
    return Verdict(
        checked=len(records) + len(failures),
        lost=frozenset((records - set(seen)) | (failures - known)),
        doubled=frozenset(index for index, count in seen.items() if count > 1),
        leading=frozenset(audit.listed(files, folder)) - set(seen),
    )


def assert_complete(files, folder: Path, plan: Plan) -> None:
    """After the last start's end: everything is there once, and every derived file says so."""
    audit.check(files, plan.indices, folder=folder)
    audit.check_at_rest(files, folder)
    assert not [name for name in files.sizes(folder / "shards") if name.endswith(".open")]
    planned = {failure.index for part in plan.groups() for failure in part.given_up}
    failed = {line["index"] for line in audit.whole_lines(files.read(folder / "failed.jsonl"))}
    assert failed >= planned - set(plan.indices)


class Count:
    """What one kind of test has tried and seen; a row of the table at the end. For any thread.

    Attributes:
        kind: what was tried.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._skipped: str | None = None

    @property
    def points(self) -> int:
        """How many were tried."""
        return self._counts["points"]

    def tried(self, points: int = 1) -> None:
        """So many more were tried."""
        with self._lock:
            self._counts["points"] += points

    def audited(self, verdict: Verdict) -> None:
        """What an audit has found, which must be good."""
        with self._lock:
            self._counts["checked"] += verdict.checked
            self._counts["lost"] += len(verdict.lost)
            self._counts["doubled"] += len(verdict.doubled)
        assert verdict.is_good, verdict

    def skip(self, reason: str) -> None:
        """It could not be tried here."""
        self._skipped = reason

    def row(self) -> list[str | int]:
        """For the table."""
        columns = ("points", "checked", "lost", "doubled")
        return [self.kind, *(self._counts[column] for column in columns), self._skipped or ""]
