"""The servers as the scheduler sees them: who may take a prompt, who is benched, who is to be probed."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum

from genpipe.core.books import Books
from genpipe.core.errors import FaultKind, ServerFault
from genpipe.core.histogram import Histogram
from genpipe.core.limits import Limiter
from genpipe.core.settings import BenchSettings
from genpipe.core.values import Probe, ServerSpec, Start

__all__ = ["BenchSettings", "Fleet", "Server", "ServerState"]


class ServerState(StrEnum):
    """How a server is used."""

    UP = "up"
    BENCHED = "benched"
    PROBING = "probing"
    TRIAL = "trial"


RAMP_STEPS = 50
"""A ramp opens its slots in this many steps, so that a large fleet costs no more timers than a small one."""


class Server:
    """One server's state. Changed by :class:`Fleet` alone."""

    __slots__ = (
        "answers",
        "faults",
        "faults_in_a_row",
        "freed_s",
        "held",
        "last_error",
        "limiter",
        "opened",
        "output_tokens",
        "pause_s",
        "position",
        "since_s",
        "spec",
        "state",
        "trial",
        "version",
        "wake_s",
    )

    def __init__(self, position: int, spec: ServerSpec, now_s: float) -> None:
        self.position = position
        self.spec = spec
        self.state = ServerState.UP
        # Attempts that began before this moment say nothing about the present state.
        self.since_s = now_s
        self.held = 0
        self.opened = spec.limit
        self.limiter = Limiter(spec.limit)
        self.answers = 0
        self.output_tokens = 0
        self.faults = dict.fromkeys(FaultKind, 0)
        self.faults_in_a_row = 0
        self.last_error: str | None = None
        self.pause_s = 0.0
        self.wake_s = 0.0
        self.trial: int | None = None
        self.freed_s: deque[float] = deque()
        self.version = 0

    def room(self, now_s: float) -> int:
        """How many more prompts may be started here now."""
        if self.state is ServerState.UP:
            return min(self.opened, self.limiter.allowed(now_s)) - self.held
        if self.state is ServerState.TRIAL and self.trial is None:
            return min(1, self.limiter.allowed(now_s), self.spec.limit - self.held)
        return 0

    def closed(self, now_s: float) -> tuple[tuple[str, int], ...]:
        """Slots that the server's own state keeps shut, for the books."""
        limit = self.spec.limit
        if self.state is ServerState.TRIAL:
            return (("down", limit - 1), ("cut", 0 if self.limiter.allowed(now_s) else 1))
        if self.state is not ServerState.UP:
            return (("down", limit),)
        opened, allowed = self.opened, self.limiter.allowed(now_s)
        if opened == limit <= allowed:
            return ()
        return (("ramp", limit - opened), ("cut", max(0, opened - allowed)))


