"""Totals over records: of a shard, of this process, of a whole run."""

from dataclasses import dataclass, field
from typing import Any

from genpipe.core.histogram import Histogram


@dataclass(slots=True, kw_only=True)
class Sums:
    """Totals over records, mergeable: of a shard, or of a whole run.

    Attributes:
        records: how many.
        output_tokens: over the records whose usage is known.
        usage_unknown: records whose usage is not known.
        flags: records by flag.
        lengths: output tokens per record, four buckets an octave.
    """

    records: int = 0
    output_tokens: int = 0
    usage_unknown: int = 0
    flags: dict[str, int] = field(default_factory=dict)
    lengths: Histogram = field(default_factory=lambda: Histogram(per_octave=4, least=1.0))

    def add(self, output_tokens: int | None, flags: tuple[str, ...]) -> None:
        """Count one record."""
        self.records += 1
        if output_tokens is None:
            self.usage_unknown += 1
        else:
            self.output_tokens += output_tokens
            self.lengths.add(output_tokens)
        for flag in flags:
            self.flags[flag] = self.flags.get(flag, 0) + 1

    def merge(self, other: "Sums") -> None:
        """Add the totals of ``other``."""
        self.records += other.records
        self.output_tokens += other.output_tokens
        self.usage_unknown += other.usage_unknown
        for flag, count in other.flags.items():
            self.flags[flag] = self.flags.get(flag, 0) + count
        self.lengths.merge(other.lengths)

    def as_json(self) -> dict[str, Any]:
        """For a manifest line."""
        return {
            "records": self.records,
            "output_tokens": self.output_tokens,
            "usage_unknown": self.usage_unknown,
            "flags": self.flags,
            "lengths": self.lengths.as_counts(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Sums":
        """From what :meth:`as_json` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        sums = cls(
            records=int(data["records"]),
            output_tokens=int(data["output_tokens"]),
            usage_unknown=int(data["usage_unknown"]),
            flags={str(flag): int(count) for flag, count in data["flags"].items()},
        )
        sums.lengths.add_counts(data["lengths"])
        return sums
