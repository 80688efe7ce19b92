"""A world to schedule in: servers with their laws, an input, a writer, changes. Made from a seed."""

import math
import random
from dataclasses import dataclass, field, replace
from enum import StrEnum

from genpipe.core.errors import FaultKind
from genpipe.core.settings import FlowSettings
from genpipe.sim.laws import Ill, Loads, ServerLaw, Spell

__all__ = ["Change", "Fate", "Ill", "Loads", "ServerLaw", "Spell", "World", "from_seed"]

DRAWN = (FaultKind.UNREACHABLE, FaultKind.LOST, FaultKind.BUSY, FaultKind.MISROUTED, FaultKind.BROKEN)
"""Faults that happen to single attempts; the others are of our own making."""


class Fate(StrEnum):
    """What becomes of a prompt on whatever server."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """Every server refuses it (400)."""
    CURSED = "cursed"
    """It breaks every server's answer (500 for ever)."""
    KILLS = "kills"
    """Every server dies of it."""
    HANGS = "hangs"
    """Every server hangs with it, until a watchdog kills the server."""
    STUCK = "stuck"
    """It is answered, and nothing can be made of the answer: a conversation that cannot go on."""
    BAD = "bad"
    """Its line is no prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A limit is changed while the run goes on.

    Attributes:
        at_s: when.
        server: position in the world.
        limit: the new one; 0 removes the server.
    """

    at_s: float
    server: int
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything that a run meets.

    Attributes:
        seed: of the run's own randomness.
        prompts: records in the input.
        servers: the fleet; those that join later come last, in the order in which they do.
        changes: of limits, in order.
        settings: the scheduler's numbers.
        read_s: time of one read.
        chunk_max: prompts in one read, at most.
        commit_s: time of one commit.
        handle_s: how late the client looks at a reply, at most (uniform).
        refused_share: share of prompts that every server refuses.
        cursed_share: share of prompts that break every server's answer.
        kills_share: share of prompts that servers die of.
        hangs_share: share of prompts that servers hang with.
        stuck_share: share of prompts whose answer leads nowhere.
        talks_share: share of prompts that are conversations of several turns.
        bad_share: share of records that are bad lines.
        long_share: share of prompts whose answer takes ``long_s`` longer.
        long_s: how much that is (seconds).
        kill_s: how long a server has such a prompt before it dies or hangs (seconds).
        watchdog_s: how long it hangs before it is killed (seconds).
        revive_s: how long a server that died is away (seconds).
        tardy: chance that an answer arrives in the very instant in which its attempt is called off.
        quiet_s: from here on no server misbehaves of its own accord (seconds).
        stop_s: a stop is asked for at this time, or None.
        grace_s: grace of that stop.
    """

    seed: int = 0
    prompts: int = 200
    servers: tuple[ServerLaw, ...] = (ServerLaw(),)
    changes: tuple[Change, ...] = ()
    settings: FlowSettings = field(default_factory=FlowSettings)
    read_s: float = 0.01
    chunk_max: int = 1000
    commit_s: float = 0.005
    handle_s: float = 0.0
    refused_share: float = 0.0
    cursed_share: float = 0.0
    kills_share: float = 0.0
    hangs_share: float = 0.0
    stuck_share: float = 0.0
    talks_share: float = 0.0
    bad_share: float = 0.0
    long_share: float = 0.0
    long_s: float = 0.0
    kill_s: float = 2.0
    watchdog_s: float = 30.0
    revive_s: float = 20.0
    tardy: float = 0.0
    quiet_s: float = math.inf
    stop_s: float | None = None
    grace_s: float = 5.0

    def fate(self, drawn: float) -> Fate:
        """The fate of a prompt for which this number between 0 and 1 was drawn."""
        if drawn > 1 - self.bad_share:
            return Fate.BAD
        for fate, share in (
            (Fate.REFUSED, self.refused_share),
            (Fate.CURSED, self.cursed_share),
            (Fate.KILLS, self.kills_share),
            (Fate.HANGS, self.hangs_share),
            (Fate.STUCK, self.stuck_share),
        ):
            if drawn < share:
                return fate
            drawn -= share
        return Fate.ANSWERED


class _Dice:
    """What one seed says."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def sometimes(self, value: float, chance: float = 0.5) -> float:
        return value if self.rng.random() < chance else 0.0

    def server(self, troubles: frozenset[str], quiet_s: float) -> ServerLaw:
        rng = self.rng
        outages: list[tuple[float, float]] = []
        if rng.random() < 0.4:
            start_s = rng.choice([0.0, rng.uniform(0, 20)])
            outages.append((start_s, min(quiet_s, start_s + rng.uniform(0.5, 30))))
        spells = [
            self._spell(ill, quiet_s)
            for ill in (Ill.STOPPED, Ill.HUNG, Ill.HOLE)
            if ill in troubles and rng.random() < 0.4
        ]
        starting = "starting" in troubles and rng.random() < 0.6
        if starting and outages and rng.random() < 0.7:
            outages[0] = (0.0, outages[0][1])
        if starting and Ill.ALIEN in troubles and rng.random() < 0.5:
            spells = [Spell(ill=Ill.ALIEN, start_s=0.0, end_s=rng.uniform(0, quiet_s))]
        slow = "slow" in troubles and rng.random() < 0.4
        return ServerLaw(
            limit=rng.randint(1, 12),
            median_s=rng.choice([0.05, 0.5, 2.0]) * rng.uniform(0.5, 2) * (15 if slow else 1),
            sigma=rng.choice([0.0, 0.6, 1.2]),
            longest_s=240.0,
            connect_s=rng.choice([0.0, 0.001, 0.2]),
            outages=tuple(outages),
            crashes="crashes" in troubles and rng.random() < 0.7,
            spells=tuple(sorted(spells, key=lambda each: each.start_s)),
            faults={kind: self.sometimes(rng.uniform(0, 0.3)) for kind in DRAWN if kind in troubles},
            swallows=rng.uniform(0, 0.1) if "swallows" in troubles else 0.0,
            lies=rng.choice([rng.uniform(0, 0.5), 1.0]) if "lies" in troubles else 0.0,
            busy_over=rng.randint(1, 6) if "busy" in troubles and rng.random() < 0.6 else None,
            retry_after_s=rng.choice([None, 0.0, 3.0, 20.0]),
            loads=rng.choice(list(Loads)),
            starting=starting,
        )

    def _spell(self, ill: Ill, quiet_s: float) -> Spell:
        start_s = self.rng.uniform(0, min(40, quiet_s))
        length_s = self.rng.choice([self.rng.uniform(1, 30), self.rng.uniform(30, 200)])
        return Spell(ill=ill, start_s=start_s, end_s=min(quiet_s, start_s + length_s))

    def settings(self) -> FlowSettings:
        rng = self.rng
        return FlowSettings(
            silent_s=rng.choice([60.0, 12.0]),
            stall_s=rng.uniform(15, 90) if rng.random() < 0.2 else None,
            longest_first=rng.random() < 0.5,
            alone=rng.random() < 0.5,
            hedge=rng.random() < 0.6,
            give_up_s=rng.uniform(5, 60) if rng.random() < 0.15 else None,
            ramp_s=rng.choice([1.0, 0.0, 5.0]),
            ready_spare=rng.choice([256, 0, 16]),
            backlog_records_max=rng.choice([4096, 4096, 6]),
        )

    def changes(self, servers: list[ServerLaw], quiet_s: float) -> list[Change]:
        """Limits that go up and down; servers that are removed come back sooner or later."""
        rng = self.rng
        changes: list[Change] = []
        for position, law in enumerate(servers):
            at_s = law.joins_s or 0.0
            while rng.random() < 0.5:
                at_s += rng.uniform(0, 20)
                gone = rng.random() < 0.4
                changes.append(Change(at_s=at_s, server=position, limit=0 if gone else rng.randint(1, 12)))
                if gone and position == 2 and rng.random() < 0.7:
                    # One of three or more leaves for good.
                    break
                if gone:
                    at_s += rng.uniform(0, 20)
                    changes.append(Change(at_s=at_s, server=position, limit=law.limit))
        changes = [
            replace(each, at_s=max(servers[each.server].joins_s or 0.0, min(each.at_s, quiet_s)))
            for each in changes
        ]
        return sorted(changes, key=lambda each: each.at_s)


