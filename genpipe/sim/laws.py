"""How simulated servers behave: latencies, faults, and spells in which a server is not itself."""

import math
import random
from dataclasses import dataclass, field
from enum import StrEnum

from genpipe.core.errors import FaultKind


class Ill(StrEnum):
    """What can be wrong with a server for a while, other than that nobody listens there."""

    STOPPED = "stopped"
    """The process stands still: nothing is answered, and all goes on afterwards."""

    HUNG = "hung"
    """Its scheduler stands still: what it says of itself is old, and all goes on afterwards."""

    HOLE = "hole"
    """Packets vanish: what is sent or answered meanwhile never arrives."""

    ALIEN = "alien"
    """It serves another model."""


class Loads(StrEnum):
    """What a server's count of its own requests is of."""

    ASKED = "asked"
    """Of the moment: its scheduler is asked."""

    DATED = "dated"
    """Of its last step; one that has nothing to do takes steps too."""

    RESTING = "resting"
    """Of its last step; one that has nothing to do takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """One span in which a server is ill.

    Attributes:
        ill: in what way.
        start_s: when it begins.
        end_s: when it is over.
    """

    ill: Ill
    start_s: float
    end_s: float


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
        crashes: what is in flight when an outage begins is lost.
        spells: spans in which it is ill.
        faults: chance of each kind of fault per attempt.
        swallows: chance that a request reaches it and is forgotten there.
        lies: chance that its health is not what it says.
        busy_over: with more requests than this in flight it says that it is busy; None for never.
        retry_after_s: the pause that it asks for when it is busy, or None.
        loads: what its count of its own requests is of.
        starting: it has not been seen well when the run begins.
        joins_s: it is added to the run at this time; None: it is there from the start.
    """

    limit: int = 8
    median_s: float = 1.0
    sigma: float = 0.5
    longest_s: float = math.inf
    connect_s: float = 0.0005
    outages: tuple[tuple[float, float], ...] = ()
    crashes: bool = False
    spells: tuple[Spell, ...] = ()
    faults: dict[FaultKind, float] = field(default_factory=dict)
    swallows: float = 0.0
    lies: float = 0.0
    busy_over: int | None = None
    retry_after_s: float | None = None
    loads: Loads = Loads.ASKED
    starting: bool = False
    joins_s: float | None = None

    def refuses(self, now_s: float) -> bool:
        """Whether it refuses at once, now."""
        return any(start <= now_s < end for start, end in self.outages)

    def ill(self, now_s: float) -> Ill | None:
        """What is wrong with it, now."""
        return next((each.ill for each in self.spells if each.start_s <= now_s < each.end_s), None)

    def latency_s(self, rng: random.Random) -> float:
        """Time on the wire of one answer."""
        return min(self.longest_s, self.median_s * math.exp(rng.gauss(0.0, self.sigma)))

    def done_s(self, begun_s: float, work_s: float) -> float:
        """When work of this length that begins now is done, where the server stands still meanwhile."""
        done_s = begun_s + work_s
        for spell in sorted(self.spells, key=lambda each: each.start_s):
            if spell.ill in (Ill.STOPPED, Ill.HUNG) and begun_s < spell.end_s and done_s >= spell.start_s:
                done_s += spell.end_s - max(begun_s, spell.start_s)
        return done_s
