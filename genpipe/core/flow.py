"""The scheduler: what happened goes in, what is due comes out. No I/O, no clock, no task.

A prompt is always in exactly one place: ready, sleeping (backoff), in flight, held (ended, not yet
durable), done, given up, or returned (stopped before it was answered; a later run asks it again).
"""

import itertools
from collections.abc import Iterator, Sequence

from genpipe.core.books import Books
from genpipe.core.disk import Disk
from genpipe.core.errors import AttemptError, FaultKind, ServerFault
from genpipe.core.eta import Pace
from genpipe.core.fleet import Fleet
from genpipe.core.flights import Flights
from genpipe.core.guard import RefusalGuard
from genpipe.core.outbox import Outbox, bad_line, size_bytes_of
from genpipe.core.settings import FlowSettings
from genpipe.core.values import (
    Action,
    Answer,
    Chunk,
    Commit,
    Finished,
    GivenUp,
    Group,
    Measure,
    Read,
    ServerSpec,
    Space,
    Start,
    Sums,
)
from genpipe.core.waiting import Rng, Waiting, Work

__all__ = ["Core", "FlowSettings"]


class Core:
    """One run's scheduler. Told what happened, it answers :meth:`due` with what to do.

    Every event takes ``now_s``, which never goes back. After each event the driver calls :meth:`due`.

    Attributes:
        done: prompts durable since this process began.
        gave_up: prompts given up, and bad lines, durable as such since this process began.
        sums: totals over the answers since this process began.
        pace: rates and the ETA.
        fleet: the servers.
        books: whose each slot-second was.
        stopping: no more is started.
        refusal: why the guard stopped the run, or None.
        last_error: the last error of an attempt or a probe in one line, or None.
    """

    def __init__(self, settings: FlowSettings, servers: Sequence[ServerSpec], rng: Rng, now_s: float) -> None:
        self.settings = settings
        self.books = Books([spec.limit for spec in servers], now_s)
        self.fleet = Fleet(servers, self.books, settings.bench, settings.ramp_s, now_s)
        self.pace = Pace(now_s)
        self.sums = Sums()
        self.done = self.gave_up = self.returned = self.offered_total = 0
        self.exhausted = self.stopping = False
        self.refusal: str | None = None
        self.last_error: str | None = None
        self._now_s = now_s
        self._waiting = Waiting(rng, backoff_s=settings.backoff_s, backoff_max_s=settings.backoff_max_s)
        self._flights = Flights(self.fleet, self.books)
        self._disk = Disk(settings)
        self._answer_bytes = self._answer_bytes_max = 0
        self._outbox = Outbox(settings)
        self._reading = False
        self._slots = sum(spec.limit for spec in servers)
        self._ready_max = self._slots + settings.ready_spare
        self._attempts = itertools.count(1)
        self._guard = RefusalGuard(after=settings.refused_after, share_max=settings.refused_share_max)
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
            self._outbox.hold(bad_line(bad))
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
        flight = self._flights.end(start, None, now_s)
        assert flight.landed_s is not None
        self.fleet.answered(start, now_s)
        latency_s = flight.landed_s - start.started_s
        self.pace.answered(latency_s, now_s)
        server = self.fleet.servers[start.server]
        server.output_tokens += answer.output_tokens or 0
        finished = Finished(
            prompt=start.prompt,
            answer=answer,
            server=server.spec.url,
            tries=start.tries,
            started_s=start.started_s,
            latency_s=latency_s,
        )
        self._guard.answered()
        self._outbox.hold(finished)
        size_bytes = size_bytes_of(finished)
        self._answer_bytes += size_bytes
        self._answer_bytes_max = max(self._answer_bytes_max, size_bytes)

    def failed(self, start: Start, error: AttemptError, now_s: float) -> None:
        """An attempt ended in an error, on the wire or when its reply was examined."""
        self._tick(now_s)
        work = self._flights.end(start, error.wire_s, now_s, lost=isinstance(error, ServerFault)).work
        work.faults += 1
        self.last_error = f"{self.fleet.servers[start.server].spec.url}: {error}"
        if not isinstance(error, ServerFault):
            if error.status is None:
                # It ran out of time, or was never sent: the server has not spoken.
                self.fleet.dropped(start, now_s)
            else:
                self.fleet.refused(start, now_s)
            self._give_up(work, error, for_good=True)
            return
        self.fleet.faulted(start, error, now_s)
        self._charge(work)
        if error.kind is FaultKind.BROKEN:
            work.suspect(start.server, self.fleet.servers[start.server].answers)
        if work.charged >= self.settings.prompt_attempts:
            self._give_up(work, error, for_good=False)
        elif self.stopping:
            self.returned += 1
        else:
            self._waiting.sleep(work, now_s)

    def cancelled(self, start: Start, now_s: float) -> None:
        """An attempt was cancelled, by us; its prompt is asked again later, by this run or another."""
        self._tick(now_s)
        work = self._flights.end(start, None, now_s).work
        self.fleet.dropped(start, now_s)
        if self.stopping:
            self.returned += 1
        else:
            self._waiting.put_back(work)

    def probed(self, server: int, trouble: str | None, *, asked: bool, now_s: float) -> None:
        """A probe came back: None for well, else what the trouble is, in one line."""
        self._tick(now_s)
        self.fleet.probed(server, trouble, asked=asked, now_s=now_s)
        if trouble is not None:
            self.last_error = f"{self.fleet.servers[server].spec.url}: {trouble}"

    def committed(self, number: int, now_s: float, space: Space | None = None) -> None:
        """A group is durable: only now are its prompts done; ``space`` is what the disk has left."""
        self._tick(now_s)
        self._disk.accept()
        if space is not None:
            self.measured(space, now_s)
        group = self._outbox.committed(number)
        self.done += len(group.finished)
        self.gave_up += len(group.given_up)
        for finished in group.finished:
            self.sums.add(finished.answer.output_tokens, finished.answer.flags)
        self.pace.committed(group, now_s)

    def refused(self, number: int, trouble: str, now_s: float) -> None:
        """The disk had no room for a group; it is committed again once there may be some."""
        self._tick(now_s)
        self._outbox.refused(number)
        self._disk.refuse(trouble, now_s)
        self.last_error = trouble

    def measured(self, space: Space, now_s: float) -> None:
        """The disk was looked at."""
        self._tick(now_s)
        # Nearly always more than what comes; and one huge answer does not stop a run for good.
        under_way = len(self._flights) + len(self._waiting) if self.exhausted else self._slots
        answers = sum(server.answers for server in self.fleet.servers)
        mean_bytes = self._answer_bytes / answers if answers else 0.0
        needed_bytes = 2 * mean_bytes * min(under_way, self._slots) + self._answer_bytes_max
        self._disk.measure(space, needed_bytes, now_s)

    def stop(self, now_s: float, *, grace_s: float) -> None:
        """Start nothing more; what is in flight may still end within ``grace_s`` seconds."""
        self._tick(now_s)
        self.stopping = True
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
        if self.stopping:
            if self._is_cut_short:
                actions.extend(self._flights.due_cancels())
        else:
            self._waiting.wake(now_s)
            actions.extend(self.fleet.due(now_s, ask=self._nobody_left_to_ask))
            if not self.paused:
                self._due_starts(now_s, actions)
            self._flights.settle_gaps()
            if self._wants_to_read():
                self._reading = True
                actions.append(Read(count=self._ready_max - len(self._waiting.ready)))
            if self._disk.refused and self._outbox.size_bytes >= 2 * self.settings.backlog_bytes_max:
                # More of what comes would only fill the memory.
                actions.extend(self._flights.due_cancels())
        if looking and not self._disk.refused:
            actions.append(Measure())
        self._due_commits(now_s, actions, looking=looking)
        self._tell_books()
        return actions

    def next_timer_s(self) -> float | None:
        """When :meth:`due` is to be called again though nothing happened, or None."""
        next_s = self._disk.next_timer_s()
        if not self._disk.refused:
            next_s = _earlier(next_s, self._outbox.next_timer_s())
        if not self.stopping:
            next_s = _earlier(_earlier(next_s, self._waiting.wake_s), self.fleet.next_timer_s())
        elif not self._flights.all_cancelled or (self._disk.refused and not self._is_cut_short):
            next_s = _earlier(next_s, self._cancel_at_s)
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
        return self._outbox.paused or self._disk.trouble is not None

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
        """Prompts that wait out a backoff."""
        return self._waiting.sleeping

    def flights(self) -> Iterator[Start]:
        """The attempts in flight, oldest first."""
        return iter(self._flights)

    def unsaved_groups(self) -> Iterator[Group]:
        """At the end of a run: what has ended and is not durable, group by group.

        :meth:`committed` must be called for each before the next is asked for.
        """
        return self._outbox.remains(self._now_s)

    def check(self) -> None:
        """Nothing is lost, nothing is counted twice, every slot-second has an owner, every bound holds."""
        waiting = len(self._waiting) + len(self._flights)
        ended = self.done + self.gave_up + self.returned + self.unsaved
        assert waiting + ended == self.offered_total, (waiting, ended, self.offered_total)
        unlanded = sum(1 for _ in self._flights)
        assert unlanded == self.in_flight, (unlanded, self.in_flight)
        assert len(self._waiting) + self.in_flight <= 2 * self._ready_max + self._slots
        assert self.unsaved <= self.settings.backlog_records_max + self._slots + self._ready_max
        self._waiting.check()
        self.fleet.check()
        self.books.check()

    # ---- steps ----

    def _tick(self, now_s: float) -> None:
        assert now_s >= self._now_s, f"time went back from {self._now_s} to {now_s}"
        if now_s > self._now_s:
            self._now_s = now_s
            self.books.tick(now_s)

    def _tell_books(self) -> None:
        run = self.books.run
        if self.stopping:
            # What waits is left to a later run, so that an idle slot has nothing to wait for.
            run.ready = run.sleeping = 0
            run.paused, run.exhausted = False, True
        else:
            run.ready = len(self._waiting.ready)
            run.sleeping = self._waiting.sleeping
            run.paused, run.exhausted = self.paused, self.exhausted

    def _charge(self, work: Work) -> None:
        """Charge the faults whose server has answered somebody since."""
        for position in tuple(work.pending or ()):
            work.charge(position, self.fleet.servers[position].answers)

    def _wants_to_read(self) -> bool:
        """Whether more prompts are to be read; what is in memory is bounded by this alone."""
        if self.exhausted or self._reading or self._outbox.paused:
            return False
        waiting = self._waiting
        return len(waiting.ready) * 2 < self._ready_max and waiting.sleeping < self._ready_max

    @property
    def _is_cut_short(self) -> bool:
        """Whether the time that a stop leaves to requests in flight is over."""
        return self._cancel_at_s is not None and self._now_s >= self._cancel_at_s

    def _nobody_left_to_ask(self) -> bool:
        """Whether every prompt that waits has failed somewhere in a way that may be its own fault."""
        return self.exhausted and len(self._waiting) == self._waiting.suspects

    def _due_starts(self, now_s: float, actions: list[Action]) -> None:
        waiting, fleet = self._waiting, self.fleet
        while waiting.ready:
            server = fleet.pick(waiting.ready[0].last_server, now_s)
            if server is None:
                break
            work = waiting.take()
            work.tries += 1
            work.last_server = server.position
            start = Start(
                attempt=next(self._attempts),
                prompt=work.prompt,
                server=server.position,
                tries=work.tries,
                started_s=now_s,
            )
            self._flights.take_off(start, work, now_s)
            actions.append(start)

    def _due_commits(self, now_s: float, actions: list[Action], *, looking: bool) -> None:
        last = self.stopping and not self._flights
        while not self._disk.refused or looking:
            group = self._outbox.due(now_s, last=last)
            if group is None:
                return
            actions.append(Commit(group=group))

    def _give_up(self, work: Work, error: AttemptError, *, for_good: bool) -> None:
        gave_up = GivenUp(
            index=work.prompt.index,
            tries=work.tries,
            error_class=type(error).__name__,
            message=str(error),
            last_status=error.status,
            for_good=for_good,
        )
        self._outbox.hold(gave_up)
        reason = self._guard.gave_up(error)
        if reason is not None and not self.stopping:
            self.refusal = reason
            self.stop(self._now_s, grace_s=0.0)


def _earlier(one_s: float | None, other_s: float | None) -> float | None:
    return one_s if other_s is None or (one_s is not None and one_s < other_s) else other_s
