"""One server as the scheduler sees it: its state, its slots, and what was last heard of it."""

from collections import deque
from enum import StrEnum

from genpipe.core.errors import FaultKind
from genpipe.core.limits import Limiter
from genpipe.core.values import ServerSpec


class ServerState(StrEnum):
    """How a server is used."""

    STARTING = "starting"
    """Not seen well yet: asked for its health now and then, and given no prompt."""

    UP = "up"
    """In use, and its last word was an answer."""

    SUSPECT = "suspect"
    """In use, with faults since its last answer, or back from the bench: others come first."""

    BENCHED = "benched"
    """Out of use until a probe finds it well."""

    GONE = "gone"
    """Taken out of the run; what is in flight there may still end."""


PROBATION_S = 15.0
"""A server that still shows life so long after a prompt came to it is not dying of that one (seconds). One
with an id outside the vocabulary ends a real server within 5 s."""


class Server:
    """One server's state. Changed by :class:`genpipe.core.fleet.Fleet` and its vigil alone.

    Attributes:
        position: in the run's list.
        spec: address and limit.
        since_s: attempts that began before this moment say nothing about the present state.
        held: requests in flight, given-up ones left out.
        aborts: when each slot of a request that was given up is free again, soonest first.
        opened: slots that the ramp has opened.
        on_trial: back from the bench and not proven yet: one prompt at a time.
        trial: that prompt's attempt, or None.
        wake_s: when it is probed next, or its trial opens the other slots.
        check_s: when it is looked at though it is in use, since a connection broke there; None for never.
        probing: a probe is under way.
        trials_failed: prompts on trial that it broke since its last answer, or a token of ours.
        turned_away: it said that it is busy, and has answered nothing since.
        marked: attempts there of prompts that servers may have died of, and when they began.
        alone: one of them has the whole server to itself.
        left_s: when it was last taken out of use.
        heard_s: when something came from it last.
        vitals: what its last inquiries found.
        over: slots still held beyond a limit that was lowered.
    """

    __slots__ = (
        "aborts",
        "alone",
        "answers",
        "check_s",
        "faults",
        "faults_in_a_row",
        "freed_s",
        "heard_s",
        "held",
        "last_error",
        "left_s",
        "limiter",
        "marked",
        "on_trial",
        "opened",
        "output_tokens",
        "over",
        "pause_s",
        "position",
        "probing",
        "since_s",
        "spec",
        "state",
        "trial",
        "trials_failed",
        "turned_away",
        "version",
        "vitals",
        "wake_s",
    )

    def __init__(self, position: int, spec: ServerSpec, now_s: float) -> None:
        self.position = position
        self.spec = spec
        self.state = ServerState.UP
        self.since_s = self.heard_s = now_s
        self.held = self.over = 0
        self.aborts: deque[float] = deque()
        self.opened = spec.limit
        self.limiter = Limiter(spec.limit)
        self.answers = self.output_tokens = self.trials_failed = 0
        self.faults = dict.fromkeys(FaultKind, 0)
        self.faults_in_a_row = 0
        self.last_error: str | None = None
        self.pause_s = self.wake_s = 0.0
        self.left_s = float("-inf")
        self.on_trial = self.probing = self.turned_away = self.alone = False
        self.trial: int | None = None
        self.marked: dict[int, float] = {}
        self.check_s: float | None = None
        self.vitals = LastVitals()
        self.freed_s: deque[float] = deque()
        self.version = 0

    @property
    def in_use(self) -> bool:
        """Whether it is given prompts."""
        return self.state is ServerState.UP or self.state is ServerState.SUSPECT

    @property
    def alive_s(self) -> float:
        """When it last answered, or showed that its work goes on."""
        return max(self.heard_s, self.vitals.alive_s)

    @property
    def may_take_marked(self) -> bool:
        """Whether the marked prompts there, if any, have been there for long enough to be trusted."""
        return not self.marked or self.has_lived(max(self.marked.values()))

    def has_lived(self, started_s: float) -> bool:
        """Whether it showed life when an attempt that began at ``started_s`` would have ended it already."""
        return self.alive_s >= started_s + PROBATION_S

    def room(self, now_s: float) -> int:
        """How many more prompts may be started here now."""
        if not self.in_use or self.alone:
            return 0
        taken = self.held + len(self.aborts)
        if not self.on_trial:
            return min(self.opened, self.limiter.allowed(now_s)) - taken
        if self.trial is None:
            return min(1, self.limiter.allowed(now_s), self.spec.limit - taken)
        return 0

    def closed(self, now_s: float) -> tuple[tuple[str, int], ...]:
        """Slots that the server's own state keeps shut, for the books, the first reason first."""
        limit, allowed = self.spec.limit, self.limiter.allowed(now_s)
        aborting = (("aborting", len(self.aborts)),) if self.aborts else ()
        if not self.in_use:
            return (*aborting, ("down", limit))
        if self.alone:
            return (*aborting, ("backoff", limit))
        if self.on_trial:
            return (*aborting, ("down", limit - 1), ("cut", 0 if allowed else 1))
        if self.opened == limit <= allowed:
            return aborting
        return (*aborting, ("ramp", limit - self.opened), ("cut", max(0, self.opened - allowed)))


class LastVitals:
    """What the last inquiries into one server found.

    Attributes:
        asking: an inquiry is under way.
        alive_s: when it last showed that its work goes on; the run's beginning of time for never.
        mark: the mark of its work at that time.
        idle_since_s: since which inquiry it says that it has nothing to do, or None.
    """

    __slots__ = ("alive_s", "asking", "idle_since_s", "mark")

    def __init__(self) -> None:
        self.asking = False
        self.alive_s = float("-inf")
        self.mark: str | None = None
        self.idle_since_s: float | None = None
