"""The scheduler: what happened goes in, what is due comes out. No I/O, no clock, no task.

A prompt is always in exactly one place: ready, sleeping (backoff), in flight, held (ended, not yet
durable), done, given up, or returned (stopped before it was answered; a later run asks it again).
"""

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from genpipe.core.books import Books
from genpipe.core.errors import AttemptError, FaultKind, PromptFault, ServerFault
from genpipe.core.eta import Pace
from genpipe.core.fleet import BenchSettings, Fleet
from genpipe.core.values import (
    Action,
    Answer,
    BadLine,
    Cancel,
    Chunk,
    Commit,
    Finished,
    GivenUp,
    Group,
    Prompt,
    Read,
    ServerSpec,
    Start,
    Sums,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """How the scheduler behaves.

    Attributes:
        prompt_attempts: faults charged to one prompt before it is given up for now (count, >= 1).
        backoff_s: first pause of a prompt after a fault (seconds); doubles with each.
        backoff_max_s: longest pause (seconds).
        bench: when a server is taken out of use.
        ramp_s: slots open over this time at the start (seconds).
        group_records_max: records in one commit.
        group_bytes_max: answer bytes in one commit, give or take one answer.
        group_interval_s: least time between the starts of two commits (seconds).
        backlog_records_max: ended prompts that may wait for the writer before nothing more is sent.
        backlog_bytes_max: likewise in answer bytes.
        ready_spare: prompts kept ready beyond one for each slot.
        refused_after: prompts after which a fleet that refuses most of them stops the run.
        refused_share_max: share of those that may end as prompt faults.
    """

    prompt_attempts: int = 4
    backoff_s: float = 0.5
    backoff_max_s: float = 8.0
    bench: BenchSettings = field(default_factory=BenchSettings)
    ramp_s: float = 1.0
    group_records_max: int = 256
    group_bytes_max: int = 4 << 20
    group_interval_s: float = 0.025
    backlog_records_max: int = 4096
    backlog_bytes_max: int = 64 << 20
    ready_spare: int = 256
    refused_after: int = 200
    refused_share_max: float = 0.5


class _Work:
    """One prompt on its way, over all its attempts."""

    __slots__ = ("charged", "faults", "last_server", "pending", "prompt", "tries")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.tries = 0
        self.faults = 0
        self.charged = 0
        self.last_server: int | None = None
        # By server: its count of answers when it failed this prompt. The fault is charged to the prompt
        # once the server has answered somebody else, for then it was not the server.
        self.pending: dict[int, tuple[int, AttemptError]] = {}


class _Flight:
    """One attempt in flight, or landed and not yet examined."""

    __slots__ = ("freed_s", "landed_s", "start", "work")

    def __init__(self, start: Start, work: _Work, freed_s: float | None) -> None:
        self.start = start
        self.work = work
        # When the slot was last freed, where this attempt is the refill of it.
        self.freed_s = freed_s
        self.landed_s: float | None = None


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

    def __init__(
        self, settings: FlowSettings, servers: Sequence[ServerSpec], rng: random.Random, now_s: float
    ) -> None:
        self.settings = settings
        self.books = Books([spec.limit for spec in servers], now_s)
        self.fleet = Fleet(servers, self.books, settings.bench, settings.ramp_s, now_s)
        self.pace = Pace(now_s)
        self.sums = Sums()
        self.done = self.gave_up = self.returned = self.offered_total = 0
        self.exhausted = self.stopping = False
        self.refusal: str | None = None
        self.last_error: str | None = None
        self.last_progress_s = now_s
        self._rng = rng
        self._now_s = now_s
        self._ready: deque[_Work] = deque()
        self._sleeping: list[tuple[float, int, _Work]] = []
        self._in_flight: dict[int, _Flight] = {}
        self._held: deque[Finished | GivenUp] = deque()
        self._held_bytes = 0
        self._committing: Group | None = None
        self._committing_bytes = 0
        self._last_commit_s = -self.settings.group_interval_s
        self._reading = False
        self._ready_max = sum(spec.limit for spec in servers) + settings.ready_spare
        self._attempts = itertools.count(1)
        self._groups = itertools.count(1)
        self._order = itertools.count()
        self._tainted = 0
        self._freed: set[int] = set()
        self._cancel_at_s: float | None = None
        self._cancelled: set[int] = set()
        self._refused: Counter[str] = Counter()

    # ---- what happened ----

    def offered(self, chunk: Chunk, now_s: float) -> None:
        """A read came back."""
        self._tick(now_s)
        assert self._reading
        self._reading = False
        self.offered_total += len(chunk.prompts) + len(chunk.bad)
        self._ready.extend(map(_Work, chunk.prompts))
        for bad in chunk.bad:
            self._hold(_bad(bad), 0)
        self.exhausted |= chunk.exhausted

    def landed(self, start: Start, wire_s: float, last_s: float, now_s: float) -> None:
        """The last byte of a reply came at ``last_s``; the slot is free, whatever the reply holds.

        :meth:`answered` or :meth:`failed` must follow for the same attempt.
        """
        self._tick(now_s)
        flight = self._in_flight[start.attempt]
        assert flight.landed_s is None
        flight.landed_s = last_s
        self._free_slot(flight, wire_s, last_s)

    def answered(self, start: Start, answer: Answer, now_s: float) -> None:
        """A landed reply was examined and is an answer."""
        self._tick(now_s)
        flight = self._in_flight.pop(start.attempt)
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
        self._hold(finished, answer.size_bytes + len(start.prompt.payload))

    def failed(self, start: Start, error: AttemptError, now_s: float) -> None:
        """An attempt ended in an error, on the wire or when its reply was examined."""
        self._tick(now_s)
        flight = self._in_flight.pop(start.attempt)
        if flight.landed_s is None:
            self._free_slot(flight, error.wire_s, now_s)
        work = flight.work
        work.faults += 1
        self.last_error = f"{self.fleet.servers[start.server].spec.url}: {error}"
        if not isinstance(error, ServerFault):
            self.fleet.refused(start, now_s)
            self._give_up(work, error, for_good=True)
            return
        self.fleet.faulted(start, error, now_s)
        self._charge(work)
        if error.kind is FaultKind.BROKEN:
            work.pending[start.server] = (self.fleet.servers[start.server].answers, error)
        if work.charged >= self.settings.prompt_attempts:
            self._give_up(work, error, for_good=False)
        elif self.stopping:
            self.returned += 1
        else:
            self._sleep(work, now_s)

    def cancelled(self, start: Start, now_s: float) -> None:
        """An attempt was cancelled, by us; its prompt is asked again by a later run."""
        self._tick(now_s)
        flight = self._in_flight.pop(start.attempt)
        if flight.landed_s is None:
            self._free_slot(flight, None, now_s)
        self.fleet.dropped(start, now_s)
        self.returned += 1

    def probed(self, server: int, trouble: str | None, *, asked: bool, now_s: float) -> None:
        """A probe came back: None for well, else what the trouble is, in one line."""
        self._tick(now_s)
        self.fleet.probed(server, trouble, asked=asked, now_s=now_s)
        if trouble is not None:
            self.last_error = f"{self.fleet.servers[server].spec.url}: {trouble}"

    def committed(self, number: int, now_s: float) -> None:
        """A group is durable: only now are its prompts done."""
        self._tick(now_s)
        group = self._committing
        assert group is not None, number
        assert group.number == number
        self.done += len(group.finished)
        self.gave_up += len(group.given_up)
        for finished in group.finished:
            self.sums.add(finished.answer.output_tokens, finished.answer.flags)
        self.pace.committed(group, now_s)
        self.last_progress_s = now_s
        self._committing = None
        self._committing_bytes = 0

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
        if self.stopping:
            actions.extend(self._due_cancels(now_s))
        else:
            self._wake(now_s)
            actions.extend(self.fleet.due(now_s, ask=self._nobody_left_to_ask()))
            if not self.paused:
                actions.extend(self._due_starts(now_s))
            self.fleet.settle_gaps(self._freed, now_s)
            self._freed.clear()
            if not (self.exhausted or self._reading) and len(self._ready) * 2 < self._ready_max:
                self._reading = True
                actions.append(Read(count=self._ready_max - len(self._ready)))
        if (commit := self._due_commit(now_s)) is not None:
            actions.append(commit)
        self._tell_books()
        return actions

    def next_timer_s(self) -> float | None:
        """When :meth:`due` is to be called again though nothing happened, or None."""
        times = []
        if self._held and self._committing is None:
            times.append(self._last_commit_s + self.settings.group_interval_s)
        if self.stopping:
            if self._cancel_at_s is not None and len(self._cancelled) < len(self._in_flight):
                times.append(self._cancel_at_s)
        else:
            if self._sleeping:
                times.append(self._sleeping[0][0])
            if (timer_s := self.fleet.next_timer_s()) is not None:
                times.append(timer_s)
        return min(times, default=None)

    @property
    def finished(self) -> bool:
        """Nothing is under way any more, and nothing is to be begun."""
        if self._in_flight or self._held or self._committing is not None or self._reading:
            return False
        return self.stopping or (self.exhausted and not self._ready and not self._sleeping)

    @property
    def complete(self) -> bool:
        """Every prompt of the input has ended, one way or the other, and is durable."""
        waiting = self._ready or self._sleeping or self._in_flight or self.unsaved
        return self.exhausted and not waiting and self.returned == 0

    @property
    def paused(self) -> bool:
        """Whether the writer is so far behind that nothing may be sent."""
        return (
            self.unsaved >= self.settings.backlog_records_max
            or self._held_bytes + self._committing_bytes >= self.settings.backlog_bytes_max
        )

    @property
    def in_flight(self) -> int:
        """Requests on their way, replies that are not yet examined left out."""
        return sum(server.held for server in self.fleet.servers)

    @property
    def unsaved(self) -> int:
        """Prompts that ended and are not yet durable."""
        return len(self._held) + (0 if self._committing is None else _size(self._committing))

    @property
    def sleeping(self) -> int:
        """Prompts that wait out a backoff."""
        return len(self._sleeping)

    def flights(self) -> Iterator[Start]:
        """The attempts in flight, oldest first."""
        return (flight.start for flight in self._in_flight.values() if flight.landed_s is None)

    def unsaved_groups(self) -> Iterator[Group]:
        """At the end of a run: what has ended and is not durable, group by group.

        :meth:`committed` must be called for each before the next is asked for.
        """
        if self._committing is not None:
            yield self._committing
        while self._held:
            yield self._form_group(self._now_s)

    def check(self) -> None:
        """Nothing is lost, nothing is counted twice, every slot-second has an owner, every bound holds."""
        waiting = len(self._ready) + len(self._sleeping) + len(self._in_flight)
        ended = self.done + self.gave_up + self.returned + self.unsaved
        assert waiting + ended == self.offered_total, (waiting, ended, self.offered_total)
        unlanded = sum(flight.landed_s is None for flight in self._in_flight.values())
        assert unlanded == self.in_flight, (unlanded, self.in_flight)
        tainted = sum(bool(work.pending) for work in self._ready)
        tainted += sum(bool(work.pending) for _, _, work in self._sleeping)
        assert tainted == self._tainted, (tainted, self._tainted)
        # Bad lines are held, not ready, and a chunk may be all bad; both are bounded by one read.
        assert len(self._ready) <= self._ready_max + self.in_flight + len(self._sleeping)
        slots = sum(server.spec.limit for server in self.fleet.servers)
        assert self.unsaved <= self.settings.backlog_records_max + slots + self._ready_max
        self.fleet.check()
        self.books.check()

    # ---- steps ----

    def _tick(self, now_s: float) -> None:
        assert now_s >= self._now_s, f"time went back from {self._now_s} to {now_s}"
        self._now_s = now_s
        self.books.tick(now_s)

    def _tell_books(self) -> None:
        run = self.books.run
        run.ready = len(self._ready)
        run.sleeping = len(self._sleeping)
        run.paused = self.paused
        run.exhausted = self.exhausted or self.stopping

    def _free_slot(self, flight: _Flight, wire_s: float | None, last_s: float) -> None:
        """Give the slot back as of ``last_s`` and say whose its time was."""
        start, now_s = flight.start, self._now_s
        server = self.fleet.servers[start.server]
        assert start.started_s <= last_s <= now_s, (start.started_s, last_s, now_s)
        if wire_s is None:
            wire_s = last_s
        else:
            assert start.started_s <= wire_s <= last_s, (start.started_s, wire_s, last_s)
            if flight.freed_s is not None:
                self.fleet.gaps_s.add(wire_s - flight.freed_s)
        self.books.release(
            start.server,
            held_s=now_s - start.started_s,
            wire_s=last_s - wire_s,
            late_s=now_s - last_s,
            lost=wire_s == last_s,
        )
        self.fleet.gave(server, last_s, now_s)
        self._freed.add(start.server)

    def _hold(self, ended: Finished | GivenUp, size_bytes: int) -> None:
        self._held.append(ended)
        self._held_bytes += size_bytes

    def _charge(self, work: _Work) -> None:
        """Charge the faults whose server has answered somebody since."""
        servers = self.fleet.servers
        for position, (answers, _) in list(work.pending.items()):
            if servers[position].answers > answers:
                del work.pending[position]
                work.charged += 1

    def _sleep(self, work: _Work, now_s: float) -> None:
        settings = self.settings
        longest_s = min(settings.backoff_max_s, settings.backoff_s * 2 ** min(work.faults - 1, 30))
        pause_s = longest_s * self._rng.uniform(0.5, 1.0)
        heapq.heappush(self._sleeping, (now_s + pause_s, next(self._order), work))
        self._tainted += bool(work.pending)

    def _wake(self, now_s: float) -> None:
        """Prompts whose backoff is over go to the front, for they are older than what is ready.

        A prompt under suspicion goes to the back: at the front it would be a benched server's only trial,
        again and again, and keep it from ever answering anybody.
        """
        while self._sleeping and self._sleeping[0][0] <= now_s:
            work = heapq.heappop(self._sleeping)[2]
            if work.pending:
                self._ready.append(work)
            else:
                self._ready.appendleft(work)

    def _nobody_left_to_ask(self) -> bool:
        """Whether every prompt that waits has failed somewhere in a way that may be its own fault."""
        return self.exhausted and len(self._ready) + len(self._sleeping) == self._tainted

    def _due_starts(self, now_s: float) -> list[Action]:
        starts: list[Action] = []
        while self._ready:
            work = self._ready[0]
            server = self.fleet.pick(work.last_server, now_s)
            if server is None:
                break
            self._ready.popleft()
            if work.pending:
                self._tainted -= 1
            work.tries += 1
            work.last_server = server.position
            start = Start(
                attempt=next(self._attempts),
                prompt=work.prompt,
                server=server.position,
                tries=work.tries,
                started_s=now_s,
            )
            freed_s = self.fleet.took(server, start.attempt, now_s)
            self._in_flight[start.attempt] = _Flight(start, work, freed_s)
            starts.append(start)
        return starts

    def _due_cancels(self, now_s: float) -> list[Action]:
        if self._cancel_at_s is None or now_s < self._cancel_at_s:
            return []
        due = [number for number in self._in_flight if number not in self._cancelled]
        self._cancelled.update(due)
        return [Cancel(attempt=number) for number in due]

    def _due_commit(self, now_s: float) -> Commit | None:
        settings = self.settings
        if self._committing is not None or not self._held:
            return None
        full = (
            len(self._held) >= settings.group_records_max
            or self._held_bytes >= settings.group_bytes_max
            or (self.stopping and not self._in_flight)
        )
        if not full and now_s < self._last_commit_s + settings.group_interval_s:
            return None
        return Commit(group=self._form_group(now_s))

    def _form_group(self, now_s: float) -> Group:
        settings = self.settings
        finished: list[Finished] = []
        given_up: list[GivenUp] = []
        size_bytes = 0
        while self._held and len(finished) + len(given_up) < settings.group_records_max:
            if size_bytes >= settings.group_bytes_max:
                break
            ended = self._held.popleft()
            if isinstance(ended, Finished):
                finished.append(ended)
                size_bytes += ended.answer.size_bytes + len(ended.prompt.payload)
            else:
                given_up.append(ended)
        self._held_bytes -= size_bytes
        self._committing_bytes = size_bytes
        self._last_commit_s = now_s
        self._committing = Group(
            number=next(self._groups), finished=tuple(finished), given_up=tuple(given_up)
        )
        return self._committing

    def _give_up(self, work: _Work, error: AttemptError, *, for_good: bool) -> None:
        gave_up = GivenUp(
            index=work.prompt.index,
            tries=work.tries,
            error_class=type(error).__name__,
            message=str(error),
            last_status=error.status,
            for_good=for_good,
        )
        self._hold(gave_up, 0)
        self._guard(error)

    def _guard(self, error: AttemptError) -> None:
        """Stop a run whose prompts are nearly all refused: the request itself is wrong."""
        settings = self.settings
        if isinstance(error, PromptFault):
            self._refused[str(error)[:200]] += 1
        ended = self.done + self.gave_up + self.unsaved
        if self.stopping or ended < settings.refused_after or ended > 2 * settings.refused_after:
            return
        refused = self._refused.total()
        if refused > settings.refused_share_max * ended:
            message, count = self._refused.most_common(1)[0]
            self.refusal = f"{refused} of the first {ended} prompts were refused, {count} with: {message}"
            self.stop(self._now_s, grace_s=0.0)


def _size(group: Group) -> int:
    return len(group.finished) + len(group.given_up)


def _bad(bad: BadLine) -> GivenUp:
    return GivenUp(
        index=bad.index,
        tries=0,
        error_class="BadLine",
        message=f"{bad.file}:{bad.line}: {bad.reason}",
        last_status=None,
        for_good=True,
    )
