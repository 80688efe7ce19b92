"""What can be wrong with a run, and how it is told."""

from dataclasses import dataclass
from typing import Any

from genpipe.core.sums import Sums
from genpipe.core.wording import number
from genpipe.edges import lines
from genpipe.edges.record import facts_of
from genpipe.edges.shards import QUARANTINE, Entry, Scan


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, or that is worth a note.

    Attributes:
        file: what it is about: its name in the run folder, or the whole name of an object.
        what: what is wrong with it.
        then: what a start or ``--repair`` does about it.
        is_problem: it is wrong; otherwise a kill leaves such a thing, and nothing is lost by it.
        in_flight: a driver at work leaves such a thing for a moment.
    """

    file: str
    what: str
    then: str
    is_problem: bool = True
    in_flight: bool = False

    def __str__(self) -> str:
        return f"{'problem' if self.is_problem else 'note'}: {self.file}: {self.what}; {self.then}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run was found to be.

    Attributes:
        name: the run folder, or the prefix of an object store.
        driver_at_work: a driver owns it; what is merely in flight was left out.
        shards: how many there are, the open one included, and those that only an object store has.
        records: prompts that have a record.
        size_bytes: of all shards that were read.
        findings: what was found, in the order of the checks.
    """

    name: str
    driver_at_work: bool
    shards: int
    records: int
    size_bytes: int
    findings: tuple[Finding, ...]

    @property
    def problem_count(self) -> int:
        """How many findings are problems."""
        return sum(finding.is_problem for finding in self.findings)

    def as_text(self) -> str:
        """A line for each finding, and one that sums up."""
        told = [str(finding) for finding in self.findings]
        if self.driver_at_work:
            told.append(f"note: {self.name}: a driver is at work; what is in flight was left out")
        problems = self.problem_count
        told.append(
            f"{self.name}: {'sound' if problems == 0 else 'NOT SOUND'}, {number(self.shards)} shards, "
            f"{number(self.records)} records, {number(self.size_bytes)} bytes, {problems} problems"
        )
        return "\n".join(told)

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "folder": self.name,
            "sound": self.problem_count == 0,
            "driver_at_work": self.driver_at_work,
            "shards": self.shards,
            "records": self.records,
            "bytes": self.size_bytes,
            "problems": self.problem_count,
            "findings": [
                {
                    "kind": "problem" if finding.is_problem else "note",
                    "file": finding.file,
                    "what": finding.what,
                    "then": finding.then,
                }
                for finding in self.findings
            ],
        }


def of_bytes(file: str, found: Scan, *, by: str, in_flight: bool) -> list[Finding]:
    """What is wrong with a file whose bytes are not all lines that count.

    Args:
        file: its name in the run folder.
        found: what it holds.
        by: who mends it.
        in_flight: a driver at work may be writing at its end.
    """
    if not found.bad:
        return []
    size_bytes = sum(len(bad) for _, bad in found.bad)
    if found.is_torn:
        what = f"ends in {size_bytes} bytes of an unfinished write"
    else:
        what = (
            f"IS DAMAGED: {len(found.bad)} places of {size_bytes} bytes together are no line that counts "
            f"(first at byte {found.bad[0][0]})"
        )
    then = f"{by} moves them to {QUARANTINE}/, and what stood there runs again"
    return [Finding(file=file, what=what, then=then, in_flight=in_flight and found.is_torn)]


def of_entry(file: str, found: Scan, entry: Entry, *, noted_in: str, is_as_sealed: bool) -> list[Finding]:
    """How a sealed shard differs from what was sealed.

    The sums, which take a JSON parse of every line, are counted again only where the digest is another: they
    were made of the bytes that it covers.

    Args:
        file: the shard's name in the run folder.
        found: what it holds.
        entry: what was noted of it.
        noted_in: where that is from.
        is_as_sealed: it has the length and the SHA-256 that were noted.
    """
    data = found.data
    told: list[tuple[str, str]] = []
    if is_as_sealed:
        if set(found.indices) != set(entry.indices()):
            told.append((f"holds other prompts than {noted_in} lists", "--repair lists it again"))
    elif len(data) > entry.size_bytes and entry.covers(data[: entry.size_bytes]):
        more = f"has {len(data) - entry.size_bytes} bytes behind those that were sealed"
        told.append((more, f"a start moves them to {QUARANTINE}/"))
    else:
        if len(data) != entry.size_bytes:
            what = f"has {len(data)} bytes where {noted_in} says {entry.size_bytes}"
            told.append((what, "a start reads it again"))
        else:
            told.append((f"has another SHA-256 than {noted_in} says", "--repair reads it again"))
        there = set(found.indices)
        lost = sum(index not in there for index in entry.indices())
        if lost:
            told.append((f"lacks {lost} of the {entry.count} prompts that it held", "they are asked again"))
        elif len(there) > entry.count:
            told.append(
                (
                    f"holds {len(there)} prompts where {noted_in} says {entry.count}",
                    "--repair lists it again",
                )
            )
        elif _sums_of(found).as_json() != entry.sums.as_json():
            told.append(("holds records of other lengths or flags than were sealed", "--repair counts anew"))
    return [Finding(file=file, what=what, then=then) for what, then in told]


def _sums_of(found: Scan) -> Sums:
    sums = Sums()
    seen = set()
    for index, line in zip(found.indices, found.good, strict=True):
        if index not in seen:
            seen.add(index)
            sums.add(*facts_of(lines.body_of(line)))
    return sums
