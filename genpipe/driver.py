"""The only TaskGroup: carries out what the core says is due, and tells it what happened."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from genpipe.core import wording
from genpipe.core.errors import AttemptError, DiskFull, GenpipeError, StoreError
from genpipe.core.flow import Core
from genpipe.core.notices import Notices
from genpipe.core.ports import Clock, Source, Store, Transport
from genpipe.core.values import Cancel, Commit, Group, Inquire, Measure, Probe, Read, Reply, Start

log = logging.getLogger(__name__)

T = TypeVar("T")


class Reporter(Protocol):
    """Who is told how the run is doing."""

    def publish(self, core: Core, now_s: float) -> None:
        """Look at the core and return at once; called about once a second, on the loop's thread."""
        ...

    def note(self, text: str) -> None:
        """Say something, in one line, that people should know at once."""
        ...


REPORT_EVERY_S = 1.0
"""How often the reporter is called (seconds)."""


class Driver:
    """One run over real (or virtual) time. :meth:`run` may be called once."""

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
        self._notices = Notices()
        self._attempts: dict[int, asyncio.Task[None]] = {}
        self._helpers: set[asyncio.Task[None]] = set()
        self._arrived: deque[tuple[Start, Reply]] = deque()
        self._landed: deque[tuple[Start, Reply]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._report_s = 0.0
        # Whether anything may be begun: not before the run, and not once it is coming to its end.
        self._running = False
        self._store_sound = True
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
                raise self._with_what_is_lost(known) from None
            raise
        except StoreError as error:
            raise self._with_what_is_lost(error) from None
        if self._core.disk_gave_up:
            raise DiskFull(
                f"the disk of the run folder had no room for {self._disk_wait()}; all answers that had come "
                "are on it: free some space there, and start the same command again"
            )

    def _with_what_is_lost(self, error: GenpipeError) -> GenpipeError:
        """The same error; where the disk is to blame, with how many answers had come in vain."""
        unsaved = self._core.unsaved
        if not isinstance(error, StoreError) or not unsaved:
            return error
        return type(error)(
            f"{error}. {unsaved} prompts that had ended are not on disk: the same command asks them again"
        )

    async def _run_group(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                self._running = True
                try:
                    await self._measure()
                    await self._finished.wait()
                finally:
                    self._running = False
                for helper in self._helpers:
                    helper.cancel()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await finish(self._save())

    def stop(self, grace_s: float) -> None:
        """Start nothing more and end once what is in flight has ended, or after ``grace_s`` seconds."""
        self._core.stop(self._clock.now_s(), grace_s=grace_s)
        self._step(self._pump)

    def set_limit(self, url: str, limit: int) -> None:
        """Change the live fleet; see :meth:`genpipe.core.flow.Core.set_limit`. No effect after the end."""

        def change() -> None:
            self._core.set_limit(url, limit, self._clock.now_s())
            self._pump()

        self._step(change)

    def fail(self, error: GenpipeError) -> None:
        """End the run with ``error``, met outside of the run's tasks; without effect after the end."""
        if self._running:
            self._begin(_raise(error), "fail")

    def _begin(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        task = self._group.create_task(work, name=name)
        task.add_done_callback(self._look_at_end)
        return task

    def _look_at_end(self, task: asyncio.Task[None]) -> None:
        """A task that fails ends the run: the group cancels all others, and they may begin nothing new."""
        if not task.cancelled() and task.exception() is not None:
            self._running = False

    def _step(self, step: Callable[[], None]) -> None:
        """Take a step outside of any task, where the loop would log an error and go on without us."""
        if not self._running:
            return
        try:
            step()
        except Exception as error:  # a bug in this step is to end the run as one in a task does
            self._running = False
            self._begin(_raise(error), "bug")

    def _pump(self) -> None:
        """Start what is due. No await here: deciding and starting are one step."""
        if not self._running:
            return
        for action in self._core.due(self._clock.now_s()):
            match action:
                case Start():
                    self._attempts[action.attempt] = self._begin(self._attempt(action))
                case Commit(group=group):
                    self._begin(self._commit(group), "commit")
                case Measure():
                    self._begin(self._measure(), "measure")
                case Read(count=count):
                    self._begin(self._read(count), "read")
                case Probe():
                    self._help(self._probe(action), "probe")
                case Inquire():
                    self._help(self._inquire(action), "inquire")
                case Cancel(attempt=attempt):
                    # A task that is cancelled before its first step never runs, and would not say that it
                    # was cancelled: let it take that step first.
                    self._loop.call_soon(self._cancel, attempt)
        if self._core.finished:
            self._finished.set()
        else:
            self._set_timer()

    def _help(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Begin a task that nothing is lost with: the end of the run does not wait for it."""
        task = self._begin(work, name)
        self._helpers.add(task)
        task.add_done_callback(self._helpers.discard)

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
        delay_s = max(0.0, when_s - self._clock.now_s()) + 0.0005
        self._timer = self._loop.call_later(delay_s, self._step, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_s = self._clock.now_s()
        if now_s >= self._report_s:
            self._report_s = now_s + REPORT_EVERY_S
            self._reporter.publish(self._core, now_s)
            self._say(self._notices.due(self._core, now_s))
        self._pump()

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self._reporter.note(line)

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
            if not self._arrived:
                self._loop.call_soon(self._step, self._on_arrived)
            self._arrived.append((start, reply))
            return
        finally:
            del self._attempts[start.attempt]
        self._pump()

    def _on_arrived(self) -> None:
        """Refill the slots of all replies that arrived in this turn of the loop, in one step."""
        self._land_arrived()
        self._pump()
        # The refills take their first step, which puts them on the wire, before the replies are looked at.
        self._loop.call_soon(self._step, self._on_landed)

    def _on_landed(self) -> None:
        self._examine_landed()
        self._pump()

    def _land_arrived(self) -> None:
        now_s = self._clock.now_s()
        while self._arrived:
            start, reply = self._arrived.popleft()
            self._core.landed(start, reply.wire_s, reply.last_s, now_s)
            self._landed.append((start, reply))

    def _examine_landed(self) -> None:
        """Look at what has landed since the last look."""
        while self._landed:
            start, reply = self._landed.popleft()
            try:
                answer = self._transport.examine(start, reply)
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
        checkup = await self._transport.probe(probe)
        self._core.probed(probe.server, checkup, self._clock.now_s())
        if checkup.alien:
            url = self._core.fleet.servers[probe.server].spec.url
            self._say(self._notices.once(f"{url} {checkup.trouble}"))
        self._pump()

    async def _inquire(self, inquire: Inquire) -> None:
        vitals = await self._transport.inquire(inquire)
        self._core.inquired(inquire.server, vitals, self._clock.now_s())
        self._pump()

    async def _commit(self, group: Group) -> None:
        try:
            await finish(self._make_durable(group))
        except DiskFull as error:
            trouble = str(error)
            self._watch_disk(lambda now_s: self._core.refused(group.number, trouble, now_s))
        self._pump()

    async def _measure(self) -> None:
        space = await self._store.space()
        self._watch_disk(lambda now_s: self._core.measured(space, now_s))
        self._pump()

    async def _make_durable(self, group: Group) -> None:
        try:
            space = await self._store.commit(group)
        except DiskFull:
            raise
        except Exception:
            self._store_sound = False
            raise
        self._watch_disk(lambda now_s: self._core.committed(group.number, now_s, space))

    def _watch_disk(self, step: Callable[[float], None]) -> None:
        """Take a step that may find the disk short of room, or find room again, and say so."""
        before = self._core.disk_trouble
        step(self._clock.now_s())
        after = self._core.disk_trouble
        if before is None and after is not None:
            self._reporter.note(
                f"{after}. Nothing more is sent, and what comes is kept in memory; going on as soon as there "
                f"is room, for up to {self._disk_wait()}"
            )
        elif before is not None and after is None:
            self._reporter.note("the disk has room again: going on")

    def _disk_wait(self) -> str:
        return wording.duration(self._core.settings.disk_wait_s)

    async def _save(self) -> None:
        """At the end: what has come is looked at and made durable, what has not is to be asked again."""
        try:
            self._land_arrived()
            self._examine_landed()
            # Tasks that were cancelled before their first step have not said so.
            for flight in list(self._core.flights()):
                self._core.cancelled(flight.start, self._clock.now_s())
        finally:
            # After a commit that failed nothing may be assumed, so that nothing more is tried.
            if self._store_sound:
                for group in self._core.unsaved_groups():
                    await self._make_durable(group)


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Carry ``work`` to its end even if cancelled meanwhile, however often; then let the cancel through.

    ``work`` brings its own time limit. Its error goes before a cancel.
    """
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


async def _raise(error: Exception) -> None:
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
