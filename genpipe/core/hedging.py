"""The tail: what is late, once nothing else is left to send, is sent to a second server as well."""

from collections.abc import Iterable, Iterator

from genpipe.core.fleet import Fleet
from genpipe.core.flights import Flight
from genpipe.core.histogram import Histogram
from genpipe.core.server import Server, ServerState

LATE_FACTOR = 2.0
"""A request is late at this many times the run's 95th percentile (factor)."""

LATE_MIN_S = 2.0
"""No request is late before this age (seconds): a second attempt would hardly be sooner."""

ANSWERS_MIN = 20
"""Answers before any request counts as late (count)."""

HEDGES_MAX = 2
"""Second attempts of one prompt, one after the other (count)."""

LOOK_EVERY_S = 0.5
"""How often the tail is looked over (seconds); a look costs a walk over what is in flight."""


class Hedging:
    """Picks requests that are late, or sit on a server in doubt, and an idle slot elsewhere for each.

    Attributes:
        count: second attempts that were begun.
    """

    def __init__(self, fleet: Fleet, latencies_s: Histogram) -> None:
        self.count = 0
        self._fleet = fleet
        self._latencies_s = latencies_s
        self._next_s: float | None = None

    def due(self, flights: Iterable[Flight], now_s: float) -> Iterator[tuple[Flight, Server]]:
        """Requests to be sent once more, and where; each must be started before the next is asked for."""
        if self._next_s is not None and now_s < self._next_s:
            return
        self._next_s = now_s + LOOK_EVERY_S
        late_s = self._late_s()
        for flight in list(flights):
            work = flight.work
            if work.live > 1 or work.hedges >= HEDGES_MAX or work.ended or work.marked or flight.fault:
                continue
            here = self._fleet.servers[flight.start.server]
            is_late = late_s is not None and now_s - flight.start.started_s >= late_s
            if not is_late and here.state is ServerState.UP:
                continue
            server = self._fleet.pick(here.position, now_s)
            if server is None:
                return
            is_safe = here.has_lived(flight.start.started_s) or server.may_take_marked
            if server.position != here.position and server.state is ServerState.UP and is_safe:
                self.count += 1
                work.hedges += 1
                yield flight, server

    def next_timer_s(self) -> float | None:
        """When :meth:`due` is to be asked again though nothing has happened; None outside of the tail."""
        return self._next_s

    def rest(self) -> None:
        """There is no tail now."""
        self._next_s = None

    def _late_s(self) -> float | None:
        if self._latencies_s.count < ANSWERS_MIN:
            return None
        p95_s = self._latencies_s.quantile(0.95)
        return None if p95_s is None else max(LATE_MIN_S, LATE_FACTOR * p95_s)
