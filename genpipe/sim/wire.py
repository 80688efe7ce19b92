"""Between the scheduler and the virtual servers: attempts, probes and inquiries, and what becomes of each."""

import random
from collections.abc import Callable
from functools import partial
from typing import Protocol

from genpipe.core.errors import AttemptError, FaultKind, PromptFault, ServerFault
from genpipe.core.flow import Core
from genpipe.core.values import Inquire, Probe, Start
from genpipe.sim.laws import Ill, ServerLaw
from genpipe.sim.ledger import Ledger
from genpipe.sim.talks import Script
from genpipe.sim.virtual import VirtualServer
from genpipe.sim.world import Fate, World

CONNECT_TIMEOUT_S = 10.0
"""How long a connection is waited for where packets vanish (seconds)."""

LEARNT_MIN_S = 600.0
"""No request is given up as too old before this, unless that is set (seconds)."""


class Host(Protocol):
    """Where things happen in their order."""

    @property
    def now_s(self) -> float:
        """The run's clock."""
        ...

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Have something happen then, after what is to happen at that time already."""
        ...

    def pump(self) -> None:
        """Carry out what is due."""
        ...

    def tell(self, text: str) -> None:
        """Note something for the story."""
        ...


class Wire:
    """Carries requests to servers and answers back.

    Attributes:
        servers: by position.
        busy_s: how long attempts took that began once all servers were quiet.
        calls: attempts that were called off.
    """

    def __init__(
        self,
        host: Host,
        world: World,
        core: Core,
        ledger: Ledger,
        script: Script,
    ) -> None:
        self.servers: list[VirtualServer] = []
        self.busy_s = 0.0
        self.calls: set[int] = set()
        self._host, self._world, self._core, self._ledger = host, world, core, ledger
        self._script = script
        self._rng = random.Random(world.seed)
        self._marks: dict[int, str] = {}

    def join(self, server: VirtualServer) -> None:
        """One more server."""
        self.servers.append(server)
        if server.law.crashes:
            for start_s, end_s in server.law.outages:
                if start_s >= self._host.now_s:
                    self._host.at(start_s, lambda end_s=end_s: self._die(server, end_s))  # type: ignore[misc]

    # ---- attempts ----

    def start(self, start: Start) -> None:
        """An attempt begins."""
        host, now_s, law = self._host, self._host.now_s, self.servers[start.server].law
        server = self.servers[start.server]
        wire_s = now_s + law.connect_s
        ill = server.ill(now_s)
        if server.refuses(now_s):
            refused = ServerFault("refused", kind=FaultKind.UNREACHABLE)
            host.at(now_s + 0.001, lambda: self._failed(start, refused, None))
            return
        if ill is Ill.HOLE:
            if self._rng.random() < 0.5:
                fault = ServerFault("no connection", kind=FaultKind.UNREACHABLE)
                host.at(now_s + CONNECT_TIMEOUT_S, lambda: self._failed(start, fault, None))
            return
        drawn = self._drawn_fault(start)
        if drawn is None and self._swallows(law):
            self._ledger.counts["swallowed"] += 1
            server.swallow(start)
            return
        server.take(start, now_s)
        if isinstance(drawn, ServerFault) and drawn.kind is FaultKind.UNREACHABLE:
            host.at(now_s + 0.001, lambda: self._end(start, lambda: self._failed(start, drawn, None)))
            return
        self._take_its_course(start, drawn, wire_s)

    def _swallows(self, law: ServerLaw) -> bool:
        quiet = law.swallows == 0 or self._host.now_s >= self._world.quiet_s
        return not quiet and self._rng.random() < law.swallows

    def _take_its_course(self, start: Start, drawn: AttemptError | None, wire_s: float) -> None:
        host, law = self._host, self.servers[start.server].law
        latency_s = law.latency_s(self._rng)
        if self._script.is_long(start.prompt):
            latency_s += self._world.long_s
        broken = isinstance(drawn, ServerFault) and drawn.kind is FaultKind.LOST
        if broken:
            latency_s *= self._rng.random()
        fate = self._script.fate(start.prompt)
        if fate in (Fate.KILLS, Fate.HANGS) and drawn is None:
            host.at(law.done_s(wire_s, self._world.kill_s), lambda: self._harm(start))
        elif drawn is not None and (broken or self._rng.random() < 0.7 or isinstance(drawn, PromptFault)):
            failed_s = law.done_s(wire_s, latency_s if broken else 0.002)
            host.at(failed_s, lambda: self._end(start, lambda: self._failed(start, drawn, wire_s)))
        else:
            last_s = law.done_s(wire_s, latency_s)
            late_s = self._rng.uniform(0.0, self._world.handle_s)
            host.at(last_s, lambda: self._end(start, lambda: self._arrived(start, wire_s, late_s, drawn)))

    def _drawn_fault(self, start: Start) -> AttemptError | None:
        world, now_s, server = self._world, self._host.now_s, self.servers[start.server]
        law = server.law
        if law.busy_over is not None and server.known(now_s) >= law.busy_over:
            pause_s = law.retry_after_s
            return ServerFault("queue full", kind=FaultKind.BUSY, status=503, retry_after_s=pause_s)
        if now_s < world.quiet_s:
            for kind, chance in law.faults.items():
                if self._rng.random() < chance:
                    return ServerFault(f"drawn {kind}", kind=kind)
        match self._script.fate(start.prompt):
            case Fate.REFUSED:
                return PromptFault("bad request", status=400)
            case Fate.CURSED:
                return ServerFault("internal error", kind=FaultKind.BROKEN, status=500)
        return None

    def _end(self, start: Start, then: Callable[[], None]) -> None:
        """A server is done with a request, if it still has it and its words arrive."""
        server, now_s = self.servers[start.server], self._host.now_s
        if server.hung_s is not None or not server.drop(start.attempt, now_s):
            return
        if server.ill(now_s) is not Ill.HOLE:
            then()

    def _arrived(self, start: Start, wire_s: float, late_s: float, fault: AttemptError | None) -> None:
        """The last byte has come; the client looks at it later."""
        last_s = self._host.now_s
        self._host.at(last_s + late_s, lambda: self._landed(start, wire_s, last_s, fault))

    def _landed(self, start: Start, wire_s: float, last_s: float, fault: AttemptError | None) -> None:
        if not self._ledger.over(start):
            return
        self._count(start)
        self._ledger.alive(start.server, self._host.now_s)
        self._core.landed(start, wire_s, last_s, self._host.now_s)
        # The real driver refills the slot before it looks at the reply.
        self._host.pump()
        if fault is not None:
            self._fail(start, fault, real=False)
            return
        self._ledger.answered(start)
        try:
            answer = self._script.answer(start)
        except PromptFault as stuck:
            self._core.failed(start, stuck, self._host.now_s)
        else:
            self._core.answered(start, answer, self._host.now_s)

    def _failed(self, start: Start, fault: AttemptError, wire_s: float | None, *, real: bool = False) -> None:
        if self._ledger.over(start):
            self._count(start)
            fault.wire_s = wire_s
            self._fail(start, fault, real=real)

    def _fail(self, start: Start, fault: AttemptError, *, real: bool) -> None:
        if fault.status is not None:
            self._ledger.alive(start.server, self._host.now_s)
        self._ledger.failed(start, fault, self._host.now_s, real=real)
        if isinstance(fault, ServerFault) and fault.kind is FaultKind.BUSY:
            server = self._core.fleet.servers[start.server]
            if server.in_use and not server.on_trial and start.started_s >= server.since_s:
                pause_s = 1.0 if fault.retry_after_s is None else fault.retry_after_s
                self._ledger.rests(start.server, pause_s, self._host.now_s)
        self._core.failed(start, fault, self._host.now_s)

    def _count(self, start: Start) -> None:
        if start.started_s >= self._world.quiet_s:
            self.busy_s += self._host.now_s - start.started_s

    # ---- attempts that are called off ----

    def called_off(self, attempt: int) -> None:
        """An attempt is to be cancelled; its answer may be there in the same instant.

        Raises:
            AssertionError: there is no reason for that.
        """
        if attempt not in self._ledger.open:
            # Its reply has landed, and is looked at.
            return
        flight = next(each for each in self._core.flights() if each.start.attempt == attempt)
        start, fault = flight.start, flight.fault
        self._check_reason(start, fault)
        self.calls.add(attempt)
        host, server, now_s = self._host, self.servers[start.server], self._host.now_s
        wire_s = start.started_s + server.law.connect_s
        has_it = attempt in server.requests and server.well(now_s) and wire_s <= now_s
        innocent = self._script.fate(start.prompt) is Fate.ANSWERED
        if has_it and innocent and self._rng.random() < self._world.tardy:
            lost = ServerFault("connection lost", kind=FaultKind.LOST)
            good = self._rng.random() < 0.7
            answer = partial(self._landed, start, wire_s, now_s, None)
            host.at(
                now_s, lambda: self._end(start, answer if good else lambda: self._failed(start, lost, wire_s))
            )
        host.at(now_s, lambda: self._cancelled(start, fault))

    def _check_reason(self, start: Start, fault: ServerFault | None) -> None:
        index, server, now_s = start.prompt.index, self.servers[start.server], self._host.now_s
        if fault is None:
            assert self._core.stopping or self._ledger.is_over(start), f"attempt {start.attempt} called off"
            return
        settings, age_s = self._core.settings, now_s - start.started_s
        lost = start.attempt not in server.requests
        old = age_s >= (LEARNT_MIN_S if settings.stall_s is None else settings.stall_s)
        if fault.kind is FaultKind.STALLED:
            just = lost or server.was_ill(now_s - 2 * settings.silent_s, now_s)
            just |= old and settings.stall_s is not None
        else:
            just = lost or old
        self._ledger.counts[f"called off: {fault.kind}"] += 1
        self._host.tell(f"prompt {index} is given up at server {start.server}: {fault}")
        assert just, f"prompt {index} called off at server {start.server} after {age_s:.0f} s: {fault}"

    def _cancelled(self, start: Start, fault: ServerFault | None) -> None:
        if not self._ledger.over(start):
            return
        self._count(start)
        server, now_s = self.servers[start.server], self._host.now_s
        real = start.attempt not in server.requests or server.was_ill(0.0, now_s)
        server.abort(start.attempt, now_s + self._rng.uniform(0, self._core.settings.abort_s), now_s)
        if not self._core.stopping:
            self._ledger.aborted(start, now_s)
        if fault is not None:
            self._ledger.failed(start, fault, now_s, real=real)
        self._core.cancelled(start, now_s)

    # ---- deaths ----

    def _harm(self, start: Start) -> None:
        """A poison prompt has been in work for long enough."""
        server, world, now_s = self.servers[start.server], self._world, self._host.now_s
        if start.attempt not in server.requests or server.hung_s is not None:
            return
        index = start.prompt.index
        self._ledger.harmed(index, start.server)
        if self._script.fate(start.prompt) is Fate.KILLS:
            self._host.tell(f"prompt {index} kills server {start.server}")
            self._die(server, now_s + world.revive_s)
        else:
            self._host.tell(f"prompt {index} hangs server {start.server}")
            server.hang(now_s)
            deaths = server.deaths
            self._host.at(now_s + world.watchdog_s, lambda: self._watchdog(server, deaths))

    def _watchdog(self, server: VirtualServer, deaths: int) -> None:
        if server.deaths == deaths and server.hung_s is not None:
            self._die(server, self._host.now_s + self._world.revive_s)

    def _die(self, server: VirtualServer, until_s: float) -> None:
        self._ledger.counts["deaths"] += 1
        lost = server.die(until_s)
        self._host.tell(f"server {self.servers.index(server)} dies with {len(lost)} in flight")
        for start in lost:
            wire_s = start.started_s + server.law.connect_s
            sent = wire_s <= self._host.now_s
            kind = FaultKind.LOST if sent else FaultKind.UNREACHABLE
            self._break(start, ServerFault("connection lost", kind=kind), wire_s if sent else None)

    def _break(self, start: Start, fault: ServerFault, wire_s: float | None) -> None:
        self._host.at(self._host.now_s, lambda: self._failed(start, fault, wire_s, real=True))

    # ---- looks at servers ----

    def probe(self, probe: Probe) -> None:
        """A server is looked at."""
        began_s, server = self._host.now_s, self.servers[probe.server]
        takes_s, checkup = server.checkup(probe, self._rng, began_s)
        deaths = server.deaths

        def back() -> None:
            found = checkup
            if server.deaths != deaths and not checkup.refused:
                found = type(checkup)(trouble="connection lost")
            self._ledger.looked(probe.server, found, began_s, self._host.now_s, self._core)
            self._core.probed(probe.server, found, self._host.now_s)

        self._host.at(began_s + takes_s, back)

    def inquire(self, inquire: Inquire) -> None:
        """A silent server is asked what it does."""
        server = self.servers[inquire.server]
        takes_s, vitals = server.vitals(inquire, self._host.now_s)
        self._ledger.counts["inquiries"] += 1

        def back() -> None:
            if vitals.mark is not None and vitals.mark != self._marks.get(inquire.server):
                self._marks[inquire.server] = vitals.mark
                self._ledger.alive(inquire.server, self._host.now_s)
            self._core.inquired(inquire.server, vitals, self._host.now_s)

        self._host.at(self._host.now_s + takes_s, back)
