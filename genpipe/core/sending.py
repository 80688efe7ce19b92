"""What is sent next, and where: new prompts, those that servers may have died of, and second attempts."""

import itertools
from collections.abc import Callable, Collection, Sequence

from genpipe.core.books import Books
from genpipe.core.errors import Poison as PoisonFault
from genpipe.core.fleet import Fleet
from genpipe.core.flights import Flights
from genpipe.core.hedging import Hedging
from genpipe.core.histogram import Histogram
from genpipe.core.poison import DEATHS_MAX, Poison
from genpipe.core.server import Server
from genpipe.core.settings import FlowSettings
from genpipe.core.timers import earlier
from genpipe.core.values import Action, ServerSpec, Start
from genpipe.core.vigil import Vigil
from genpipe.core.waiting import LOSSES_MAX, Rng, Waiting, Work


class Sending:
    """The servers, the prompts that wait for them and the attempts in flight, and who goes where.

    Attributes:
        fleet: the servers.
        waiting: prompts to be sent.
        flights: attempts that have not ended.
        poison: the account of deaths.
        vigil: tells slow from dead.
        hedging: second attempts in the tail.
    """

    def __init__(
        self,
        settings: FlowSettings,
        specs: Sequence[ServerSpec],
        books: Books,
        latencies_s: Histogram,
        rng: Rng,
        now_s: float,
        starting: Collection[int],
    ) -> None:
        self.fleet = Fleet(specs, books, settings, rng, now_s, starting)
        self.waiting = Waiting(
            rng,
            backoff_s=settings.backoff_s,
            backoff_max_s=settings.backoff_max_s,
            longest_first=settings.longest_first,
        )
        self.flights = Flights(self.fleet, books)
        self.poison = Poison(self.fleet, self.waiting, alone=settings.alone)
        self.vigil = Vigil(self.fleet, latencies_s, settings)
        self.hedging = Hedging(self.fleet, latencies_s)
        self._hedge = settings.hedge
        self._attempts = itertools.count(1)

    def due(
        self,
        now_s: float,
        actions: list[Action],
        *,
        exhausted: bool,
        give_up: Callable[[Work, PoisonFault], None],
    ) -> None:
        """Pair what waits with free slots.

        Args:
            now_s: the run's clock.
            actions: takes the starts.
            exhausted: no prompt will come any more.
            give_up: called for each prompt that is sent to no server any more.
        """
        waiting, fleet = self.waiting, self.fleet
        if waiting.marked or self.poison.waits:
            last = exhausted and len(waiting) == len(waiting.marked)
            for work, place in self.poison.due(now_s, last=last, idle=last and not self.flights):
                if place is None:
                    give_up(work, self._poisoned(work))
                else:
                    actions.append(self._launch(work, place, now_s))
        while waiting.ready:
            server = fleet.pick(waiting.ready[0].last_server, now_s)
            if server is None:
                break
            actions.append(self._launch(waiting.take(), server, now_s))
        if self._hedge and exhausted and not waiting.ready and self.flights:
            for flight, place in self.hedging.due(self.flights, now_s):
                is_safe = fleet.servers[flight.start.server].has_lived(flight.start.started_s)
                actions.append(start := self._launch(flight.work, place, now_s))
                if not is_safe:
                    # Its server may be about to die of it: not two of these to one server.
                    fleet.mark(place, start, now_s)
        else:
            self.hedging.rest()

    def next_timer_s(self, *, paused: bool) -> float | None:
        """When something is due though nothing has happened, or None.

        Args:
            paused: nothing may be sent now.
        """
        next_s = earlier(self.waiting.wake_s, self.fleet.next_timer_s())
        if self.flights:
            next_s = earlier(next_s, self.vigil.next_timer_s())
        if not paused:
            next_s = earlier(next_s, self.poison.next_timer_s())
            next_s = earlier(next_s, self.hedging.next_timer_s())
        return next_s

    def mark_twins(self, work: Work, now_s: float) -> None:
        """A prompt is marked while a second attempt of it is in flight."""
        if work.live:
            for flight in self.flights:
                server = self.fleet.servers[flight.start.server]
                if flight.work is work:
                    self.fleet.mark(server, flight.start, now_s)

    def _launch(self, work: Work, server: Server, now_s: float) -> Start:
        work.tries += 1
        work.last_server = server.position
        start = Start(
            attempt=next(self._attempts),
            prompt=work.prompt,
            server=server.position,
            tries=work.tries,
            started_s=now_s,
        )
        self.flights.take_off(start, work, now_s)
        if work.marked:
            self.fleet.mark(server, start, now_s, alone=len(work.killed) >= DEATHS_MAX)
        return start

    def _poisoned(self, work: Work) -> PoisonFault:
        places = (*work.killed, *work.doubts)
        if work.losses >= LOSSES_MAX:
            return PoisonFault(f"its connection broke, or its server fell silent, {work.losses} times")
        if len(places) < DEATHS_MAX:
            deaths = work.uncounted + len(work.killed)
            return PoisonFault(f"servers died {deaths} times with this prompt in flight, with all others")
        urls = ", ".join(self.fleet.servers[place].spec.url for place in places)
        what = "died" if not work.doubts else "died or went silent"
        return PoisonFault(f"servers {what} {len(places)} times with this prompt in flight: {urls}")