_TROUBLES = (
    *DRAWN, *Ill, "starting", "slow", "crashes", "swallows", "lies", "busy", "joins", "changes",
)  # fmt: skip


def from_seed(seed: int) -> World:
    """A small, nasty world; each kind of trouble is left out of about half of them."""
    dice = _Dice(seed)
    rng, sometimes = dice.rng, dice.sometimes
    troubles = frozenset(each for each in _TROUBLES if rng.random() < 0.5)
    quiet_s = rng.choice([rng.uniform(5, 60), rng.uniform(60, 250)])
    servers = [dice.server(troubles, quiet_s) for _ in range(rng.randint(1, 5))]
    if "joins" in troubles:
        times_s = sorted(rng.uniform(0, 40) for _ in range(rng.randint(1, 2)))
        servers += [replace(dice.server(troubles, quiet_s), joins_s=joins_s) for joins_s in times_s]
    return World(
        seed=seed,
        prompts=rng.choice([rng.randint(0, 60), rng.randint(0, 400)]),
        servers=tuple(servers),
        changes=tuple(dice.changes(servers, quiet_s) if "changes" in troubles else ()),
        settings=dice.settings(),
        read_s=rng.choice([0.0, 0.01, 1.5]),
        chunk_max=rng.choice([1, 7, 1000]),
        commit_s=rng.choice([0.0, 0.005, 0.8]),
        handle_s=rng.choice([0.0, 0.002, 0.5]),
        refused_share=sometimes(0.1),
        cursed_share=sometimes(0.05),
        kills_share=sometimes(0.015),
        hangs_share=sometimes(0.01, 0.3),
        bad_share=sometimes(0.1),
        long_share=sometimes(0.03),
        long_s=rng.uniform(60, 300),
        kill_s=rng.uniform(0.1, 5),
        watchdog_s=rng.choice([rng.uniform(5, 30), rng.uniform(70, 150)]),
        revive_s=rng.uniform(20, 60),
        tardy=sometimes(0.8),
        quiet_s=quiet_s,
        stop_s=rng.uniform(0, 60) if rng.random() < 0.2 else None,
        grace_s=rng.choice([0.0, 1.0, 20.0]),
        talks_share=sometimes(rng.choice([0.05, 0.3, 0.6])),
        stuck_share=sometimes(0.03),
    )
