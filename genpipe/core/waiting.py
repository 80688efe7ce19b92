"""The prompts that wait to be sent: ready ones in order, and those that sleep after a fault."""

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from genpipe.core.values import Prompt

FAULTS_TO_THE_BACK = 3
"""A prompt with so many faults, of whatever kind, no longer goes before the others (count)."""


LOSSES_MAX = 8
"""A prompt whose connection broke, or whose server fell silent, so often is not tried for ever (count)."""

DEATHS_SEEN_MAX = 4
"""Servers that die together are no prompt's doing, but for one that was there at so many deaths (count)."""


class Rng(Protocol):
    """Where jitter comes from; ``random.Random`` is one."""

    def uniform(self, a: float, b: float, /) -> float:
        """A number between ``a`` and ``b``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The turns of a conversation that were answered.

    Attributes:
        began_s: when the attempt that answered the first one took its slot (seconds, run clock).
        spent_s: the latencies of their answers, together (seconds).
        tokens: how many those answers have, as far as that is known.
    """

    began_s: float
    spent_s: float
    tokens: int


class Work:
    """One prompt on its way, over all its attempts; of a conversation, over those of one turn.

    Attributes:
        live: attempts in flight, or landed and not examined.
        ended: it was answered or given up; what still comes for it is late.
        hedges: second attempts that were begun beside a first.
        overdue: how often it was too old, which makes us wait longer for it on the next server.
        killed: servers that died with it in flight.
        doubts: servers where it was lost, and of which nothing is known since.
        losses: how often it was lost, whatever became of the server.
        lost_at: servers where it was lost, whatever became of them.
        uncounted: deaths with it in flight that may have had a cause in common.
        past: the answered turns of a conversation that goes on; None for all others.
    """

    __slots__ = (
        "charged",
        "doubts",
        "ended",
        "faults",
        "hedges",
        "killed",
        "last_server",
        "live",
        "losses",
        "lost_at",
        "overdue",
        "past",
        "pending",
        "prompt",
        "tries",
        "uncounted",
    )

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.tries = self.faults = self.charged = 0
        self.overdue = self.hedges = self.live = self.uncounted = self.losses = 0
        self.ended = False
        self.killed: tuple[int, ...] = ()
        self.lost_at: frozenset[int] = frozenset()
        self.doubts: tuple[int, ...] = ()
        self.last_server: int | None = None
        # By server: its count of answers when it failed this prompt. The fault is charged to the prompt
        # once the server has answered somebody else, for then it was not the server. Most have none.
        self.pending: dict[int, int] | None = None
        self.past: Past | None = None

    def next_turn(self, more: Prompt, *, started_s: float, latency_s: float, tokens: int) -> "Work":
        """The next turn of a conversation, once this one was answered.

        Each turn has attempts, faults and hedges of its own, and the answer settles what came before: a
        server that was lost with this turn, and not looked at since (``doubts``), went of something else as
        far as anybody knows, and where connections merely broke, the conversation gets on all the same.
        Deaths that are certain stay, so that a conversation harms no more servers than any other prompt,
        however many turns it has.

        Args:
            more: what is asked next.
            started_s: when the answering attempt took its slot (seconds, run clock).
            latency_s: from then to the answer's last byte.
            tokens: how many the answer has, or 0 where that is not known.
        """
        past, work = self.past, Work(more)
        work.past = Past(
            began_s=started_s if past is None else past.began_s,
            spent_s=latency_s if past is None else past.spent_s + latency_s,
            tokens=tokens if past is None else past.tokens + tokens,
        )
        work.tries = self.tries
        work.killed, work.uncounted, work.lost_at = self.killed, self.uncounted, self.lost_at
        return work

    @property
    def marked(self) -> bool:
        """Whether a server may have died of it."""
        return bool(self.killed or self.doubts) or self.is_ill_fated

    @property
    def is_ill_fated(self) -> bool:
        """Whether it was there so often when servers went that it is sent nowhere, whatever they went of."""
        return self.uncounted + len(self.killed) >= DEATHS_SEEN_MAX or self.losses >= LOSSES_MAX

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
        marked: what servers may have died of, which is sent with more care.
        suspects: waiting prompts, of all kinds, that have a fault which may be their own.
    """

    def __init__(
        self, rng: Rng, *, backoff_s: float, backoff_max_s: float, longest_first: bool = False
    ) -> None:
        self.ready: deque[Work] = deque()
        self.marked: deque[Work] = deque()
        self.suspects = 0
        self._longest_first = longest_first
        self._rng = rng
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._sleeping: list[tuple[float, int, Work]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self.ready) + len(self.marked) + len(self._sleeping)

    @property
    def sleeping(self) -> int:
        """Prompts that wait out a backoff."""
        return len(self._sleeping)

    @property
    def held_up(self) -> int:
        """Those, and the ones that wait for a server that may have them after a death."""
        return len(self._sleeping) + len(self.marked)

    @property
    def wake_s(self) -> float | None:
        """When the next sleeper is ready, or None."""
        return self._sleeping[0][0] if self._sleeping else None

    def add(self, prompts: Iterable[Prompt]) -> None:
        """New prompts, to be sent after all others; or where the longest go first, each in its place."""
        self.ready.extend(map(Work, prompts))
        if self._longest_first:
            self.ready = deque(sorted(self.ready, key=_place_by_length))

    def take(self) -> Work:
        """The next prompt, to be sent."""
        work = self.ready.popleft()
        self.suspects -= bool(work.pending)
        return work

    def take_marked(self) -> Work:
        """The next of the marked ones, to be looked at."""
        work = self.marked.popleft()
        self.suspects -= bool(work.pending)
        return work

    def put_back(self, work: Work) -> None:
        """A prompt is to be sent, for no new fault: it is the next, if it does not belong to the back."""
        if work.marked:
            self.marked.append(work)
        elif _is_at_the_back(work):
            self.ready.append(work)
        else:
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
            if work.marked:
                self.marked.append(work)
            elif _is_at_the_back(work):
                self.ready.append(work)
            else:
                self.ready.appendleft(work)

    def check(self) -> None:
        """The suspects are counted right."""
        works = itertools.chain(self.ready, self.marked, (work for _, _, work in self._sleeping))
        suspects = sum(bool(work.pending) for work in works)
        assert suspects == self.suspects, (suspects, self.suspects)


def _place_by_length(work: Work) -> tuple[bool, bool, int]:
    """What was sent to the back stays there, and conversations that go on stay before all others."""
    return _is_at_the_back(work), work.past is None, -len(work.prompt.payload)


def _is_at_the_back(work: Work) -> bool:
    return bool(work.pending) or work.faults >= FAULTS_TO_THE_BACK
