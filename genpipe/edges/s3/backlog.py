"""The shards that are sealed here and not in the log: which is to be uploaded, and which to be committed."""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from genpipe.edges.shards import Entry

PAUSE_S = 1.0
"""Longest pause after the first round of tries that failed (seconds); it doubles with each."""

PAUSE_MAX_S = 30.0
"""Longest pause of all (seconds)."""


def pause_s(rounds: int, rng: Random) -> float:
    """How long to wait after so many rounds of tries that failed, one after the other (seconds)."""
    longest_s: float = min(PAUSE_MAX_S, PAUSE_S * 2 ** min(rounds - 1, 30))
    return longest_s * rng.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploaded:
    """A shard whose bytes are in the store, and that is not committed.

    Attributes:
        entry: the shard.
        key: the object that holds its bytes.
        object_bytes: that object's length.
    """

    entry: Entry
    key: str
    object_bytes: int


class Backlog:
    """What waits for the store. Any number of threads. It holds no shard's bytes.

    Each shard is in one of these places: to be uploaded, asleep after a round of tries that failed, with the
    thread that took it, uploaded, or damaged.
    """

    def __init__(self, entries: Iterable[Entry], *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._rng = Random()
        self._changed = threading.Condition()
        self._waiting: dict[int, Entry] = {}
        self._due: deque[int] = deque()
        self._asleep: list[tuple[float, int, int]] = []
        self._order = itertools.count()
        self._uploaded: dict[int, Uploaded] = {}
        self._rounds: dict[int, int] = {}
        self._failed: set[int] = set()
        self._damaged: set[int] = set()
        self._is_closed = False
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def failed(self) -> int:
        """Shards whose last round of tries failed, or that are damaged."""
        return len(self._failed)

    @property
    def is_stuck(self) -> bool:
        """Something waits, and all that waits is damaged."""
        with self._changed:
            return 0 < len(self._waiting) == len(self._damaged)

    def missing(self) -> list[int]:
        """The numbers of the shards that wait, in order."""
        with self._changed:
            return sorted(self._waiting)

    def add(self, entry: Entry) -> None:
        """A shard that is to be uploaded after all others; one that waits already is left as it is."""
        with self._changed:
            if entry.seq not in self._waiting:
                self._waiting[entry.seq] = entry
                self._due.append(entry.seq)
                self._changed.notify_all()

    def take(self) -> Entry | None:
        """Wait for a shard that is to be uploaded; None once the backlog is closed."""
        with self._changed:
            while not self._is_closed:
                now_s = self._now_s()
                while self._asleep and self._asleep[0][0] <= now_s:
                    self._due.append(heapq.heappop(self._asleep)[2])
                while self._due:
                    entry = self._waiting.get(self._due.popleft())
                    if entry is not None:
                        return entry
                self._changed.wait(self._asleep[0][0] - now_s if self._asleep else None)
        return None

    def put_back(self, entry: Entry) -> None:
        """A shard that was taken could not be uploaded: it comes again after a pause, behind all others."""
        seq = entry.seq
        with self._changed:
            if seq in self._waiting:
                self._failed.add(seq)
                self._rounds[seq] = self._rounds.get(seq, 0) + 1
                due_s = self._now_s() + pause_s(self._rounds[seq], self._rng)
                heapq.heappush(self._asleep, (due_s, next(self._order), seq))
                self._changed.notify_all()

    def put_aside(self, entry: Entry) -> None:
        """A shard that was taken is damaged: it waits for good."""
        with self._changed:
            self._failed.add(entry.seq)
            self._damaged.add(entry.seq)
            self._changed.notify_all()

    def uploaded(self, uploaded: Uploaded) -> bool:
        """A shard that was taken is in the store; False where it was committed meanwhile from elsewhere."""
        seq = uploaded.entry.seq
        with self._changed:
            if seq not in self._waiting:
                return False
            self._uploaded[seq] = uploaded
            self._failed.discard(seq)
            self._changed.notify_all()
            return True

    def next_uploaded(self) -> Uploaded | None:
        """Wait for a shard that is to be committed, and stays here; None once the backlog is closed."""
        with self._changed:
            while not self._is_closed:
                if self._uploaded:
                    return self._uploaded[min(self._uploaded)]
                self._changed.wait()
        return None

    def stumbled(self, entry: Entry) -> None:
        """A shard that is uploaded could not be committed, and is tried again."""
        with self._changed:
            self._failed.add(entry.seq)

    def same_as(self, entry: Entry) -> bool:
        """Whether a shard waits of which this says the same."""
        with self._changed:
            waiting = self._waiting.get(entry.seq)
            return waiting is not None and waiting.says_the_same(entry)

    def committed(self, seq: int) -> Uploaded | None:
        """A shard waits no more; returns its object, if it was uploaded."""
        with self._changed:
            del self._waiting[seq]
            self._rounds.pop(seq, None)
            self._failed.discard(seq)
            self._damaged.discard(seq)
            self._changed.notify_all()
            return self._uploaded.pop(seq, None)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing waits; False after that time, or once the backlog is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._waiting, timeout_s)
            return not self._waiting

    def close(self) -> None:
        """Let nobody wait any more; what waits for the store stays."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
