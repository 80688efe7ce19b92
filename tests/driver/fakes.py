"""Stand-ins for what the driver needs of the world, each behind its port, with a log of what happened."""

import asyncio
from collections.abc import Callable, Sequence

from genpipe.core.errors import AttemptError, DiskFull, FaultKind, ServerFault, StoreError
from genpipe.core.flow import Core
from genpipe.core.ports import Clock
from genpipe.core.values import (
    Answer,
    BadLine,
    Checkup,
    Chunk,
    Group,
    Inquire,
    Probe,
    Prompt,
    Reply,
    Space,
    Start,
    Vitals,
)

BROKEN_BODY = b"this is no answer"


class FakeSource:
    """So many prompts, of which some are done and some are bad lines.

    Attributes:
        reads: the counts that were asked for.
        at_end_of_read: called as a read ends.
        trouble: by number of the read, from 0, what is raised instead.
    """

    def __init__(
        self,
        count: int,
        *,
        done: Sequence[int] = (),
        bad: Sequence[int] = (),
        chunk_max: int = 1000,
        read_s: float = 0.0,
    ) -> None:
        self.total: int | None = count
        self.reads: list[int] = []
        self.at_end_of_read: Callable[[], object] = lambda: None
        self.trouble: dict[int, Exception] = {}
        self._bad = frozenset(bad)
        self._left = [index for index in range(count) if index not in done]
        self._chunk_max = chunk_max
        self._read_s = read_s
        self._reading = False

    async def read(self, count: int) -> Chunk:
        assert count >= 1
        assert not self._reading, "two reads at once"
        self._reading = True
        number = len(self.reads)
        self.reads.append(count)
        try:
            await asyncio.sleep(self._read_s)
        finally:
            self._reading = False
            self.at_end_of_read()
        if number in self.trouble:
            raise self.trouble[number]
        size = min(count, self._chunk_max)
        now, self._left = self._left[:size], self._left[size:]
        return Chunk(
            prompts=tuple(Prompt(index=index, payload=b"[]") for index in now if index not in self._bad),
            bad=tuple(
                BadLine(index=index, file="fake", line=index + 1, reason="bad")
                for index in now
                if index in self._bad
            ),
            exhausted=not self._left,
        )


