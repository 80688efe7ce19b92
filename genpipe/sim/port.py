"""The state of one simulated server: batch, open requests, modes, counts. No HTTP here."""

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from genpipe.sim.batching import Batch, Job
from genpipe.sim.config import SimConfig
from genpipe.sim.journal import Journal, Visit
from genpipe.sim.orders import Modes

TIMER_STEP_S = 0.001
"""No timer is set closer than this: uvloop counts in milliseconds, and would spin on less."""


SNAPSHOT_EVERY_S = 0.01
"""How far apart two times of ``/v1/loads`` are at least (seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a scheduler says of itself.

    Attributes:
        taken_s: when (seconds, wall clock).
        running: requests that hold a slot (count).
        waiting: requests in the queue (count).
        used_tokens: tokens in the KV pool (count).
        tokens_per_s: what is generated now.
    """

    taken_s: float
    running: int
    waiting: int
    used_tokens: int
    tokens_per_s: float


class SimPort:
    """Everything one listening address knows.

    Attributes:
        number: its TCP port.
        config: how it behaves.
        configured: the modes that the config says.
        modes: how it behaves now.
        batch: what runs and what waits.
        arrivals: generation requests that came (count).
        answered: those answered with 200 (count).
        refused: those answered with anything else (count).
        gone: those whose client left (count).
        in_flight: those open now (count).
        in_flight_max: most that were ever open (count).
        busy_until_s: when a busy health check ends (seconds, monotonic).
        deaths: how often it died by an order (count).
        changed: set, and another one, when the modes change.
    """

    def __init__(self, number: int, config: SimConfig, journal: Journal) -> None:
        self.number = number
        self.config = config
        self.configured = Modes(
            queue_limit=config.max_queued,
            keepalive_s=config.keepalive_s,
            slots=config.max_running,
            revive_s=config.revive_s,
        )
        self.modes = self.configured
        self.batch = Batch(
            running_max=config.max_running,
            queued_max=config.max_queued,
            fixed_s=config.step_fixed_s,
            per_request_s=config.step_per_request_s,
            now_s=time.monotonic(),
        )
        self.arrivals = self.answered = self.refused = self.gone = 0
        self.in_flight = self.in_flight_max = 0
        self.busy_until_s = 0.0
        self.deaths = 0
        self.changed = asyncio.Event()
        self._snapshot = self._take_snapshot()
        self._journal = journal
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._by_rid: dict[str, Visit] = {}
        self._visits: set[Visit] = set()
        self._leaving: dict[Visit, asyncio.TimerHandle] = {}
        self._in_flight_integral_s = 0.0
        self._in_flight_since_s = time.monotonic()

    # A request comes and goes

    def arrive(self, path: str) -> Visit:
        """A request has come in."""
        visit = Visit(port=self.number, path=path, arrival_s=time.monotonic())
        self._visits.add(visit)
        return visit

    def count_in(self, visit: Visit) -> None:
        """It is a generation request: count it among those in flight."""
        self._add_in_flight(1)
        self.arrivals += 1
        visit.in_flight = self.in_flight
        self.in_flight_max = max(self.in_flight_max, self.in_flight)

    def identify(self, visit: Visit, row: str, rid: str) -> bool:
        """Its text and id are known; False if the id is in flight already."""
        visit.row, visit.rid = row, rid
        visit.attempt = self._journal.attempt(row)
        if rid in self._by_rid:
            return False
        self._by_rid[rid] = visit
        return True

    async def generate(self, visit: Visit, jobs: tuple[Job, ...]) -> bool:
        """Put all jobs into the batch and wait until they are over; False if the queue is full."""
        now_s = time.monotonic()
        visit.jobs = jobs
        for job in jobs:
            if not self.batch.submit(job, now_s):
                for other in jobs:
                    self.batch.abort(other, now_s)
                visit.jobs = ()
                self.pump(now_s)
                return False
        visit.running = self.batch.running
        waiters: list[asyncio.Future[None]] = []
        for job in jobs:
            if not job.over:
                waiters.append(self._loop.create_future())
                job.notify = partial(_wake, waiters[-1])
        self.pump(now_s)
        for waiter in waiters:
            await waiter
        return True

    def abort(self, rid: object, *, every: bool) -> None:
        """Abort by id: the front end must know it, the scheduler then takes every id that begins with it."""
        now_s = time.monotonic()
        for visit in list(self._aborted_by(rid, every=every)):
            for job in visit.jobs:
                self.batch.abort(job, now_s)
        self.pump(now_s)

    def _aborted_by(self, rid: object, *, every: bool) -> Iterator[Visit]:
        if every:
            yield from self._by_rid.values()
        elif isinstance(rid, str) and rid in self._by_rid:
            yield from (visit for known, visit in self._by_rid.items() if known.startswith(rid))

    def lose(self, visit: Visit) -> None:
        """The connection of an open request is gone: noticed late, unless the server itself ended it."""
        if visit.closed or visit.cut or not visit.in_flight:
            self.close(visit)
            return
        visit.gone_s = time.monotonic()
        self.gone += 1
        if visit.jobs and all(job.over for job in visit.jobs):
            self.close(visit)
            return
        for job in visit.jobs:
            job.notify = partial(self._ended_alone, visit)
        self._leaving[visit] = self._loop.call_later(self.config.disconnect_notice_s, self._notice, visit)

    def _notice(self, visit: Visit) -> None:
        now_s = time.monotonic()
        for job in visit.jobs:
            self.batch.abort(job, now_s)
        self.pump(now_s)
        self.close(visit)

    def _ended_alone(self, visit: Visit) -> None:
        if all(job.over for job in visit.jobs):
            self.close(visit)

    def close(self, visit: Visit) -> None:
        """The request is over: count and log it. Safe to repeat."""
        if visit.closed:
            return
        visit.closed = True
        self._visits.discard(visit)
        if (timer := self._leaving.pop(visit, None)) is not None:
            timer.cancel()
        if visit.rid is not None and self._by_rid.get(visit.rid) is visit:
            del self._by_rid[visit.rid]
        if visit.in_flight:
            self._add_in_flight(-1)
            if visit.gone_s is not None:
                visit.tokens = sum(job.made_tokens for job in visit.jobs)
            elif visit.status is not None:
                self.answered += visit.status == 200
                self.refused += visit.status != 200
        self._journal.write(visit)

    def drop_all(self) -> None:
        """The server goes down: what runs and waits is lost; open requests end with their connections."""
        now_s = time.monotonic()
        for visit in list(self._visits):
            visit.cut = True
            for job in visit.jobs:
                job.notify = None
                self.batch.abort(job, now_s)
            if visit.gone_s is not None:
                self.close(visit)
        self.pump(now_s)

    def _add_in_flight(self, change: int) -> None:
        now_s = time.monotonic()
        self._in_flight_integral_s += self.in_flight * (now_s - self._in_flight_since_s)
        self._in_flight_since_s = now_s
        self.in_flight += change

    # The clock of the batch

    def pump(self, now_s: float) -> None:
        """Wake what is over, and set the timer to what comes next."""
        for job in self.batch.advance(now_s):
            if job.notify is not None:
                job.notify()
        due_s = self.batch.next_s()
        if due_s is None or due_s >= self._timer_s:
            # A timer that fires early finds nothing due and is set again: cheaper than one per arrival.
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = self._loop.call_later(max(TIMER_STEP_S, due_s - now_s), self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self.pump(time.monotonic())

    def stop_timers(self) -> None:
        """Set no more timers: nothing ends any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, -math.inf

    # Modes and figures

    def enter(self, modes: Modes, busy_s: float | None = None) -> None:
        """Behave like ``modes`` from now on; ``busy_s`` is how long a busy health check lasts (seconds)."""
        now_s = time.monotonic()
        if modes.frozen and not self.modes.frozen:
            self.pump(now_s)
            self._snapshot = self._take_snapshot()
        self.modes = modes
        self.changed.set()
        self.changed = asyncio.Event()
        if busy_s is not None:
            self.busy_until_s = now_s + busy_s
        self.batch.change(
            now_s,
            running_max=modes.slots,
            queued_max=modes.queue_limit,
            slow=modes.slow,
            frozen=modes.frozen,
        )
        self.pump(now_s)

    def snapshot(self) -> Snapshot:
        """What the scheduler has published last; while it stands still that stays as it was."""
        if not self.modes.frozen:
            self.pump(time.monotonic())
            self._snapshot = self._take_snapshot()
        return self._snapshot

    def _take_snapshot(self) -> Snapshot:
        batch = self.batch
        return Snapshot(
            # The real one publishes after some steps, and idle ones are steps.
            taken_s=math.floor(time.time() / SNAPSHOT_EVERY_S) * SNAPSHOT_EVERY_S,
            running=batch.running,
            waiting=batch.queued,
            used_tokens=batch.used_tokens,
            tokens_per_s=batch.tokens_per_s if self.config.enable_metrics else 0.0,
        )

    def figures(self) -> dict[str, Any]:
        """What is known about this port, live; integrals in request-seconds since the start."""
        now_s = time.monotonic()
        self.pump(now_s)
        return {
            "port": self.number,
            "now_s": now_s,
            "arrivals": self.arrivals,
            "answered": self.answered,
            "refused": self.refused,
            "client_gone": self.gone,
            "deaths": self.deaths,
            "in_flight": self.in_flight,
            "in_flight_max": self.in_flight_max,
            "running": self.batch.running,
            "queued": self.batch.queued,
            "tokens": self.batch.tokens_made,
            "running_integral_s": self.batch.running_integral_s,
            "queued_integral_s": self.batch.queued_integral_s,
            "in_flight_integral_s": self._in_flight_integral_s
            + self.in_flight * (now_s - self._in_flight_since_s),
        }


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)
