"""Drives the real ``Core`` through a world in virtual time and holds it to its promises after every event."""

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from genpipe.core.flow import Core, FlowSettings
from genpipe.core.outbox import COMMITS_MAX
from genpipe.core.server import ServerState
from genpipe.core.values import (
    Action,
    BadLine,
    Cancel,
    Chunk,
    Commit,
    Group,
    Inquire,
    Probe,
    Read,
    ServerSpec,
    Start,
)
from genpipe.sim.ledger import Ledger
from genpipe.sim.promises import Promises
from genpipe.sim.talks import Script
from genpipe.sim.virtual import VirtualServer
from genpipe.sim.wire import Wire
from genpipe.sim.world import Change, Fate, World

EVENTS_PER_PROMPT_MAX = 120
"""More events than this for each prompt, and 15,000 beside, and a run is taken not to come to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a simulated run ended.

    Attributes:
        makespan_s: virtual time from start to end.
        done: indices answered and durable.
        gave_up: indices given up and durable as such.
        attempts: requests sent.
        events: steps that it took.
        counts: what happened how often.
        slack: the part of its bound that the run took after all was quiet.
        core: the scheduler, for its books.
    """

    makespan_s: float
    done: frozenset[int]
    gave_up: frozenset[int]
    attempts: int
    events: int
    counts: dict[str, int]
    slack: float
    core: Core


