"""Tells slow from dead: which servers are to be asked what they do, and which requests are given up.

A request is given up when

* its server says, for half of ``silent_s``, that it has nothing to do, as of a time at which it had been
  sent (the server lost it, or its reply was lost);
* its server has been silent for ``silent_s``: no reply of any kind, and no sign of work when it was asked,
  which a status of 200 with the same old numbers is not;
* it is older than the bound learnt from this run, and its server does not have as many requests as we sent
  it; or older than ``stall_s``, where that is set.

A long answer of a server that works is none of these, however long it takes.
"""

import math
from collections.abc import Iterable, Sequence

from genpipe.core import wording
from genpipe.core.errors import FaultKind, ServerFault
from genpipe.core.fleet import Fleet
from genpipe.core.flights import Flight
from genpipe.core.histogram import Histogram
from genpipe.core.server import Server
from genpipe.core.settings import FlowSettings
from genpipe.core.values import Inquire, Vitals

LOOKS_PER_SILENCE = 6
"""A server is asked so many times before it counts as silent (count)."""

LEARNT_MIN_S = 600.0
"""No bound that is learnt is shorter (seconds)."""

LEARNT_FACTOR = 4.0
"""The bound that is learnt is this many times the longest answer of the run (factor)."""

COUNTED_AFTER_S = 0.5
"""What was sent less than this before a server counted may not be in its count (seconds)."""

ANSWERS_MIN = 20
"""Answers before a bound is learnt (count)."""


class Vigil:
    """Watches requests grow old. Flights are told in the order of their starts."""

    def __init__(self, fleet: Fleet, latencies_s: Histogram, settings: FlowSettings) -> None:
        self._fleet = fleet
        self._latencies_s = latencies_s
        self._stall_s = settings.stall_s
        self._silent_s = settings.silent_s
        self._look_s = settings.silent_s / LOOKS_PER_SILENCE
        self._every_s = self._look_s if self._stall_s is None else min(self._look_s, self._stall_s / 4)
        self._next_s = -math.inf

    def next_timer_s(self) -> float:
        """When :meth:`look` is to be called again, while anything is in flight."""
        return self._next_s

    def bound_s(self, flight: Flight) -> float:
        """Age at which a request is too old; infinite where nothing is known yet (seconds)."""
        if self._stall_s is not None:
            return self._stall_s
        if self._latencies_s.count < ANSWERS_MIN:
            return math.inf
        learnt_s = max(LEARNT_MIN_S, LEARNT_FACTOR * self._latencies_s.largest)
        # One that was given up for its age may simply be that long: the next server gets more time.
        return float(learnt_s * 2**flight.work.overdue)

    def look(
        self, flights: Iterable[Flight], now_s: float
    ) -> tuple[list[Inquire], list[tuple[Flight, ServerFault]]]:
        """Servers to be asked what they do, and requests to be given up already."""
        self._next_s = now_s + self._every_s
        oldest_s: dict[int, float] = {}
        too_old: set[int] = set()
        over: list[tuple[Flight, ServerFault]] = []
        for flight in flights:
            position = flight.start.server
            oldest_s.setdefault(position, flight.start.started_s)
            if now_s - flight.start.started_s >= self.bound_s(flight) and flight.fault is None:
                if self._stall_s is None:
                    too_old.add(position)
                else:
                    over.append((flight, self._too_old(flight)))
        inquiries = []
        for position, since_s in oldest_s.items():
            server = self._fleet.servers[position]
            quiet_s = now_s - max(server.heard_s, since_s)
            if not server.vitals.asking and (quiet_s >= self._look_s or position in too_old):
                server.vitals.asking = True
                inquiries.append(Inquire(server=position, timeout_s=self._look_s))
        return inquiries, over

    def inquired(
        self, server: Server, vitals: Vitals, flights: Sequence[Flight], now_s: float
    ) -> list[tuple[Flight, ServerFault]]:
        """A server was asked what it does; which of its ``flights`` are given up now, and why.

        A server that has stalled is benched.
        """
        last = server.vitals
        last.asking = False
        as_of_s = now_s - vitals.age_s
        # The first one has nothing to be held against, and may be of a server that hangs.
        is_first_mark = vitals.mark is not None and last.mark is None
        if vitals.mark is not None and vitals.mark != last.mark:
            if not is_first_mark:
                last.alive_s = now_s
            last.mark = vitals.mark
        if vitals.known != 0:
            last.idle_since_s = None
        elif last.idle_since_s is None or server.heard_s > last.idle_since_s:
            last.idle_since_s = now_s
        flights = [flight for flight in flights if flight.fault is None]
        if not flights:
            return []
        since_s = max(server.heard_s, last.alive_s, flights[0].start.started_s)
        if now_s - since_s >= self._silent_s and not is_first_mark:
            why = vitals.trouble or "it shows the same old numbers"
            if server.in_use:
                self._fleet.bench(server, now_s)
            silence = f"silent for {wording.duration(now_s - since_s)}, and no sign of work: {why}"
            return [
                (flight, ServerFault(f"given up: {silence}", kind=FaultKind.STALLED)) for flight in flights
            ]
        if last.idle_since_s is not None:
            # A request that is made ready for the queue, or a grammar for it, is not in the count yet.
            return [
                (flight, _overdue("its server says that it has nothing to do"))
                for flight in flights
                if flight.start.started_s < as_of_s - COUNTED_AFTER_S
                and now_s - max(last.idle_since_s, flight.start.started_s) >= self._silent_s / 2
            ]
        if vitals.known is not None and vitals.known >= len(flights) and vitals.trouble is None:
            return []
        return [
            (flight, self._too_old(flight))
            for flight in flights
            if now_s - flight.start.started_s >= self.bound_s(flight)
        ]

    def _too_old(self, flight: Flight) -> ServerFault:
        if self._stall_s is not None:
            why = f"given up: no answer within request.stall_s = {self._stall_s:g} s"
            # Where nothing at all has come since it was sent, the server may hang because of it.
            has_come = self._fleet.servers[flight.start.server].alive_s > flight.start.started_s
            return ServerFault(why, kind=FaultKind.OVERDUE if has_come else FaultKind.STALLED)
        return _overdue(f"no answer within {wording.duration(self.bound_s(flight))}, learnt from this run")


def _overdue(why: str) -> ServerFault:
    return ServerFault(f"given up: {why}", kind=FaultKind.OVERDUE)
