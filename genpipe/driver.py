"""The only TaskGroup: carries out what the core says is due, and tells it what happened."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from genpipe.core.errors import AttemptError, GenpipeError, StoreError
from genpipe.core.flow import Core
from genpipe.core.ports import Clock, Source, Store, Transport
from genpipe.core.values import Cancel, Commit, Group, Probe, Read, Reply, Start

log = logging.getLogger(__name__)

T = TypeVar("T")


class Reporter(Protocol):
    """Who is told how the run is doing."""

    def publish(self, core: Core, now_s: float) -> None:
        """Look at the core and return at once; called about once a second, on the loop's thread."""
        ...


REPORT_EVERY_S = 1.0
"""How often the reporter is called (seconds)."""


class Driver:
    """One run over real (or virtual) time. :meth:`run` may be called once.

    Attributes:
        error: what ended the run, where an error did.
    """

    def __init__(
        self,
        core: Core,
        *,
        source: Source,
        transport: Transport,
        store: Store,
        clock: Clock,
        reporter: Reporter,
    ) -> None:
        self._core = core
        self._source = source
        self._transport = transport
        self._store = store
        self._clock = clock
        self._reporter = reporter
        self._attempts: dict[int, asyncio.Task[None]] = {}
        self._helpers: set[asyncio.Task[None]] = set()
        self._landed: list[tuple[Start, Reply]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._report_s = 0.0
        self._store_failed = False
        self._finished = asyncio.Event()

    async def run(self) -> None:
        """Run until the core is finished.

        However it ends, every answer that the core holds is committed on return.

        Raises:
            GenpipeError: an edge met something that ends the run.
            ExceptionGroup: a bug in a task; the answers so far are committed.
        """
        self._loop = asyncio.get_running_loop()
        self._report_s = self._clock.now_s()
        try:
            await self._run_group()
        except ExceptionGroup as errors:
            if (known := _first_of_ours(errors)) is not None:
                raise known from None
            raise

    async def _run_group(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                self._pump()
                await self._finished.wait()
                for helper in self._helpers:
                    helper.cancel()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._examine_landed()
            if not self._store_failed:
                for group in self._core.unsaved_groups():
                    await finish(self._store.commit(group))
                    self._core.committed(group.number, self._clock.now_s())

    def stop(self, grace_s: float) -> None:
        """Start nothing more and end once what is in flight has ended, or after ``grace_s`` seconds."""
        self._core.stop(self._clock.now_s(), grace_s=grace_s)
        self._pump()

    def fail(self, error: GenpipeError) -> None:
        """End the run with ``error``, met outside of the run's tasks; without effect after the end."""
        if not self._finished.is_set():
            self._group.create_task(_raise(error), name="fail")

    def _pump(self) -> None:
        """Start what is due. No await here: deciding and starting are one step."""
        for action in self._core.due(self._clock.now_s()):
            match action:
                case Start():
                    self._attempts[action.attempt] = self._group.create_task(self._attempt(action))
                case Commit(group=group):
                    self._group.create_task(self._commit(group), name="commit")
                case Read(count=count):
                    self._group.create_task(self._read(count), name="read")
                case Probe():
                    task = self._group.create_task(self._probe(action), name="probe")
                    self._helpers.add(task)
                    task.add_done_callback(self._helpers.discard)
                case Cancel(attempt=attempt):
                    # A task that is cancelled before its first step never runs, and would not say that it
                    # was cancelled: let it take that step first.
                    self._loop.call_soon(self._cancel, attempt)
        if self._core.finished:
            self._finished.set()
        else:
            self._set_timer()

    def _cancel(self, attempt: int) -> None:
        task = self._attempts.get(attempt)
        if task is not None:
            task.cancel()

    def _set_timer(self) -> None:
        """Arm the one timer, unless it is armed for an earlier moment already."""
        due_s = self._core.next_timer_s()
        when_s = self._report_s if due_s is None else min(due_s, self._report_s)
        if self._timer is not None:
            if self._timer_s <= when_s:
                return
            self._timer.cancel()
        self._timer_s = when_s
        # Loops round to a millisecond; waking half of one too late beats waking too early and again.
        self._timer = self._loop.call_later(max(0.0, when_s - self._clock.now_s()) + 0.0005, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_s = self._clock.now_s()
        if now_s >= self._report_s:
            self._report_s = now_s + REPORT_EVERY_S
            self._reporter.publish(self._core, now_s)
        self._pump()

    async def _attempt(self, start: Start) -> None:
        try:
            reply = await self._transport.generate(start)
        except AttemptError as error:
            log.info(
                "attempt_failed index=%d attempt=%d server=%d error=%r",
                start.prompt.index, start.attempt, start.server, error,
            )  # fmt: skip
            self._core.failed(start, error, self._clock.now_s())
        except asyncio.CancelledError:
            self._core.cancelled(start, self._clock.now_s())
            self._pump()
            raise
        else:
            self._core.landed(start, reply.wire_s, reply.last_s, self._clock.now_s())
            if not self._landed:
                # Called after the refills have taken their first step, which puts them on the wire.
                self._loop.call_soon(self._on_landed)
            self._landed.append((start, reply))
        finally:
            del self._attempts[start.attempt]
        self._pump()

    def _on_landed(self) -> None:
        self._examine_landed()
        self._pump()

    def _examine_landed(self) -> None:
        """Look at what has landed since the last look."""
        landed, self._landed = self._landed, []
        for start, reply in landed:
            try:
                answer = self._transport.examine(reply)
            except AttemptError as error:
                log.info(
                    "answer_rejected index=%d attempt=%d server=%d error=%r",
                    start.prompt.index, start.attempt, start.server, error,
                )  # fmt: skip
                self._core.failed(start, error, self._clock.now_s())
            else:
                self._core.answered(start, answer, self._clock.now_s())

    async def _read(self, count: int) -> None:
        chunk = await self._source.read(count)
        self._core.offered(chunk, self._clock.now_s())
        self._pump()

    async def _probe(self, probe: Probe) -> None:
        trouble = await self._transport.probe(probe.server, ask=probe.ask)
        now_s = self._clock.now_s()
        self._core.probed(probe.server, trouble, asked=probe.ask and trouble is None, now_s=now_s)
        self._pump()

    async def _commit(self, group: Group) -> None:
        try:
            await finish(self._store.commit(group))
        except StoreError:
            self._store_failed = True
            raise
        except asyncio.CancelledError:
            # The commit was carried to its end first.
            self._core.committed(group.number, self._clock.now_s())
            raise
        self._core.committed(group.number, self._clock.now_s())
        self._pump()


async def finish(work: Awaitable[T]) -> T:
    """Await ``work`` to its end even if cancelled meanwhile; then let the cancel through.

    ``work`` brings its own time limit.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise


async def _raise(error: GenpipeError) -> None:
    raise error


def _first_of_ours(errors: ExceptionGroup) -> GenpipeError | None:
    """The first error that genpipe raised on purpose, if all of the group are such."""
    ours, others = errors.split(GenpipeError)
    if ours is None or others is not None:
        return None
    error: Exception = ours
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GenpipeError)
    return error
