"""Drives the real ``Core`` through a world in virtual time and holds it to its promises after every event."""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from genpipe.core.errors import AttemptError, FaultKind, PromptFault, ServerFault
from genpipe.core.flow import Core, FlowSettings
from genpipe.core.values import (
    Action,
    Answer,
    BadLine,
    Cancel,
    Chunk,
    Commit,
    Group,
    Probe,
    Prompt,
    Read,
    ServerSpec,
    Start,
)
from genpipe.sim.world import World

ANSWER = Answer(
    response={"content": "x"},
    finish_reason="stop",
    usage=None,
    output_tokens=10,
    model=None,
    size_bytes=100,
)

EVENTS_PER_PROMPT_MAX = 200
"""More events than this for each prompt, and 20,000 beside, and a run is taken not to come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a simulated run ended.

    Attributes:
        makespan_s: virtual time from start to end.
        done: indices answered and durable.
        gave_up: indices given up and durable as such.
        attempts: requests sent.
        core: the scheduler, for its books.
    """

    makespan_s: float
    done: frozenset[int]
    gave_up: frozenset[int]
    attempts: int
    core: Core


class Engine:
    """One run of a world.

    Attributes:
        watch: called after every event with the time, for tests that look in between.
    """

    def __init__(
        self,
        world: World,
        settings: FlowSettings | None = None,
        *,
        check: bool = True,
        watch: Callable[[float], None] | None = None,
    ) -> None:
        self.world = world
        self.watch = watch
        self._rng = random.Random(world.seed)
        specs = [ServerSpec(url=f"http://s{n}", limit=law.limit) for n, law in enumerate(world.servers)]
        self.core = Core(settings or FlowSettings(), specs, random.Random(world.seed + 1), 0.0)
        self._check = check
        self._now_s = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_s: float | None = None
        self._next_index = 0
        self._open: dict[int, Start] = {}
        self._done: set[int] = set()
        self._gave_up: set[int] = set()
        self._attempts = 0
        fates = random.Random(world.seed + 2)
        self._fates = [fates.random() for _ in range(world.prompts)]

    def run(self) -> Outcome:
        """Run to the end.

        Raises:
            AssertionError: a promise was broken, or the run does not end.
        """
        core = self.core
        if self.world.stop_s is not None:
            self._at(self.world.stop_s, lambda: core.stop(self._now_s, grace_s=self.world.grace_s))
        self._pump()
        events_max = 20_000 + EVENTS_PER_PROMPT_MAX * self.world.prompts
        for _ in range(events_max):
            if core.finished:
                break
            assert self._events, "nothing is to happen and the run has not ended"
            self._now_s, _, happen = heapq.heappop(self._events)
            happen()
            self._pump()
            if self._check:
                core.check()
            if self.watch is not None:
                self.watch(self._now_s)
        self._check_end()
        return Outcome(
            makespan_s=self._now_s,
            done=frozenset(self._done),
            gave_up=frozenset(self._gave_up),
            attempts=self._attempts,
            core=core,
        )

    def _check_end(self) -> None:
        core, world = self.core, self.world
        core.check()
        assert core.finished, f"not finished after {self._now_s} s of virtual time"
        assert not self._open
        assert (len(self._done), len(self._gave_up)) == (core.done, core.gave_up)
        if not core.stopping:
            assert len(self._done) + len(self._gave_up) == world.prompts, "a prompt vanished"

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when_s, self._now_s), next(self._order), happen))

    def _pump(self) -> None:
        for action in self.core.due(self._now_s):
            self._act(action)
        timer_s = self.core.next_timer_s()
        if timer_s is not None and (self._timer_s is None or timer_s < self._timer_s):
            self._timer_s = max(timer_s, self._now_s)
            self._at(timer_s, self._timer)

    def _timer(self) -> None:
        if self._timer_s is not None and self._timer_s <= self._now_s:
            self._timer_s = None

    def _act(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Cancel():
                start = self._open.pop(action.attempt, None)
                if start is not None:
                    self._at(self._now_s, lambda: self.core.cancelled(start, self._now_s))
            case Probe():
                self._at(self._now_s + 1.0, lambda: self._probed(action))
            case Read():
                assert not self.core.stopping, "a read after the stop"
                self._at(self._now_s + self.world.read_s, lambda: self._read(action.count))
            case Commit():
                self._at(self._now_s + self.world.commit_s, lambda: self._committed(action.group))

    # ---- the input and the writer ----

    def _read(self, count: int) -> None:
        world = self.world
        stop = min(world.prompts, self._next_index + min(count, world.chunk_max))
        prompts, bad = [], []
        for index in range(self._next_index, stop):
            if self._fates[index] > 1 - world.bad_share:
                bad.append(BadLine(index=index, file="w", line=index + 1, reason="made up"))
            else:
                prompts.append(Prompt(index=index, payload=b"[]"))
        self._next_index = stop
        chunk = Chunk(prompts=tuple(prompts), bad=tuple(bad), exhausted=stop == world.prompts)
        self.core.offered(chunk, self._now_s)

    def _committed(self, group: Group) -> None:
        for finished in group.finished:
            index = finished.prompt.index
            assert index not in self._done, f"prompt {index} was committed twice"
            assert index not in self._gave_up
            self._done.add(index)
        for gave_up in group.given_up:
            assert gave_up.index not in self._done
            assert gave_up.index not in self._gave_up
            self._gave_up.add(gave_up.index)
        self.core.committed(group.number, self._now_s)

    # ---- the servers ----

    def _start(self, start: Start) -> None:
        core, law, now_s = self.core, self.world.servers[start.server], self._now_s
        assert not core.stopping, "something was sent after the stop"
        index = start.prompt.index
        assert index not in self._done
        assert index not in self._gave_up
        if self._check:
            assert all(other.prompt.index != index for other in self._open.values()), "sent twice at once"
            here = sum(other.server == start.server for other in self._open.values())
            assert here < law.limit, "over the limit"
        self._attempts += 1
        self._open[start.attempt] = start
        wire_s = now_s + law.connect_s
        fault = self._fault(start)
        if isinstance(fault, ServerFault) and fault.kind is FaultKind.UNREACHABLE:
            self._at(now_s + 0.001, lambda: self._failed(start, fault, None))
        elif fault is not None and self._rng.random() < 0.7:
            self._at(wire_s + 0.002, lambda: self._failed(start, fault, wire_s))
        else:
            last_s = wire_s + law.latency_s(self._rng)
            seen_s = last_s + self._rng.uniform(0.0, self.world.handle_s)
            self._at(seen_s, lambda: self._landed(start, wire_s, last_s, fault))

    def _fault(self, start: Start) -> AttemptError | None:
        world, law, now_s = self.world, self.world.servers[start.server], self._now_s
        fate = self._fates[start.prompt.index]
        if law.refuses(now_s) and now_s < world.quiet_s:
            return ServerFault("refused", kind=FaultKind.UNREACHABLE)
        if law.busy_over is not None:
            here = sum(other.server == start.server for other in self._open.values())
            if here > law.busy_over:
                return ServerFault("queue full", kind=FaultKind.BUSY, status=503)
        if now_s < world.quiet_s:
            for kind, chance in law.faults.items():
                if self._rng.random() < chance:
                    return ServerFault(f"drawn {kind}", kind=kind)
        if fate < world.refused_share:
            return PromptFault("bad request", status=400)
        if fate < world.refused_share + world.cursed_share:
            return ServerFault("internal error", kind=FaultKind.BROKEN, status=500)
        return None

    def _failed(self, start: Start, fault: AttemptError, wire_s: float | None) -> None:
        if self._open.pop(start.attempt, None) is not None:
            fault.wire_s = wire_s
            self.core.failed(start, fault, self._now_s)

    def _landed(self, start: Start, wire_s: float, last_s: float, fault: AttemptError | None) -> None:
        if self._open.pop(start.attempt, None) is None:
            return
        self.core.landed(start, wire_s, last_s, self._now_s)
        # The real driver refills the slot before it looks at the reply.
        self._pump()
        if fault is None:
            self.core.answered(start, ANSWER, self._now_s)
        else:
            self.core.failed(start, fault, self._now_s)

    def _probed(self, probe: Probe) -> None:
        law, now_s = self.world.servers[probe.server], self._now_s
        refuses = law.refuses(now_s) and now_s < self.world.quiet_s
        self.core.probed(
            probe.server, "refused" if refuses else None, asked=probe.ask and not refuses, now_s=now_s
        )