class Fleet:
    """All servers: the next free slot, benching, probes and the ramp, in time that is told.

    A server is benched after ``bench.faults`` faults in a row. A probe decides when it may have one real
    prompt as a trial; once that is answered (or ``bench.trial_s`` old) the other slots open again.

    Attributes:
        servers: in the run's order.
        gaps_s: refill gaps of slots, from a reply's last byte to the next request on the wire (seconds).
    """

    def __init__(
        self, specs: Sequence[ServerSpec], books: Books, bench: BenchSettings, ramp_s: float, now_s: float
    ) -> None:
        self.servers = [Server(position, spec, now_s) for position, spec in enumerate(specs)]
        self.gaps_s = Histogram(per_octave=16, least=1e-6)
        self._books = books
        self._bench = bench
        self._turns = itertools.count()
        self._free: list[tuple[float, int, int, int]] = []
        self._timers: list[tuple[float, int]] = []
        self._began_s = now_s
        self._ramp_s = ramp_s
        self._ramp_step = RAMP_STEPS
        if ramp_s > 0:
            self._ramp_step = -1
            self._ramp(now_s)
        for server in self.servers:
            self._changed(server, now_s)

    def room(self, now_s: float) -> int:
        """Slots that could take a prompt now, over all servers; costs a walk over them."""
        return sum(max(0, server.room(now_s)) for server in self.servers)

    def usable(self) -> bool:
        """Whether any server is in use or on trial."""
        return any(server.state in (ServerState.UP, ServerState.TRIAL) for server in self.servers)

    def pick(self, avoid: int | None, now_s: float) -> Server | None:
        """The emptiest server with room, by share of its limit; ``avoid`` only where it is the only one."""
        second: tuple[float, int, int, int] | None = None
        found: Server | None = None
        while self._free and found is None:
            entry = self._free[0]
            server = self.servers[entry[2]]
            if entry[3] != server.version or server.room(now_s) <= 0:
                heapq.heappop(self._free)
            elif entry[2] == avoid and second is None:
                second = heapq.heappop(self._free)
            else:
                found = server
        if second is not None:
            heapq.heappush(self._free, second)
            found = found or self.servers[second[2]]
        return found

    def took(self, server: Server, attempt: int, now_s: float) -> float | None:
        """A slot was taken; when the slot before it was freed, if the two belong together."""
        server.held += 1
        self._books.hold(server.position)
        if server.state is ServerState.TRIAL:
            server.trial = attempt
            server.wake_s = now_s + self._bench.trial_s
            heapq.heappush(self._timers, (server.wake_s, server.position))
        self._offer(server, now_s)
        return server.freed_s.popleft() if server.freed_s else None

    def gave(self, server: Server, freed_s: float, now_s: float) -> None:
        """A slot was given back (the books have been told)."""
        server.held -= 1
        assert server.held >= 0, server.spec
        server.freed_s.append(freed_s)
        self._offer(server, now_s)

    def settle_gaps(self, touched: set[int]) -> None:
        """After refilling: what is still free has another owner than the client, so its gap is not ours."""
        for position in touched:
            self.servers[position].freed_s.clear()

    def answered(self, start: Start, now_s: float) -> None:
        """A prompt was answered: the server is well, if the attempt is younger than its state."""
        server = self.servers[start.server]
        server.answers += 1
        if server.state is ServerState.TRIAL and server.trial == start.attempt:
            self._set(server, ServerState.UP, now_s)
        if server.state is ServerState.UP and start.started_s >= server.since_s:
            server.faults_in_a_row = 0
            server.pause_s = 0.0
            if server.limiter.answered():
                self._changed(server, now_s)

    def faulted(self, start: Start, fault: ServerFault, now_s: float) -> None:
        """A prompt came back with a server fault: count it, cut the limit, or bench the server."""
        server = self.servers[start.server]
        server.faults[fault.kind] += 1
        server.last_error = str(fault)
        on_trial = server.state is ServerState.TRIAL and server.trial == start.attempt
        if not on_trial and (server.state is not ServerState.UP or start.started_s < server.since_s):
            return
        if fault.kind is FaultKind.BUSY:
            pause_s = server.limiter.busy(server.held, fault.retry_after_s, now_s)
            if on_trial:
                self._set(server, ServerState.UP, now_s)
            heapq.heappush(self._timers, (now_s + pause_s, server.position))
            self._changed(server, now_s)
            return
        server.faults_in_a_row += 1
        misrouted = fault.kind is FaultKind.MISROUTED
        if on_trial or misrouted or server.faults_in_a_row >= self._bench.faults:
            self._put_on_bench(server, now_s)

    def refused(self, start: Start, now_s: float) -> None:
        """A prompt fault: the server spoke, so it is well, though it answered nobody."""
        server = self.servers[start.server]
        if server.state is ServerState.TRIAL and server.trial == start.attempt:
            self._set(server, ServerState.UP, now_s)
        if start.started_s >= server.since_s:
            server.faults_in_a_row = 0

    def dropped(self, start: Start, now_s: float) -> None:
        """An attempt was cancelled; if it was the trial, another may be made."""
        server = self.servers[start.server]
        if server.trial == start.attempt:
            server.trial = None
            self._changed(server, now_s)

    def probed(self, position: int, trouble: str | None, *, asked: bool, now_s: float) -> None:
        """A probe came back: None for well, else what the trouble is."""
        server = self.servers[position]
        assert server.state is ServerState.PROBING, server.state
        if trouble is None:
            if asked:
                server.answers += 1
                server.pause_s = 0.0
            self._set(server, ServerState.TRIAL, now_s)
        else:
            server.last_error = trouble
            self._put_on_bench(server, now_s)

    def due(self, now_s: float, *, ask: Callable[[], bool]) -> Sequence[Probe]:
        """Open what the clock opens; the probes to be sent now, asking for a token where ``ask`` says so."""
        if self._ramp_step < RAMP_STEPS:
            self._ramp(now_s)
        if not self._timers or self._timers[0][0] > now_s:
            return ()
        probes = []
        while self._timers and self._timers[0][0] <= now_s:
            _, position = heapq.heappop(self._timers)
            server = self.servers[position]
            if server.state is ServerState.UP:
                self._changed(server, now_s)
            elif server.wake_s <= now_s and server.state is ServerState.BENCHED:
                self._set(server, ServerState.PROBING, now_s)
                probes.append(Probe(server=position, ask=ask()))
            elif server.state is ServerState.TRIAL and server.trial is None:
                self._changed(server, now_s)
            elif server.state is ServerState.TRIAL and server.wake_s <= now_s:
                self._set(server, ServerState.UP, now_s)
        return probes

    def next_timer_s(self) -> float | None:
        """When :meth:`due` should be called again at the latest, or None."""
        wake_s = self._timers[0][0] if self._timers else None
        if self._ramp_step < RAMP_STEPS:
            step_s = self._began_s + self._ramp_s * (self._ramp_step + 1) / RAMP_STEPS
            wake_s = step_s if wake_s is None else min(wake_s, step_s)
        return wake_s

    def check(self) -> None:
        """What must hold of each server between events."""
        for server in self.servers:
            assert 0 <= server.held <= server.spec.limit, (server.spec, server.held)
            assert server.state is not ServerState.BENCHED or server.wake_s > 0
            assert server.trial is None or server.state is ServerState.TRIAL
        assert len(self._free) <= 4 * len(self.servers) + 64

    def _ramp(self, now_s: float) -> None:
        past = (now_s - self._began_s) / self._ramp_s
        # Rounding must not let a timer that fires at a step's very instant fall short of it.
        step = min(RAMP_STEPS, int(past * RAMP_STEPS + 1e-6))
        if step == self._ramp_step:
            return
        self._ramp_step = step
        for server in self.servers:
            limit = server.spec.limit
            # The offset spreads the first slots of a large fleet over the first steps too.
            offset = server.position / len(self.servers)
            opened = min(limit, int(limit * step / RAMP_STEPS + offset))
            server.opened = limit if step == RAMP_STEPS else max(opened, 1 if server.position == 0 else 0)
            self._changed(server, now_s)

    def _put_on_bench(self, server: Server, now_s: float) -> None:
        bench = self._bench
        server.pause_s = min(bench.pause_max_s, server.pause_s * 2 or bench.pause_s)
        self._set(server, ServerState.BENCHED, now_s)
        server.wake_s = now_s + server.pause_s
        heapq.heappush(self._timers, (server.wake_s, server.position))

    def _set(self, server: Server, state: ServerState, now_s: float) -> None:
        server.state = state
        server.since_s = now_s
        server.trial = None
        server.faults_in_a_row = 0
        server.freed_s.clear()
        self._changed(server, now_s)

    def _changed(self, server: Server, now_s: float) -> None:
        self._books.close(server.position, server.closed(now_s))
        self._offer(server, now_s)

    def _offer(self, server: Server, now_s: float) -> None:
        """Put the server among those with room; older entries of it are void."""
        server.version += 1
        if server.room(now_s) > 0:
            entry = (server.held / server.spec.limit, next(self._turns), server.position, server.version)
            heapq.heappush(self._free, entry)
            if len(self._free) > 4 * len(self.servers) + 32:
                self._free = [each for each in self._free if each[3] == self.servers[each[2]].version]
                heapq.heapify(self._free)
