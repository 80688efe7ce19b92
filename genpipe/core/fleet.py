"""The servers as the scheduler sees them: who may take a prompt, who is benched, who is to be probed."""

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from genpipe.core.books import Books
from genpipe.core.errors import FaultKind, ServerFault
from genpipe.core.histogram import Histogram
from genpipe.core.server import Server, ServerState
from genpipe.core.settings import FlowSettings
from genpipe.core.values import Checkup, Probe, ServerSpec, Start
from genpipe.core.waiting import Rng

__all__ = ["Fleet", "Server", "ServerState"]

RAMP_STEPS = 50
"""A ramp opens its slots in this many steps, so that a large fleet costs no more timers than a small one."""

JUDGED = frozenset({FaultKind.BROKEN, FaultKind.OVERDUE, FaultKind.STALLED})
"""Faults that may be the server's or the prompt's."""

TRIALS_FAILED = 2
"""After so many such faults in trials, a token of our own tells whose they are (count)."""

BUSY_JITTER = 1.25
"""A server that is busy is left alone for its pause times 1 to this (factor)."""


class Fleet:
    """All servers: the next free slot, benching, probes and the ramp, in time that is told.

    A server is benched after ``bench.faults`` faults in a row. A probe decides when it may have one real
    prompt as a trial; once that is answered (or ``bench.trial_s`` old) the other slots open again.

    Attributes:
        servers: in the order in which they came; a position never changes its address.
        gaps_s: refill gaps of slots, from a reply's last byte to the next request on the wire (seconds).
    """

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        books: Books,
        settings: FlowSettings,
        rng: Rng,
        now_s: float,
        starting: Collection[int] = (),
    ) -> None:
        """Begin.

        Args:
            specs: the servers.
            books: whose each slot-second is.
            settings: the scheduler's numbers.
            rng: where jitter comes from.
            now_s: the run's clock.
            starting: positions of those that have not been seen well yet.
        """
        self.servers = [Server(position, spec, now_s) for position, spec in enumerate(specs)]
        self.gaps_s = Histogram(per_octave=16, least=1e-6)
        self._books = books
        self._bench = settings.bench
        self._abort_s = settings.abort_s
        self._rng = rng
        self._turns = itertools.count()
        self._free: list[tuple[int, float, int, int, int]] = []
        self._timers: list[tuple[float, int]] = []
        self._began_s = now_s
        self._ramp_s = settings.ramp_s
        self._ramp_step = RAMP_STEPS
        for position in starting:
            self._begin(self.servers[position], now_s)
        if self._ramp_s > 0:
            self._ramp_step = -1
            self._ramp(now_s)
        for server in self.servers:
            self._changed(server, now_s)

    def room(self, now_s: float) -> int:
        """Slots that could take a prompt now, over all servers; costs a walk over them."""
        return sum(max(0, server.room(now_s)) for server in self.servers)

    @property
    def slots(self) -> int:
        """Slots of all servers that are in the run."""
        return sum(server.spec.limit for server in self.servers if server.state is not ServerState.GONE)

    def usable(self) -> bool:
        """Whether any server is in use, and not only to turn prompts away."""
        return any(server.in_use and (server.held or not server.turned_away) for server in self.servers)

    def pick(self, avoid: int | None, now_s: float) -> Server | None:
        """The emptiest server with room, by share of its limit; suspects last, ``avoid`` after all others."""
        second: tuple[int, float, int, int, int] | None = None
        found: Server | None = None
        while self._free and found is None:
            entry = self._free[0]
            server = self.servers[entry[3]]
            if entry[4] != server.version or server.room(now_s) <= 0:
                heapq.heappop(self._free)
            elif entry[3] == avoid and second is None:
                second = heapq.heappop(self._free)
            else:
                found = server
        if second is not None:
            heapq.heappush(self._free, second)
            found = found or self.servers[second[3]]
        return found

    def took(self, server: Server, attempt: int, now_s: float) -> float | None:
        """A slot was taken; when the slot before it was freed, if the two belong together."""
        server.held += 1
        self._books.hold(server.position)
        if server.on_trial:
            server.trial = attempt
            server.wake_s = now_s + self._bench.trial_s
            heapq.heappush(self._timers, (server.wake_s, server.position))
        self._offer(server, now_s)
        return server.freed_s.popleft() if server.freed_s else None

    def gave(self, server: Server, attempt: int, freed_s: float, now_s: float) -> None:
        """A slot was given back (the books have been told)."""
        server.held -= 1
        server.over = max(0, server.over - 1)
        assert server.held >= 0, server.spec
        server.freed_s.append(freed_s)
        if server.marked.pop(attempt, None) is not None:
            server.alone = False
            self._changed(server, now_s)
        else:
            self._offer(server, now_s)

    def mark(self, server: Server, start: Start, now_s: float, *, alone: bool = False) -> None:
        """A prompt that servers may have died of was sent there, perhaps to have the whole server."""
        server.marked[start.attempt] = start.started_s
        server.alone = alone
        self._changed(server, now_s)

    def hold_back(self, server: Server, now_s: float) -> None:
        """A request was given up: its slot stays shut until the server has noticed that nobody waits."""
        until_s = now_s + self._abort_s
        server.aborts.append(until_s)
        if server.freed_s:
            server.freed_s.pop()
        heapq.heappush(self._timers, (until_s, server.position))
        self._changed(server, now_s)

    def settle_gaps(self, touched: set[int]) -> None:
        """After refilling: what is still free has another owner than the client, so its gap is not ours."""
        for position in touched:
            self.servers[position].freed_s.clear()

    # ---- what attempts say of their servers ----

    def answered(self, start: Start, now_s: float) -> None:
        """A prompt was answered: the server is well, if the attempt is younger than its state."""
        server = self.servers[start.server]
        server.answers += 1
        server.trials_failed = 0
        server.turned_away = False
        if server.on_trial and server.trial == start.attempt:
            self._set(server, ServerState.UP, now_s)
        if server.in_use and start.started_s >= server.since_s:
            server.pause_s = 0.0
            self._trust(server, now_s)
            if server.limiter.answered():
                self._changed(server, now_s)

    def faulted(self, start: Start, fault: ServerFault, now_s: float) -> None:
        """A prompt came back with a server fault: count it, cut the limit, or bench the server."""
        server = self.servers[start.server]
        server.faults[fault.kind] += 1
        server.last_error = str(fault)
        is_gone = fault.kind in (FaultKind.LOST, FaultKind.STALLED)
        if is_gone and server.in_use and server.check_s is None:
            # Completions will say how the server is; whether its process has ended, only a look at it.
            self._check_soon(server, now_s)
        is_trial = server.on_trial and server.trial == start.attempt
        if not is_trial and (not server.in_use or server.on_trial or start.started_s < server.since_s):
            return
        if fault.kind is FaultKind.BUSY:
            jitter = self._rng.uniform(1.0, BUSY_JITTER)
            pause_s = server.limiter.busy(server.held, fault.retry_after_s, now_s, jitter=jitter)
            server.turned_away = True
            if is_trial:
                self._set(server, ServerState.UP, now_s)
            heapq.heappush(self._timers, (now_s + pause_s, server.position))
            self._changed(server, now_s)
            return
        server.faults_in_a_row += 1
        server.trials_failed += is_trial and fault.kind in JUDGED
        misrouted = fault.kind is FaultKind.MISROUTED
        if is_trial or misrouted or server.faults_in_a_row >= self._bench.faults:
            self.bench(server, now_s)
            return
        if server.state is ServerState.UP:
            server.state = ServerState.SUSPECT
            self._offer(server, now_s)

    def refused(self, start: Start, now_s: float) -> None:
        """A prompt fault: the server spoke, so it is well, though it answered nobody."""
        server = self.servers[start.server]
        if server.on_trial and server.trial == start.attempt:
            self._set(server, ServerState.UP, now_s)
        if start.started_s >= server.since_s:
            self._trust(server, now_s)

    def dropped(self, start: Start, now_s: float) -> None:
        """An attempt was cancelled; if it was the trial, another may be made."""
        server = self.servers[start.server]
        if server.trial == start.attempt:
            server.trial = None
            self._changed(server, now_s)

    def bench(self, server: Server, now_s: float) -> None:
        """Take a server out of use, until a probe finds it well."""
        bench = self._bench
        server.pause_s = min(bench.pause_max_s, server.pause_s * 2 or bench.pause_s)
        if server.state is not ServerState.STARTING:
            self._set(server, ServerState.BENCHED, now_s)
        server.wake_s = now_s + server.pause_s
        heapq.heappush(self._timers, (server.wake_s, server.position))

    # ---- probes ----

    def probed(self, position: int, checkup: Checkup, now_s: float) -> None:
        """A probe came back."""
        server = self.servers[position]
        assert server.probing, server.state
        server.probing = False
        if checkup.trouble is not None:
            server.last_error = checkup.trouble
        if server.in_use:
            # It was looked at though it is in use: only what is certain takes it out.
            if checkup.refused or checkup.alien:
                self.bench(server, now_s)
            elif checkup.trouble is not None:
                self._check_soon(server, now_s)
            elif server.check_s is not None:
                # A connection broke while it was looked at, and the timer of that has passed.
                heapq.heappush(self._timers, (max(now_s, server.check_s), position))
        elif server.state is ServerState.GONE:
            return
        elif checkup.trouble is not None:
            self.bench(server, now_s)
        else:
            if checkup.asked:
                server.answers += 1
                server.trials_failed = 0
                server.pause_s = 0.0
            # A token of our own is as good as a prompt's trial.
            self._set(server, ServerState.SUSPECT, now_s, on_trial=not checkup.asked)

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
            while server.aborts and server.aborts[0] <= now_s:
                server.aborts.popleft()
            if server.on_trial and server.trial is not None and server.wake_s <= now_s:
                self._set(server, ServerState.SUSPECT, now_s)
            elif self._is_to_be_probed(server, now_s):
                server.probing = True
                server.check_s = None
                is_in_question = server.trials_failed >= TRIALS_FAILED
                probes.append(Probe(server=position, ask=not server.in_use and (is_in_question or ask())))
            self._changed(server, now_s)
        return probes

    @staticmethod
    def _is_to_be_probed(server: Server, now_s: float) -> bool:
        if server.probing or server.state is ServerState.GONE:
            return False
        if server.in_use:
            return server.check_s is not None and server.check_s <= now_s
        return server.wake_s <= now_s

    def next_timer_s(self) -> float | None:
        """When :meth:`due` should be called again at the latest, or None."""
        wake_s = self._timers[0][0] if self._timers else None
        if self._ramp_step < RAMP_STEPS:
            step_s = self._began_s + self._ramp_s * (self._ramp_step + 1) / RAMP_STEPS
            wake_s = step_s if wake_s is None else min(wake_s, step_s)
        return wake_s

    # ---- changes of a live run ----

    def set_limit(self, url: str, limit: int, now_s: float) -> Server:
        """Another limit from now on; for an address that is new, a server that joins; with 0, it leaves.

        What is in flight beyond a limit, or at a server that leaves, still ends. A server that joins is given
        prompts once it was seen well.
        """
        server = next((each for each in self.servers if each.spec.url == url), None)
        if server is None:
            server = Server(len(self.servers), ServerSpec(url=url, limit=limit), now_s)
            self.servers.append(server)
            self._books.add(limit)
            self._begin(server, now_s)
        elif limit == 0:
            self._set(server, ServerState.GONE, now_s)
            server.over = server.held
            self._books.resize(server.position, 0)
        else:
            if server.state is ServerState.GONE:
                self._begin(server, now_s)
            self._resize(server, limit, now_s)
        return server

    def check(self) -> None:
        """What must hold of each server between events."""
        for server in self.servers:
            assert 0 <= server.held <= server.spec.limit + server.over, (server.spec, server.held)
            assert server.state is not ServerState.BENCHED or server.wake_s > 0
            assert server.trial is None or server.on_trial
            assert not server.on_trial or server.state is ServerState.SUSPECT
            assert not server.alone or (len(server.marked) == 1 and server.held == 1)
            assert len(server.marked) <= server.held
        assert len(self._free) <= 4 * len(self.servers) + 64

    # ---- steps ----

    def _begin(self, server: Server, now_s: float) -> None:
        server.pause_s = 0.0
        self._set(server, ServerState.STARTING, now_s)
        server.opened = server.spec.limit
        server.wake_s = now_s
        heapq.heappush(self._timers, (now_s, server.position))

    def _check_soon(self, server: Server, now_s: float) -> None:
        server.check_s = now_s + self._bench.pause_s
        heapq.heappush(self._timers, (server.check_s, server.position))

    def _resize(self, server: Server, limit: int, now_s: float) -> None:
        was_open = server.opened == server.spec.limit
        server.spec = replace(server.spec, limit=limit)
        server.limiter.resize(limit)
        server.opened = limit if was_open else min(server.opened, limit)
        server.over = max(0, server.held - limit)
        self._books.resize(server.position, limit)
        self._changed(server, now_s)

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

    def _trust(self, server: Server, now_s: float) -> None:
        server.faults_in_a_row = 0
        if server.state is ServerState.SUSPECT and not server.on_trial:
            server.state = ServerState.UP
            self._offer(server, now_s)

    def _set(self, server: Server, state: ServerState, now_s: float, *, on_trial: bool = False) -> None:
        was_in_use = server.in_use
        server.state = state
        if was_in_use and not server.in_use:
            server.left_s = now_s
        server.on_trial = on_trial
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
            rank = int(server.state is ServerState.SUSPECT)
            share = server.held / server.spec.limit
            heapq.heappush(self._free, (rank, share, next(self._turns), server.position, server.version))
            if len(self._free) > 4 * len(self.servers) + 32:
                self._free = [each for each in self._free if each[4] == self.servers[each[3]].version]
                heapq.heapify(self._free)
