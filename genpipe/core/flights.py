"""The attempts in flight: whose slots they hold, and which of them are to be cancelled."""

from collections.abc import Iterator

from genpipe.core.books import Books
from genpipe.core.errors import ServerFault
from genpipe.core.fleet import Fleet
from genpipe.core.values import Cancel, Start
from genpipe.core.waiting import Work


class Flight:
    """One attempt in flight, or landed and not yet examined.

    Attributes:
        freed_s: when the slot was last freed, where this attempt is the refill of it.
        landed_s: when its last byte came, or None.
        fault: why it was called off, or None; until it has ended its answer is still welcome.
    """

    __slots__ = ("fault", "freed_s", "landed_s", "start", "work")

    def __init__(self, start: Start, work: Work, freed_s: float | None) -> None:
        self.start = start
        self.work = work
        self.freed_s = freed_s
        self.landed_s: float | None = None
        self.fault: ServerFault | None = None


class Flights:
    """All attempts that were started and have not ended."""

    def __init__(self, fleet: Fleet, books: Books) -> None:
        self._fleet = fleet
        self._books = books
        self._flights: dict[int, Flight] = {}
        self._freed: set[int] = set()
        self._cancelled: set[int] = set()
        self._to_cancel: list[int] = []

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Flight]:
        """The attempts whose replies have not landed, oldest first."""
        return (flight for flight in self._flights.values() if flight.landed_s is None)

    @property
    def all_cancelled(self) -> bool:
        """Whether there is none that could still be cancelled."""
        return len(self._cancelled) >= len(self._flights)

    @property
    def open_works(self) -> int:
        """Prompts in flight that have not ended, each counted once; costs a walk over all."""
        return len({id(flight.work) for flight in self._flights.values() if not flight.work.ended})

    def take_off(self, start: Start, work: Work, now_s: float) -> Flight:
        """An attempt begins; the server is known to have a free slot."""
        freed_s = self._fleet.took(self._fleet.servers[start.server], start.attempt, now_s)
        flight = self._flights[start.attempt] = Flight(start, work, freed_s)
        work.live += 1
        return flight

    def land(self, start: Start, wire_s: float, last_s: float, now_s: float) -> None:
        """The last byte came at ``last_s``: the slot is free, the attempt has not ended yet."""
        flight = self._flights[start.attempt]
        assert flight.landed_s is None
        flight.landed_s = last_s
        self._fleet.servers[start.server].heard_s = now_s
        self._free_slot(flight, wire_s, last_s, now_s, lost=False)

    def end(self, start: Start, wire_s: float | None, now_s: float, *, lost: bool = False) -> Flight:
        """An attempt has ended; where it had not landed, its slot is free from now on."""
        flight = self._flights.pop(start.attempt)
        self._cancelled.discard(start.attempt)
        flight.work.live -= 1
        if flight.landed_s is None:
            self._free_slot(flight, wire_s, now_s, now_s, lost=lost)
        return flight

    def call_off(self, flight: Flight, fault: ServerFault | None) -> None:
        """Have an attempt cancelled, for this fault of its server or because its answer is not needed."""
        number = flight.start.attempt
        if number not in self._cancelled and number in self._flights:
            flight.fault = fault
            self._cancelled.add(number)
            self._to_cancel.append(number)

    def call_off_twins(self, work: Work) -> None:
        """A prompt has ended: what else is in flight for it is cancelled."""
        if work.live:
            for flight in [each for each in self if each.work is work]:
                self.call_off(flight, None)

    def call_off_all(self) -> None:
        """Have all attempts cancelled that were not yet."""
        for number in self._flights:
            if number not in self._cancelled:
                self._cancelled.add(number)
                self._to_cancel.append(number)

    def due_cancels(self) -> list[Cancel]:
        """A cancel for each attempt that was called off and has not ended."""
        if not self._to_cancel:
            return []
        numbers, self._to_cancel = self._to_cancel, []
        return [Cancel(attempt=number) for number in numbers if number in self._flights]

    def settle_gaps(self) -> None:
        """Slots that were freed and were not refilled in the same step are no refill gap."""
        if self._freed:
            self._fleet.settle_gaps(self._freed)
            self._freed.clear()

    def _free_slot(
        self, flight: Flight, wire_s: float | None, last_s: float, now_s: float, *, lost: bool
    ) -> None:
        """Give the slot back as of ``last_s`` and say whose its time was.

        Where ``wire_s`` is not known, all of it was the server's: as ``wire``, or as ``down`` where it was
        lost before it got there.
        """
        start = flight.start
        started_s = start.started_s
        assert started_s <= last_s <= now_s, (started_s, last_s, now_s)
        lost = lost and wire_s is None
        if wire_s is None:
            wire_s = last_s if lost else started_s
        else:
            assert started_s <= wire_s <= last_s, (started_s, wire_s, last_s)
            if flight.freed_s is not None:
                self._fleet.gaps_s.add(wire_s - flight.freed_s)
        self._books.release(
            start.server,
            held_s=now_s - started_s,
            wire_s=last_s - wire_s,
            late_s=now_s - last_s,
            lost=lost,
        )
        self._fleet.gave(self._fleet.servers[start.server], start.attempt, last_s, now_s)
        self._freed.add(start.server)
