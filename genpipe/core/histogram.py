"""Log-bucket histograms: small, mergeable, and good to a few per cent."""

import math
from collections.abc import Mapping


class Histogram:
    """Counts of positive numbers in buckets of equal ratio.

    Bucket ``b`` holds values from ``2**(b/per_octave)`` up to the next bucket's start. Values at or
    below ``least`` fall into the bucket of ``least``.

    Attributes:
        per_octave: buckets per doubling (16 is good to 4 %, 4 to 19 %).
        least: smallest value told apart (same unit as the values, > 0).
    """

    __slots__ = ("buckets", "count", "largest", "least", "per_octave")

    def __init__(self, *, per_octave: int, least: float) -> None:
        assert per_octave >= 1
        assert least > 0
        self.per_octave = per_octave
        self.least = least
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.largest = 0.0

    def bucket(self, value: float) -> int:
        """The bucket that ``value`` falls into."""
        return math.floor(self.per_octave * math.log2(max(value, self.least)))

    def low(self, bucket: int) -> float:
        """The smallest value of ``bucket``."""
        return float(2.0 ** (bucket / self.per_octave))

    def add(self, value: float) -> None:
        """Count one value."""
        bucket = self.bucket(value)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        self.largest = max(self.largest, value)

    def merge(self, other: "Histogram") -> None:
        """Add the counts of ``other``, which must have the same buckets."""
        assert (self.per_octave, self.least) == (other.per_octave, other.least)
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.count += other.count
        self.largest = max(self.largest, other.largest)

    def quantile(self, share: float) -> float | None:
        """The middle of the bucket in which ``share`` (0 to 1) of the values end, or None without values."""
        if self.count == 0:
            return None
        wanted = share * self.count
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= wanted:
                middle = 2.0 ** ((bucket + 0.5) / self.per_octave)
                return float(min(middle, self.largest))
        return self.largest

    def as_counts(self) -> dict[str, int]:
        """Counts by bucket number, for JSON."""
        return {str(bucket): self.buckets[bucket] for bucket in sorted(self.buckets)}

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add what :meth:`as_counts` gave.

        Raises:
            ValueError: a key is no bucket number.
        """
        for key, count in counts.items():
            bucket = int(key)
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
            self.count += count
            self.largest = max(self.largest, self.low(bucket + 1))
