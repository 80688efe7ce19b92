"""The scheduler: what happened goes in, what is due comes out. No I/O, no clock, no task.

A prompt is always in exactly one place: ready, sleeping (backoff), marked (a server may have died of it),
in flight, held (ended, not yet durable), done, given up, or returned (stopped before it was answered; a
later run asks it again).
"""

from collections.abc import Collection, Iterator, Sequence

from genpipe.core.books import Books
from genpipe.core.errors import AttemptError
from genpipe.core.eta import Pace
from genpipe.core.flights import Flight
from genpipe.core.outage import Outage
from genpipe.core.outbox import bad_line
from genpipe.core.outcomes import Outcomes
from genpipe.core.saving import Saving
from genpipe.core.sending import Sending
from genpipe.core.settings import FlowSettings
from genpipe.core.sums import Sums
from genpipe.core.timers import earlier
from genpipe.core.values import (
    Action,
    Answer,
    Checkup,
    Chunk,
    Group,
    Measure,
    Read,
    ServerSpec,
    Space,
    Start,
    Vitals,
)
from genpipe.core.waiting import Rng

__all__ = ["Core", "FlowSettings"]


MARKED_PER_READY = 4
"""Prompts that servers may have died of may be so many times those that are kept ready (factor)."""


class Core:
    """One run's scheduler. Told what happened, it answers :meth:`due` with what to do.

    Every event takes ``now_s``, which never goes back. After each event the driver calls :meth:`due`.

    Attributes:
        pace: rates and the ETA.
        fleet: the servers.
        outage: whether no server can be used.
        quality: what is odd about the answers.
        hedging: second attempts near the end.
        books: whose each slot-second was.
        stopping: no more is started.
        refusal: why a guard stopped the run, or None.
    """

    def __init__(
        self,
        settings: FlowSettings,
        servers: Sequence[ServerSpec],
        rng: Rng,
        now_s: float,
        *,
        starting: Collection[int] = (),
    ) -> None:
        """Begin.

        Args:
            settings: the scheduler's numbers.
            servers: the fleet.
            rng: where jitter comes from.
            now_s: the run's clock.
            starting: positions of servers that have not been seen well yet.
        """
        self.settings = settings
        self.books = Books([spec.limit for spec in servers], now_s)
        self.pace = Pace(now_s)
        self._sending = Sending(settings, servers, self.books, self.pace.latencies_s, rng, now_s, starting)
        self.fleet = self._sending.fleet
        self.hedging = self._sending.hedging
        self.outage = Outage(self.fleet, settings.give_up_s)
        self._saving = Saving(settings)
        self._outcomes = Outcomes(settings, self._sending, self._saving, self.pace, self.outage)
        self.quality = self._outcomes.quality
        self.offered_total = 0
        self.exhausted = self.stopping = False
        self.refusal: str | None = None
        self._now_s = now_s
        self._waiting = self._sending.waiting
        self._flights = self._sending.flights
        self._disk, self._outbox = self._saving.disk, self._saving.outbox
        self._reading = False
        self._slots = self._ready_max = self._held_max = 0
        self._count_slots()
        self._cancel_at_s: float | None = None

    # ---- what happened ----

    def offered(self, chunk: Chunk, now_s: float) -> None:
        """A read came back."""
        self._tick(now_s)
        assert self._reading
        self._reading = False
        self.offered_total += len(chunk.prompts) + len(chunk.bad)
        self._waiting.add(chunk.prompts)
        for bad in chunk.bad:
            self._saving.hold(bad_line(bad))
        self.exhausted |= chunk.exhausted

    def landed(self, start: Start, wire_s: float, last_s: float, now_s: float) -> None:
        """The last byte of a reply came at ``last_s``; the slot is free, whatever the reply holds.

        :meth:`answered` or :meth:`failed` must follow for the same attempt.
        """
        self._tick(now_s)
        self._flights.land(start, wire_s, last_s, now_s)

    def answered(self, start: Start, answer: Answer, now_s: float) -> None:
        """A landed reply was examined and is an answer."""
        self._tick(now_s)
        self._outcomes.answered(start, answer, now_s)
        self._heed(self._outcomes.reason)

    def failed(self, start: Start, error: AttemptError, now_s: float) -> None:
        """An attempt ended in an error, on the wire or when its reply was examined."""
        self._tick(now_s)
        self._outcomes.failed(start, error, now_s)
        self._heed(self._outcomes.reason)

    def cancelled(self, start: Start, now_s: float) -> None:
        """An attempt was cancelled, by us; its prompt is asked again later, by this run or another."""
        self._tick(now_s)
        self._outcomes.cancelled(start, now_s)
        self._heed(self._outcomes.reason)

    def probed(self, server: int, checkup: Checkup, now_s: float) -> None:
        """A probe came back."""
        self._tick(now_s)
        self.fleet.probed(server, checkup, now_s)
        self._sending.poison.probed(server, checkup)
        if checkup.trouble is not None:
            self._outcomes.last_error = f"{self.fleet.servers[server].spec.url}: {checkup.trouble}"

    def inquired(self, server: int, vitals: Vitals, now_s: float) -> None:
        """A silent server was asked what it does."""
        self._tick(now_s)
        here = [flight for flight in self._flights if flight.start.server == server]
        for flight, fault in self._sending.vigil.inquired(self.fleet.servers[server], vitals, here, now_s):
            self._flights.call_off(flight, fault)

    def set_limit(self, url: str, limit: int, now_s: float) -> int:
        """Change a live fleet: a limit, a server that joins, or with 0 one that leaves; its position."""
        self._tick(now_s)
        server = self.fleet.set_limit(url, limit, now_s)
        if limit == 0:
            self._sending.poison.forget(server.position)
        self._count_slots()
        return server.position

    def committed(self, number: int, now_s: float, space: Space | None = None) -> None:
        """A group is durable: only now are its prompts done; ``space`` is what the disk has left."""
        self._tick(now_s)
        self.pace.committed(self._saving.committed(number), now_s)
        if space is not None:
            self.measured(space, now_s)

    def refused(self, number: int, trouble: str, now_s: float) -> None:
        """The disk had no room for a group; it is committed again once there may be some."""
        self._tick(now_s)
        self._saving.refused(number, trouble, now_s)
        self._outcomes.last_error = trouble

    def measured(self, space: Space, now_s: float) -> None:
        """The disk was looked at."""
        self._tick(now_s)
        under_way = len(self._flights) + len(self._waiting) if self.exhausted else self._slots
        self._saving.measured(space, min(under_way, self._slots), now_s)

    def stop(self, now_s: float, *, grace_s: float) -> None:
        """Start nothing more; what is in flight may still end within ``grace_s`` seconds."""
        self._tick(now_s)
        self.stopping = self._outcomes.stopping = True
        cancel_at_s = now_s + grace_s
        if self._cancel_at_s is None or cancel_at_s < self._cancel_at_s:
            self._cancel_at_s = cancel_at_s

    # ---- what is due ----

    def due(self, now_s: float) -> list[Action]:
        """What is to be done now. Deciding and counting as started are one step."""
        self._tick(now_s)
        actions: list[Action] = []
        looking = self._disk.look_due(now_s)
        if self._disk.gave_up:
            # What comes later could not be saved, unless there is some room left.
            self.stop(now_s, grace_s=0.0 if self._disk.refused else self.settings.grace_s)
        if not self.stopping:
            self._waiting.wake(now_s)
            actions.extend(self.fleet.due(now_s, ask=self._nobody_left_to_ask))
            if not self.finished:
                self._heed(self.outage.look(now_s))
        if self.stopping:
            if self._is_cut_short:
                self._flights.call_off_all()
        else:
            self._due_work(now_s, actions)
            # A prompt that no server gets any more may have been one too many.
            self._heed(self._outcomes.reason)
        actions.extend(self._flights.due_cancels())
        if looking and not self._disk.refused:
            actions.append(Measure())
        last = self.stopping and not self._flights
        actions.extend(self._saving.due(now_s, last=last, looking=looking))
        self._tell_books()
        return actions

    def next_timer_s(self) -> float | None:
        """When :meth:`due` is to be called again though nothing happened, or None."""
        next_s = self._saving.next_timer_s()
        if not self.stopping:
            next_s = earlier(next_s, self._sending.next_timer_s(paused=self.paused))
            next_s = earlier(next_s, self.outage.next_timer_s())
        elif not self._flights.all_cancelled or (self._disk.refused and not self._is_cut_short):
            next_s = earlier(next_s, self._cancel_at_s)
        return next_s

    @property
    def finished(self) -> bool:
        """Nothing is under way any more, and nothing is to be begun."""
        if self._flights or self._reading:
            return False
        if self._outbox.size:
            # With no room on the disk, what has come stays unsaved when the time to wait is over.
            return self._disk.refused and self._is_cut_short and not self._outbox.committing
        return self.stopping or (self.exhausted and not self._waiting)

    @property
    def complete(self) -> bool:
        """Every prompt of the input has ended, one way or the other, and is durable."""
        under_way = self._waiting or self._flights or self._outbox.size
        return self.exhausted and not under_way and self.returned == 0

    @property
    def paused(self) -> bool:
        """Whether nothing may be sent: the writer is too far behind, or the disk is short of room."""
        return self._saving.paused

    @property
    def in_tail(self) -> bool:
        """Whether all prompts have been sent, and only what is in flight is waited for."""
        return self.exhausted and not self._waiting.ready and not self.finished

    @property
    def done(self) -> int:
        """Prompts durable since this process began."""
        return self._saving.done

    @property
    def gave_up(self) -> int:
        """Prompts given up, and bad lines, durable as such since this process began."""
        return self._saving.gave_up

    @property
    def sums(self) -> Sums:
        """Totals over the answers since this process began."""
        return self._saving.sums

    @property
    def returned(self) -> int:
        """Prompts that a stop left to a later run."""
        return self._outcomes.returned

    @property
    def late(self) -> int:
        """Answers that came for prompts which had ended already, and were dropped."""
        return self._outcomes.late

    @property
    def last_error(self) -> str | None:
        """The last error of an attempt, a probe or the disk in one line, or None."""
        return self._outcomes.last_error

    @property
    def disk_trouble(self) -> str | None:
        """Why the disk holds the run up, in one line, or None."""
        return self._disk.trouble

    @property
    def disk_gave_up(self) -> bool:
        """Whether the run ends because the disk had no room for too long."""
        return self._disk.gave_up

    @property
    def in_flight(self) -> int:
        """Requests on their way, replies that are not yet examined left out."""
        return sum(server.held for server in self.fleet.servers)

    @property
    def unsaved(self) -> int:
        """Prompts that ended and are not yet durable."""
        return self._outbox.size

    @property
    def sleeping(self) -> int:
        """Prompts that wait after a fault."""
        return self._waiting.held_up

    def flights(self) -> Iterator[Flight]:
        """The attempts in flight, oldest first."""
        return iter(self._flights)

    def unsaved_groups(self) -> Iterator[Group]:
        """At the end of a run: what has ended and is not durable, group by group.

        :meth:`committed` must be called for each before the next is asked for.
        """
        return self._outbox.remains(self._now_s)

    def check(self) -> None:
        """Nothing is lost, nothing is counted twice, every slot-second has an owner, every bound holds."""
        waiting = len(self._waiting) + self._flights.open_works
        ended = self.done + self.gave_up + self.returned + self.unsaved
        assert waiting + ended == self.offered_total, (waiting, ended, self.offered_total)
        unlanded = sum(1 for _ in self._flights)
        assert unlanded == self.in_flight, (unlanded, self.in_flight)
        held = len(self._waiting) - self._sending.poison.for_the_end + self.in_flight
        assert held <= (3 + MARKED_PER_READY) * self._held_max
        assert self.unsaved <= self.settings.backlog_records_max + 2 * self._held_max
        self._waiting.check()
        self.fleet.check()
        self.books.check()

    # ---- steps ----

    def _tick(self, now_s: float) -> None:
        assert now_s >= self._now_s, f"time went back from {self._now_s} to {now_s}"
        if now_s > self._now_s:
            self._now_s = now_s
            self.books.tick(now_s)

    def _count_slots(self) -> None:
        self._slots = self.fleet.slots
        self._ready_max = self._slots + self.settings.ready_spare
        self._held_max = max(self._held_max, self._ready_max)

    def _tell_books(self) -> None:
        run = self.books.run
        if self.stopping:
            # What waits is left to a later run, so that an idle slot has nothing to wait for.
            run.ready = run.sleeping = 0
            run.paused, run.exhausted = False, True
        else:
            run.ready = len(self._waiting.ready)
            run.sleeping = self._waiting.held_up
            run.paused, run.exhausted = self.paused, self.exhausted

    def _due_work(self, now_s: float, actions: list[Action]) -> None:
        """Send, read, and watch what was sent."""
        if not self.paused:
            self._sending.due(now_s, actions, exhausted=self.exhausted, give_up=self._outcomes.give_up_poison)
        self._flights.settle_gaps()
        vigil = self._sending.vigil
        if now_s >= vigil.next_timer_s() and self._flights:
            inquiries, over = vigil.look(self._flights, now_s)
            actions.extend(inquiries)
            for flight, fault in over:
                self._flights.call_off(flight, fault)
        if self._wants_to_read():
            self._reading = True
            actions.append(Read(count=self._ready_max - len(self._waiting.ready)))
        if self._saving.overflows:
            self._flights.call_off_all()

    def _wants_to_read(self) -> bool:
        """Whether more prompts are to be read; what is in memory is bounded by this alone."""
        if self.exhausted or self._reading or self._outbox.paused:
            return False
        waiting = self._waiting
        marked_max = MARKED_PER_READY * self._ready_max
        marked = len(waiting.marked)
        if marked >= marked_max and marked - self._sending.poison.for_the_end >= marked_max:
            return False
        return len(waiting.ready) * 2 < self._ready_max and waiting.sleeping < self._ready_max

    @property
    def _is_cut_short(self) -> bool:
        """Whether the time that a stop leaves to requests in flight is over."""
        return self._cancel_at_s is not None and self._now_s >= self._cancel_at_s

    def _nobody_left_to_ask(self) -> bool:
        return (self.exhausted or bool(self._waiting)) and self._sending.poison.nobody_left_to_ask()

    def _heed(self, reason: str | None) -> None:
        """Stop, where a guard gives a reason to; odd answers are still answers, and are waited for."""
        if reason is not None and not self.stopping:
            self.refusal = reason
            self.stop(self._now_s, grace_s=self.settings.grace_s if reason == self.quality.reason else 0.0)
