"""The prompts that wait to be sent: ready ones in order, and those that sleep after a fault."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from genpipe.core.values import Prompt

FAULTS_TO_THE_BACK = 3
"""A prompt with so many faults, of whatever kind, no longer goes before the others (count)."""


class Rng(Protocol):
    """Where jitter comes from; ``random.Random`` is one."""

    def uniform(self, a: float, b: float, /) -> float:
        """A number between ``a`` and ``b``."""
        ...


class Work:
    """One prompt on its way, over all its attempts."""

    __slots__ = ("charged", "faults", "last_server", "pending", "prompt", "tries")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.tries = 0
        self.faults = 0
        self.charged = 0
        self.last_server: int | None = None
        # By server: its count of answers when it failed this prompt. The fault is charged to the prompt
        # once the server has answered somebody else, for then it was not the server. Most have none.
        self.pending: dict[int, int] | None = None

    def suspect(self, server: int, answers: int) -> None:
        """Note a fault at ``server``, which had given ``answers`` answers by then."""
        if self.pending is None:
            self.pending = {}
        self.pending[server] = answers

    def charge(self, server: int, answers: int) -> None:
        """Charge the fault at ``server`` if it has answered somebody since."""
        if self.pending is not None and self.pending.get(server, answers) < answers:
            del self.pending[server]
            self.charged += 1


class Waiting:
    """Prompts that are ready, in order, and prompts that wait out a backoff. No slot is theirs.

    Attributes:
        ready: what can be sent now, the next one first.
        suspects: waiting prompts, of both kinds, that have a fault which may be their own.
    """

    def __init__(self, rng: Rng, *, backoff_s: float, backoff_max_s: float) -> None:
        self.ready: deque[Work] = deque()
        self.suspects = 0
        self._rng = rng
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._sleeping: list[tuple[float, int, Work]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self.ready) + len(self._sleeping)

    @property
    def sleeping(self) -> int:
        """Prompts that wait out a backoff."""
        return len(self._sleeping)

    @property
    def wake_s(self) -> float | None:
        """When the next sleeper is ready, or None."""
        return self._sleeping[0][0] if self._sleeping else None

    def add(self, prompts: Iterable[Prompt]) -> None:
        """New prompts, to be sent after all others."""
        self.ready.extend(map(Work, prompts))

    def take(self) -> Work:
        """The next prompt, to be sent."""
        work = self.ready.popleft()
        if work.pending:
            self.suspects -= 1
        return work

    def put_back(self, work: Work) -> None:
        """A prompt whose attempt was called off for no fault: it is the next to be sent."""
        self.ready.appendleft(work)
        self.suspects += bool(work.pending)

    def sleep(self, work: Work, now_s: float) -> None:
        """Keep a prompt back for a while after a fault: longer with each, and never twice the same."""
        longest_s = min(self._backoff_max_s, self._backoff_s * 2 ** min(work.faults - 1, 30))
        pause_s = longest_s * self._rng.uniform(0.5, 1.0)
        heapq.heappush(self._sleeping, (now_s + pause_s, next(self._order), work))
        self.suspects += bool(work.pending)

    def wake(self, now_s: float) -> None:
        """Prompts whose backoff is over go to the front, for they are older than what is ready.

        A prompt under suspicion, or one that fails again and again, goes to the back: at the front it would
        be a benched server's only trial each time, and keep it from ever answering anybody.
        """
        while self._sleeping and self._sleeping[0][0] <= now_s:
            work = heapq.heappop(self._sleeping)[2]
            if work.pending or work.faults >= FAULTS_TO_THE_BACK:
                self.ready.append(work)
            else:
                self.ready.appendleft(work)

    def check(self) -> None:
        """The suspects are counted right."""
        works = itertools.chain(self.ready, (work for _, _, work in self._sleeping))
        suspects = sum(bool(work.pending) for work in works)
        assert suspects == self.suspects, (suspects, self.suspects)
