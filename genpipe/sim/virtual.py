"""One simulated server in virtual time: what it has, whether it is well, and what it says of itself."""

import math
import random
from dataclasses import replace

from genpipe.core.values import Checkup, Inquire, Probe, Start, Vitals
from genpipe.sim.laws import Ill, Loads, ServerLaw

HEALTH_S, HEALTH_TIMEOUT_S = 1.0, 5.0
"""How long a good health check takes, and how long one is waited for (seconds)."""


class VirtualServer:
    """What one server has and is.

    Attributes:
        law: how it behaves, of its own accord only until it is to be quiet.
        requests: when each request that it has came, by its attempt's number.
        dead_until_s: nobody listens before this, since it died.
        hung_s: since when it hangs with a prompt, until it is killed; None if it does not.
        deaths: how often it died.
    """

    def __init__(self, law: ServerLaw, quiet_s: float) -> None:
        self.law = replace(
            law,
            outages=tuple((start_s, min(end_s, quiet_s)) for start_s, end_s in law.outages),
            spells=tuple(replace(each, end_s=min(each.end_s, quiet_s)) for each in law.spells),
        )
        self.requests: dict[int, Start] = {}
        self.dead_until_s = -math.inf
        self.hung_s: float | None = None
        self.deaths = 0
        self._quiet_s = quiet_s
        self._forgotten: dict[int, Start] = {}
        self._aborting: list[float] = []
        self._published = (0, 0.0)

    def refuses(self, now_s: float) -> bool:
        """Whether nobody listens there."""
        return now_s < self.dead_until_s or self.law.refuses(now_s)

    def ill(self, now_s: float) -> Ill | None:
        """What is wrong with it though somebody listens."""
        return Ill.HUNG if self.hung_s is not None else self.law.ill(now_s)

    def well(self, now_s: float) -> bool:
        """Whether it answers what it is asked."""
        return not self.refuses(now_s) and self.ill(now_s) is None

    def was_ill(self, since_s: float, now_s: float) -> bool:
        """Whether anything was wrong with it in that span."""
        spells = any(each.start_s <= now_s and each.end_s > since_s for each in self.law.spells)
        return spells or not self.well(now_s)

    def well_since_s(self) -> float:
        """Since when it has been well, once it is to be quiet and as it is now."""
        return math.inf if self.hung_s is not None else max(self._quiet_s, self.dead_until_s)

    def take(self, start: Start, now_s: float) -> None:
        """A request has come."""
        self.requests[start.attempt] = start
        self._publish(now_s)

    def drop(self, attempt: int, now_s: float) -> bool:
        """A request is gone; whether it was there."""
        was_there = self.requests.pop(attempt, None) is not None
        self._publish(now_s)
        return was_there

    def abort(self, attempt: int, noticed_s: float, now_s: float) -> None:
        """The client has hung up, which is noticed later."""
        self._forgotten.pop(attempt, None)
        if self.drop(attempt, now_s):
            self._aborting.append(noticed_s)

    def die(self, until_s: float) -> list[Start]:
        """It dies, and is away until then; what is lost with it."""
        lost = [*self._forgotten.values(), *self.requests.values()]
        self._forgotten.clear()
        self.requests.clear()
        self._aborting.clear()
        self.hung_s = None
        self.deaths += 1
        self.dead_until_s = max(self.dead_until_s, until_s)
        return lost

    def swallow(self, start: Start) -> None:
        """A request has come and is forgotten; its connection is still there."""
        self._forgotten[start.attempt] = start

    def hang(self, now_s: float) -> None:
        """Nothing goes on there from now on."""
        self._publish(now_s)
        self.hung_s = now_s

    def known(self, now_s: float) -> int:
        """Requests that it has."""
        return len(self.requests) + sum(noticed_s > now_s for noticed_s in self._aborting)

    def vitals(self, inquire: Inquire, now_s: float) -> tuple[float, Vitals]:
        """What it says of itself, and how long that takes (seconds)."""
        if self.refuses(now_s):
            return 0.001, Vitals(trouble="refused")
        ill, loads = self.ill(now_s), self.law.loads
        if ill in (Ill.STOPPED, Ill.HOLE) or (ill is Ill.HUNG and loads is Loads.ASKED):
            return inquire.timeout_s, Vitals(trouble="said nothing")
        known = self.known(now_s)
        count, as_of_s = self._published
        if ill is None and loads is Loads.RESTING and known == 0:
            count, as_of_s = 0, max([as_of_s, *self._aborting])
        elif ill is None:
            count, as_of_s = known, now_s
        return 0.01, Vitals(known=count, mark=f"of {as_of_s}", age_s=now_s - as_of_s)

    def checkup(self, probe: Probe, rng: random.Random, now_s: float) -> tuple[float, Checkup]:
        """What a look at it finds, and how long that takes (seconds)."""
        if self.refuses(now_s):
            return 0.001, Checkup(trouble="refused", refused=True)
        ill = self.ill(now_s)
        if ill is Ill.ALIEN:
            return 0.1, Checkup(trouble="serves another model", alien=True)
        lies = now_s < self._quiet_s and rng.random() < self.law.lies
        if ill is Ill.HOLE or (ill is None) == lies or (ill is not None and probe.ask):
            return HEALTH_TIMEOUT_S, Checkup(trouble="no health within 5 s")
        return HEALTH_S, Checkup(asked=probe.ask)

    def _publish(self, now_s: float) -> None:
        """Of its last step it says this, also when it takes no more."""
        if self.ill(now_s) is None:
            self._published = (self.known(now_s), now_s)
