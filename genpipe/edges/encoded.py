"""A group as the bytes that are to be written, made before the disk is asked for anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from genpipe.core.values import Finished, Group, Sums
from genpipe.edges import done_indices
from genpipe.edges.record import Wall, encode_finished, encode_given_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Records that are written to one shard together.

    Attributes:
        data: their lines, one after the other.
        indices: the index of each.
        sums: totals over them.
        listing: their lines of ``.done_indices``.
    """

    data: memoryview
    indices: list[int]
    sums: Sums
    listing: bytes


class EncodedGroup:
    """A group that may be written. Does not change.

    Attributes:
        group: what was encoded.
        failures: the lines of ``group.given_up``.
    """

    def __init__(self, group: Group, wall: Wall, settings: str | None) -> None:
        """Encode a group.

        Args:
            group: it.
            wall: the process's anchor of the wall clock.
            settings: digest of the settings where they are not those of ``run.json``, else None.
        """
        lines = [encode_finished(finished, wall, settings) for finished in group.finished]
        self.group = group
        self.failures = b"".join(map(encode_given_up, group.given_up))
        self._data = memoryview(b"".join(lines))
        self._ends = [0, *accumulate(map(len, lines))]
        self._whole = self._part(0, len(lines))

    def __len__(self) -> int:
        """How many records there are."""
        return len(self.group.finished)

    def part(self, start: int, stop: int) -> Part:
        """The records from ``start`` up to ``stop``, which must be there."""
        return self._whole if (start, stop) == (0, len(self)) else self._part(start, stop)

    def _part(self, start: int, stop: int) -> Part:
        some: Sequence[Finished] = self.group.finished[start:stop]
        sums = Sums()
        for finished in some:
            sums.add(finished.answer.output_tokens, finished.answer.flags)
        indices = [finished.prompt.index for finished in some]
        return Part(
            data=self._data[self._ends[start] : self._ends[stop]],
            indices=indices,
            sums=sums,
            listing=done_indices.encode(indices),
        )
