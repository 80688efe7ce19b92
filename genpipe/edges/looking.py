"""A run's shards held against what was noted of them, one by one and together."""

from dataclasses import dataclass, replace

from genpipe.core.bitmap import Bitmap
from genpipe.edges import lines
from genpipe.edges.findings import Finding, of_bytes, of_entry
from genpipe.edges.reading import Held
from genpipe.edges.shards import scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one shard holds.

    Attributes:
        file: what it is called in messages.
        size_bytes: bytes that were read.
        ranges: its indices as runs, where they are just those that were noted.
        indices: the index of each good line, where they are others.
        findings: what is wrong with it alone.
    """

    file: str
    size_bytes: int
    ranges: list[tuple[int, int]]
    indices: list[int]
    findings: list[Finding]


class Doubles:
    """Counts records over many shards; those that a shard before has are doubled.

    Attributes:
        done: prompts that have a record.
    """

    def __init__(self) -> None:
        self.done = Bitmap()

    def take(self, ranges: list[tuple[int, int]], indices: list[int]) -> int:
        """Count a shard's records; how many of them are doubled."""
        doubled = len(indices) - sum(map(self.done.add, indices))
        for first, last in ranges:
            doubled += self.done.count_between(first, last + 1)
            self.done.add_range(first, last)
        return doubled


def look_at(held: Held) -> Seen:
    """Read one shard and hold it against what was noted of it. May run in any thread; shares nothing.

    Raises:
        StoreError: whatever holds it does not serve it, or anything.
    """
    try:
        data = held.read()
    except OSError as error:
        what, then = f"cannot be read: {error.strerror or error}", "see to the disk (or its permissions)"
        return nothing_of(held, what, then)
    except ValueError as error:
        return nothing_of(held, str(error), held.then)
    entry = held.entry
    is_as_sealed = entry is not None and entry.covers(data)
    if entry is not None and is_as_sealed:
        # The bytes that were sealed, whose checksums were right then.
        indices = lines.indices_of(data)
        if indices is not None and sorted(indices) == list(entry.indices()):
            return Seen(file=held.file, size_bytes=len(data), ranges=entry.ranges, indices=[], findings=[])
    return _look_closely(held, data, is_as_sealed=is_as_sealed)


def nothing_of(held: Held, what: str, then: str) -> Seen:
    """What is seen of a shard that cannot be read."""
    finding = Finding(file=held.file, what=what, then=then)
    return Seen(file=held.file, size_bytes=0, ranges=[], indices=[], findings=[finding])


def _look_closely(held: Held, data: bytes, *, is_as_sealed: bool) -> Seen:
    entry, found = held.entry, scan(data)
    by = "a start" if held.is_open else "--repair"
    is_as_listed = entry is not None and sorted(found.indices) == list(entry.indices())
    findings = []
    if entry is not None and not (is_as_sealed and is_as_listed):
        findings += of_entry(held.file, found, entry, noted_in=held.noted_in, is_as_sealed=is_as_sealed)
    findings += of_bytes(held.file, found, by=by, in_flight=held.is_open)
    if held.then:
        findings = [replace(finding, then=held.then) for finding in findings]
    return Seen(
        file=held.file,
        size_bytes=len(data),
        ranges=entry.ranges if entry is not None and is_as_listed else [],
        indices=[] if is_as_listed else found.indices,
        findings=findings,
    )