class Engine:
    """One run of a world.

    Attributes:
        fates: what becomes of each prompt on whatever server.
        watch: called after every event with the time, for tests that look in between.
        story: lines that tell what happened, where that was wished for.
        now_s: the run's clock.
    """

    core_class = Core

    def __init__(
        self,
        world: World,
        settings: FlowSettings | None = None,
        *,
        check: bool = True,
        watch: Callable[[float], None] | None = None,
        story: list[str] | None = None,
    ) -> None:
        self.world, self.watch, self.story = world, watch, story
        self.now_s = 0.0
        self._script = Script(world)
        self.fates = self._script.fates
        laws = [law for law in world.servers if law.joins_s is None]
        starting = frozenset(position for position, law in enumerate(laws) if law.starting)
        specs = [ServerSpec(url=_url(position), limit=law.limit) for position, law in enumerate(laws)]
        self.core = self.core_class(
            settings or world.settings, specs, random.Random(world.seed + 1), 0.0, starting=starting
        )
        self._check = check
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_s: float | None = None
        self._next_index = 0
        self._done: set[int] = set()
        self._gave_up: set[int] = set()
        self._attempts = self._steps = 0
        self._reads = self._commits = 0
        self._commit_s = self._written_s = -math.inf
        self._open_at_stop: dict[int, Start] | None = None
        limits = [spec.limit for spec in specs]
        self._ledger = Ledger(self.core.settings, limits, self._script, starting)
        self._wire = Wire(self, world, self.core, self._ledger, self._script)
        for law in laws:
            self._wire.join(VirtualServer(law, world.quiet_s))
        self._promises = Promises(world, self.core, self._ledger, self._wire)

    def run(self) -> Outcome:
        """Run to the end.

        Raises:
            AssertionError: a promise was broken, or the run does not end.
        """
        core, world = self.core, self.world
        if world.stop_s is not None:
            self.at(world.stop_s, lambda: core.stop(self.now_s, grace_s=world.grace_s))
        for position, law in enumerate(world.servers):
            if law.joins_s is not None:
                self.at(law.joins_s, lambda position=position: self._join(position))  # type: ignore[misc]
        for change in world.changes:
            self.at(change.at_s, lambda change=change: self._change(change))  # type: ignore[misc]
        self.pump()
        events_max = 15_000 + EVENTS_PER_PROMPT_MAX * sum(self._script.turns)
        for self._steps in range(events_max):
            if core.finished:
                break
            assert self._events, "nothing is to happen and the run has not ended"
            self.now_s, _, happen = heapq.heappop(self._events)
            happen()
            self.pump()
            if self._check:
                self._promises.check(self.now_s)
            if self.watch is not None:
                self.watch(self.now_s)
        self._check_end()
        return Outcome(
            makespan_s=self.now_s,
            done=frozenset(self._done),
            gave_up=frozenset(self._gave_up),
            attempts=self._attempts,
            events=self._steps,
            counts=dict(self._ledger.counts),
            slack=self._promises.slack(self.now_s),
            core=core,
        )

    def _check_end(self) -> None:
        core, world = self.core, self.world
        core.check()
        assert core.finished, f"not finished after {self.now_s} s of virtual time"
        assert not self._ledger.open
        assert (len(self._done), len(self._gave_up)) == (core.done, core.gave_up)
        if not self._check:
            return
        if world.handle_s == 0.0:
            assert core.books.owned_by_all_s()["dispatch"] < 1e-6, "a slot was not refilled at once"
        assert core.late == self._ledger.counts["late answers dropped"]
        if core.refusal is not None:
            self._promises.check_refusal(self.now_s)
        tokens = {each.position: each.output_tokens for each in core.fleet.servers if each.output_tokens}
        assert tokens == self._ledger.tokens, "tokens were counted for another server, or twice"
        if not core.stopping:
            assert len(self._done) + len(self._gave_up) == world.prompts, "a prompt vanished"
            return
        # A stop leaves what was in flight to a later run: all that did not end in its grace.
        under_way = {each.prompt.index for each in (self._open_at_stop or {}).values()}
        returned = under_way - self._done - self._gave_up
        assert core.returned == len(returned), f"{core.returned} returned, of {len(returned)} to be"

    # ---- for the wire ----

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Have something happen then, after what is to happen at that time already."""
        heapq.heappush(self._events, (max(when_s, self.now_s), next(self._order), happen))

    def tell(self, text: str) -> None:
        """Note something for the story."""
        if self.story is not None:
            self.story.append(f"{self.now_s:9.2f} s  {text}")

    def pump(self) -> None:
        """Carry out what is due."""
        self._look_for_stop()
        actions = self.core.due(self.now_s)
        for action in actions:
            self._act(action)
        self._look_for_stop()
        timer_s = self.core.next_timer_s()
        if timer_s is not None and (self._timer_s is None or timer_s < self._timer_s):
            self._timer_s = max(timer_s, self.now_s)
            self.at(timer_s, self._timer)

    def _look_for_stop(self) -> None:
        """Remember what was in flight, for what had not ended, when the run was stopped."""
        if self.core.stopping and self._open_at_stop is None:
            self._open_at_stop = {
                number: start
                for number, start in self._ledger.open.items()
                if not self._ledger.is_over(start)
            }

    def _timer(self) -> None:
        if self._timer_s is not None and self._timer_s <= self.now_s:
            self._timer_s = None

    def _act(self, action: Action) -> None:
        match action:
            case Start():
                self._start(action)
            case Cancel(attempt=attempt):
                self._wire.called_off(attempt)
            case Probe():
                self._wire.probe(action)
            case Inquire():
                self._wire.inquire(action)
            case Read(count=count):
                assert not self.core.stopping, "a read after the stop"
                assert self._reads == 0, "two reads at once"
                self._reads += 1
                self.at(self.now_s + self.world.read_s, lambda: self._read(count))
            case Commit(group=group):
                self._check_group(group)
                # One writer, that takes one group after another.
                self._written_s = max(self.now_s, self._written_s) + self.world.commit_s
                self.at(self._written_s, lambda: self._committed(group))

    def _start(self, start: Start) -> None:
        core = self.core
        assert not core.stopping, "something was sent after the stop"
        if self._check:
            server = core.fleet.servers[start.server]
            assert server.in_use, f"something was sent to server {start.server}, which is {server.state}"
            may_be_second = core.in_tail and server.state is ServerState.UP
            self._ledger.check_start(start, self.now_s, may_be_second=may_be_second)
        self._ledger.started(start)
        self._attempts += 1
        self._wire.start(start)

    # ---- changes of the fleet ----

    def _join(self, position: int) -> None:
        law = self.world.servers[position]
        self._wire.join(VirtualServer(law, self.world.quiet_s))
        self._limit(position, law.limit)

    def _change(self, change: Change) -> None:
        self._limit(change.server, change.limit)

    def _limit(self, position: int, limit: int) -> None:
        self.tell(f"server {position} has a limit of {limit} from now on")
        self._ledger.limited(position, limit)
        self._promises.changed_s = self.now_s
        assert self.core.set_limit(_url(position), limit, self.now_s) == position

    # ---- the input and the writer ----

    def _read(self, count: int) -> None:
        self._reads -= 1
        world = self.world
        stop = min(world.prompts, self._next_index + min(count, world.chunk_max))
        prompts, bad = [], []
        for index in range(self._next_index, stop):
            if self.fates[index] is Fate.BAD:
                bad.append(BadLine(index=index, file="w", line=index + 1, reason="made up"))
            else:
                prompts.append(self._script.prompt(index))
        self._next_index = stop
        chunk = Chunk(prompts=tuple(prompts), bad=tuple(bad), exhausted=stop == world.prompts)
        self.core.offered(chunk, self.now_s)

    def _check_group(self, group: Group) -> None:
        settings = self.core.settings
        records = len(group.finished) + len(group.given_up)
        assert self._commits < COMMITS_MAX, "too many commits at once"
        assert 1 <= records <= settings.group_records_max
        full = records == settings.group_records_max
        assert full or self._commits == 0, "a small commit beside another"
        full |= self.core.stopping
        assert full or self.now_s >= self._commit_s + settings.group_interval_s, "a commit too early"
        self._commits += 1
        self._commit_s = self.now_s
        for gave_up in group.given_up:
            if self._check:
                self._ledger.check_given_up(gave_up)
            if gave_up.error_class != "BadLine":
                self.tell(f"prompt {gave_up.index} is given up: {gave_up.message}")

    def _committed(self, group: Group) -> None:
        self._commits -= 1
        for finished in group.finished:
            index = finished.prompt.index
            assert index not in self._done, f"prompt {index} was committed twice"
            assert index not in self._gave_up
            self._done.add(index)
            if self._check:
                self._ledger.check_finished(finished)
        for gave_up in group.given_up:
            assert gave_up.index not in self._done
            assert gave_up.index not in self._gave_up
            self._gave_up.add(gave_up.index)
        self.core.committed(group.number, self.now_s)


def _url(position: int) -> str:
    return f"http://s{position}"