class FakeTransport:
    """Servers that answer after a time, or fail, as two functions of the attempt say.

    Attributes:
        log: what happened in order: ``("sent" | "came" | "examined", index)``.
        came: indices of the good answers that were handed over, in order.
        open: attempts under way, by number.
        reconnects: by server; for a test to set.
        probes: what was asked of servers, in order.
        inquiries: likewise of silent ones.
        crash_in_examine: index of the prompt whose reply meets a bug.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        latency_s: Callable[[Start], float] = lambda start: 1.0,
        fault: Callable[[Start], Exception | None] = lambda start: None,
        trouble: Callable[[int], str | Checkup | None] = lambda server: None,
        probe_s: float = 0.5,
        vitals: Callable[[int], Vitals] = lambda server: Vitals(),
        inquire_s: float = 0.01,
    ) -> None:
        self.log: list[tuple[str, int]] = []
        self.came: list[int] = []
        self.open: dict[int, Start] = {}
        self.reconnects: Sequence[int] = range(0)
        self.probes: list[Probe] = []
        self.inquiries: list[Inquire] = []
        self.crash_in_examine: int | None = None
        self._clock = clock
        self._latency_s = latency_s
        self._fault = fault
        self._trouble = trouble
        self._probe_s = probe_s
        self._vitals = vitals
        self._inquire_s = inquire_s

    async def generate(self, start: Start) -> Reply:
        index = start.prompt.index
        others = [other.server for other in self.open.values() if other.prompt.index == index]
        assert len(others) < 2, "sent three times at once"
        assert start.server not in others, "sent twice at once to one server"
        self.log.append(("sent", index))
        self.open[start.attempt] = start
        try:
            wire_s = self._clock.now_s()
            await asyncio.sleep(self._latency_s(start))
        finally:
            del self.open[start.attempt]
        fault = self._fault(start)
        body = b"%d" % index
        if isinstance(fault, ServerFault) and fault.status == 200:
            body = BROKEN_BODY
        elif fault is not None:
            if isinstance(fault, AttemptError):
                fault.wire_s = wire_s
            raise fault
        else:
            self.came.append(index)
        self.log.append(("came", index))
        return Reply(body=body, wire_s=wire_s, last_s=self._clock.now_s())

    def examine(self, start: Start, reply: Reply) -> Answer:
        if reply.body == BROKEN_BODY:
            raise ServerFault("no answer", kind=FaultKind.BROKEN, status=200, wire_s=reply.wire_s)
        index = int(reply.body)
        if index == self.crash_in_examine:
            raise ZeroDivisionError("a bug in examine")
        self.log.append(("examined", index))
        return Answer(
            response={"content": f"answer to {index}", "reasoning_content": None, "tool_calls": None},
            finish_reason="stop",
            usage=None,
            output_tokens=10,
            model=None,
            size_bytes=len(reply.body),
        )

    async def probe(self, probe: Probe) -> Checkup:
        self.probes.append(probe)
        await asyncio.sleep(self._probe_s)
        found = self._trouble(probe.server)
        if isinstance(found, Checkup):
            return found
        return Checkup(trouble=found, asked=probe.ask and found is None)

    async def inquire(self, inquire: Inquire) -> Vitals:
        self.inquiries.append(inquire)
        try:
            async with asyncio.timeout(inquire.timeout_s):
                await asyncio.sleep(self._inquire_s)
        except TimeoutError:
            return Vitals(trouble="said nothing in time")
        return self._vitals(inquire.server)


class FakeStore:
    """A disk in memory. A commit is carried to its end also where nobody waits for it any more.

    Attributes:
        done: durable answers by index.
        failed: indices that are durable as given up.
        groups: the groups, in order of their ends.
        trouble: by number of the commit, from 0, what it raises at its end instead.
        room: what the disk says of its room.
    """

    def __init__(self, commit_s: float = 0.0) -> None:
        self.done: dict[int, Answer] = {}
        self.failed: set[int] = set()
        self.groups: list[Group] = []
        self.trouble: dict[int, Exception] = {}
        self.room = Space(free_bytes=1 << 40, total_bytes=1 << 41)
        self._commit_s = commit_s
        self._commits = 0
        self._free_s = 0.0
        self._is_broken = False

    async def commit(self, group: Group) -> Space:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._free_s = max(loop.time(), self._free_s) + self._commit_s
        loop.call_at(self._free_s, self._end, group, ended)
        await asyncio.shield(ended)
        return self.room

    async def space(self) -> Space:
        return self.room

    def _end(self, group: Group, ended: "asyncio.Future[None]") -> None:
        trouble = self.trouble.get(self._commits)
        self._commits += 1
        if trouble is None and self._is_broken:
            trouble = StoreError("it takes no more")
        if trouble is not None:
            self._is_broken |= not isinstance(trouble, DiskFull)
            ended.set_exception(trouble)
            return
        for finished in group.finished:
            index = finished.prompt.index
            assert index not in self.done, f"prompt {index} was committed twice"
            assert index not in self.failed
            self.done[index] = finished.answer
        for given_up in group.given_up:
            assert given_up.index not in self.done
            assert given_up.index not in self.failed
            self.failed.add(given_up.index)
        self.groups.append(group)
        ended.set_result(None)


class RecordingReporter:
    """Notes when it was told, and holds the core to its promises each time.

    Attributes:
        times_s: when it was told.
        notes: what it was to say.
        trouble: what it raises the next time, or None.
    """

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.notes: list[str] = []
        self.trouble: Exception | None = None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def publish(self, core: Core, now_s: float) -> None:
        core.check()
        self.times_s.append(now_s)
        if self.trouble is not None:
            raise self.trouble
