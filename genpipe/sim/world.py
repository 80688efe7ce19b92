"""A world to schedule in: servers with laws of latency and fault, an input, a writer. Made from a seed."""

import math
import random
from dataclasses import dataclass, field

from genpipe.core.errors import FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLaw:
    """How one simulated server behaves.

    Attributes:
        limit: requests that it is given at once.
        median_s: median latency (seconds).
        sigma: spread of the log-normal latency.
        longest_s: no latency is longer, as a limit on output tokens has it (seconds).
        connect_s: time until a request is on the wire.
        outages: spans in which it refuses at once, (from, to) in seconds; ``inf`` for good.
        faults: chance of each kind of fault per attempt.
        busy_over: with more requests than this in flight it says that it is busy; None for never.
    """

    limit: int = 8
    median_s: float = 1.0
    sigma: float = 0.5
    longest_s: float = math.inf
    connect_s: float = 0.0005
    outages: tuple[tuple[float, float], ...] = ()
    faults: dict[FaultKind, float] = field(default_factory=dict)
    busy_over: int | None = None

    def refuses(self, now_s: float) -> bool:
        """Whether it refuses at once, now."""
        return any(start <= now_s < end for start, end in self.outages)

    def latency_s(self, rng: random.Random) -> float:
        """Time on the wire of one answer."""
        return min(self.longest_s, self.median_s * math.exp(rng.gauss(0.0, self.sigma)))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything that a run meets.

    Attributes:
        seed: of the run's own randomness.
        prompts: records in the input.
        servers: the fleet.
        read_s: time of one read.
        chunk_max: prompts in one read, at most.
        commit_s: time of one commit.
        handle_s: how late the client looks at a reply, at most (uniform).
        refused_share: share of prompts that every server refuses (400).
        cursed_share: share of prompts that break every server's answer (500 for ever).
        bad_share: share of records that are bad lines.
        quiet_s: from here on no server misbehaves of its own accord (seconds).
        stop_s: a stop is asked for at this time, or None.
        grace_s: grace of that stop.
    """

    seed: int = 0
    prompts: int = 200
    servers: tuple[ServerLaw, ...] = (ServerLaw(),)
    read_s: float = 0.01
    chunk_max: int = 1000
    commit_s: float = 0.005
    handle_s: float = 0.0
    refused_share: float = 0.0
    cursed_share: float = 0.0
    bad_share: float = 0.0
    quiet_s: float = math.inf
    stop_s: float | None = None
    grace_s: float = 5.0


def from_seed(seed: int) -> World:
    """A small, nasty world; each kind of trouble is left out of about half of them."""
    rng = random.Random(seed)

    def sometimes(value: float) -> float:
        return value if rng.random() < 0.5 else 0.0

    servers = []
    for _ in range(rng.randint(1, 5)):
        outages: list[tuple[float, float]] = []
        if rng.random() < 0.4:
            start_s = rng.choice([0.0, rng.uniform(0, 20)])
            outages.append((start_s, start_s + rng.uniform(0.5, 30)))
        servers.append(
            ServerLaw(
                limit=rng.randint(1, 12),
                median_s=rng.choice([0.05, 0.5, 2.0]) * rng.uniform(0.5, 2),
                sigma=rng.choice([0.0, 0.6, 1.2]),
                connect_s=rng.choice([0.0, 0.001, 0.2]),
                outages=tuple(outages),
                faults={kind: sometimes(rng.uniform(0, 0.3)) for kind in FaultKind},
                busy_over=rng.randint(1, 6) if rng.random() < 0.3 else None,
            )
        )
    return World(
        seed=seed,
        prompts=rng.randint(0, 400),
        servers=tuple(servers),
        read_s=rng.choice([0.0, 0.01, 1.5]),
        chunk_max=rng.choice([1, 7, 1000]),
        commit_s=rng.choice([0.0, 0.005, 0.8]),
        handle_s=rng.choice([0.0, 0.002, 0.5]),
        refused_share=sometimes(0.1),
        cursed_share=sometimes(0.05),
        bad_share=sometimes(0.1),
        quiet_s=rng.uniform(5, 60),
        stop_s=rng.uniform(0, 30) if rng.random() < 0.3 else None,
        grace_s=rng.choice([0.0, 1.0, 20.0]),
    )
