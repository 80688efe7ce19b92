"""Drives the real ``Core`` through a world in virtual time and holds it to its promises after every event."""

import argparse
import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from genpipe.core import wording
from genpipe.core.books import shares
from genpipe.core.errors import AttemptError, FaultKind, PromptFault, ServerFault
from genpipe.core.flow import Core, FlowSettings
from genpipe.core.outbox import COMMITS_MAX
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
from genpipe.sim.world import World, from_seed

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


class _Ledger:
    """Counts anew what may be charged to a prompt: a broken answer of a server that then answered others."""

    def __init__(self, servers: int) -> None:
        self.answers = [0] * servers
        self._charged: Counter[int] = Counter()
        self._pending: dict[int, dict[int, int]] = {}

    def failed(self, start: Start, fault: AttemptError) -> None:
        pending = self._pending.setdefault(start.prompt.index, {})
        for server, answers in list(pending.items()):
            if self.answers[server] > answers:
                del pending[server]
                self._charged[start.prompt.index] += 1
        if isinstance(fault, ServerFault) and fault.kind is FaultKind.BROKEN:
            pending[start.server] = self.answers[start.server]

    def check_start(self, index: int, attempts_max: int) -> None:
        assert self._charged[index] < attempts_max, f"prompt {index} is sent again, and should be given up"

    def check_given_up(self, index: int, attempts_max: int) -> None:
        assert self._charged[index] >= attempts_max, f"prompt {index} was given up too soon"


class Engine:
    """One run of a world.

    Attributes:
        watch: called after every event with the time, for tests that look in between.
    """

    core_class = Core

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
        self.core = self.core_class(settings or FlowSettings(), specs, random.Random(world.seed + 1), 0.0)
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
        self._reads = self._commits = 0
        self._commit_s = self._written_s = -math.inf
        self._ledger = _Ledger(len(specs))
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
                self._check_now()
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

    def _check_now(self) -> None:
        """What must hold after every event."""
        core = self.core
        core.check()
        assert core.in_flight == len(self._open), "a slot that nothing is in, or the other way round"
        timer_s = core.next_timer_s()
        assert timer_s is None or timer_s > self._now_s, "a timer for what should have happened"
        run = core.books.run
        assert not run.ready or run.paused or core.fleet.room(self._now_s) == 0, "work ready and a slot free"

    def _check_end(self) -> None:
        core, world = self.core, self.world
        core.check()
        assert core.finished, f"not finished after {self._now_s} s of virtual time"
        assert not self._open
        assert (len(self._done), len(self._gave_up)) == (core.done, core.gave_up)
        if self._check and self.world.handle_s == 0.0:
            assert core.books.owned_by_all_s()["dispatch"] < 1e-6, "a slot was not refilled at once"
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
                self._at(self._now_s, lambda: self._cancel(action.attempt))
            case Probe():
                self._at(self._now_s + 1.0, lambda: self._probed(action))
            case Read():
                assert not self.core.stopping, "a read after the stop"
                assert self._reads == 0, "two reads at once"
                self._reads += 1
                self._at(self._now_s + self.world.read_s, lambda: self._read(action.count))
            case Commit():
                self._check_group(action.group)
                # One writer, that takes one group after another.
                self._written_s = max(self._now_s, self._written_s) + self.world.commit_s
                self._at(self._written_s, lambda: self._committed(action.group))

    # ---- the input and the writer ----

    def _check_group(self, group: Group) -> None:
        settings = self.core.settings
        records = len(group.finished) + len(group.given_up)
        assert self._commits < COMMITS_MAX, "too many commits at once"
        assert 1 <= records <= settings.group_records_max
        full = records == settings.group_records_max
        assert full or self._commits == 0, "a small commit beside another"
        full |= self.core.stopping
        assert full or self._now_s >= self._commit_s + settings.group_interval_s, "a commit too early"
        self._commits += 1
        self._commit_s = self._now_s
        if self._check:
            for gave_up in group.given_up:
                if gave_up.error_class == "ServerFault":
                    self._ledger.check_given_up(gave_up.index, settings.prompt_attempts)

    def _read(self, count: int) -> None:
        self._reads -= 1
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
        self._commits -= 1
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
            self._ledger.check_start(index, core.settings.prompt_attempts)
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
            self._ledger.failed(start, fault)
            self.core.failed(start, fault, self._now_s)

    def _cancel(self, attempt: int) -> None:
        start = self._open.pop(attempt, None)
        if start is not None:
            self.core.cancelled(start, self._now_s)

    def _landed(self, start: Start, wire_s: float, last_s: float, fault: AttemptError | None) -> None:
        if self._open.pop(start.attempt, None) is None:
            return
        self.core.landed(start, wire_s, last_s, self._now_s)
        # The real driver refills the slot before it looks at the reply.
        self._pump()
        if fault is None:
            self._ledger.answers[start.server] += 1
            self.core.answered(start, ANSWER, self._now_s)
        else:
            self._ledger.failed(start, fault)
            self.core.failed(start, fault, self._now_s)

    def _probed(self, probe: Probe) -> None:
        law, now_s = self.world.servers[probe.server], self._now_s
        refuses = law.refuses(now_s) and now_s < self.world.quiet_s
        self._ledger.answers[probe.server] += probe.ask and not refuses
        self.core.probed(
            probe.server, "refused" if refuses else None, asked=probe.ask and not refuses, now_s=now_s
        )


def main(argv: Sequence[str] | None = None, *, engine: type[Engine] = Engine) -> int:
    """Run the world of one seed, and print how it went.

    Raises:
        AssertionError: a promise was broken; the seed has been printed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m genpipe.sim.engine", description="Run the world that a seed makes, in virtual time."
    )
    parser.add_argument("seed", type=int)
    seed = parser.parse_args(argv).seed
    world = from_seed(seed)
    try:
        outcome = engine(world).run()
    except AssertionError:
        _say(f"seed {seed}: a promise was broken; again with: {_command(seed)}")
        _say(_world_table(world))
        raise
    _say(_world_table(world))
    _say(_outcome_table(world, outcome))
    _say(f"again with: {_command(seed)}")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - this command's result


def _command(seed: int) -> str:
    return f"python -m genpipe.sim.engine {seed}"


def _world_table(world: World) -> str:
    lines = [f"the world of seed {world.seed}"]
    lines += [
        f"  {each.name:<15} {getattr(world, each.name)}"
        for each in fields(world)
        if each.name not in ("seed", "servers")
    ]
    for number, law in enumerate(world.servers):
        outages = ", ".join(f"{start_s:.1f} to {end_s:.1f} s" for start_s, end_s in law.outages) or "none"
        drawn = [f"{kind} {wording.percent(chance)}" for kind, chance in law.faults.items() if chance]
        lines += [
            f"  server {number}: {law.limit} slots, {law.median_s:.2f} s (sigma {law.sigma})",
            f"    outages {outages}; faults {', '.join(drawn) or 'none'}; busy over {law.busy_over}",
        ]
    return "\n".join(lines)


def _outcome_table(world: World, outcome: Outcome) -> str:
    done, gave_up, core = len(outcome.done), len(outcome.gave_up), outcome.core
    lines = [
        f"ended after {outcome.makespan_s:.1f} s of virtual time",
        f"  {done} of {world.prompts} done, {gave_up} given up, {core.returned} returned",
        f"  {outcome.attempts} requests sent",
        "slot time",
    ]
    by_owner = shares(core.books.owned_by_all_s()) or {}
    lines += [f"  {owner:<10} {wording.percent(share):>7}" for owner, share in by_owner.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
