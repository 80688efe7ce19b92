"""Decides anew, from what happened in a world, what may be charged to whom and what may be sent where."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from genpipe.core.errors import AttemptError, FaultKind, ServerFault
from genpipe.core.flow import Core
from genpipe.core.settings import FlowSettings
from genpipe.core.values import Checkup, GivenUp, Start
from genpipe.sim.world import Fate

DEATHS_MAX = 2
"""A prompt that was in flight at so many deaths goes to no other server (count)."""


PROBATION_S = 15.0
"""A server that still lives so long after a marked prompt came to it may have another (seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """A prompt that was in flight where a connection broke, or a server fell silent.

    Attributes:
        index: of the prompt.
        lost_s: when.
        real: its server did die, or stand still.
    """

    index: int
    lost_s: float
    real: bool


class Ledger:
    """The account of attempts, charges and deaths, kept without a look at the scheduler's own.

    Attributes:
        open: attempts in flight, by number.
        counts: what happened how often, for the summary.
        faults: attempts that ended in a server fault (count).
    """

    def __init__(
        self, settings: FlowSettings, limits: Sequence[int], fates: Sequence[Fate], starting: Collection[int]
    ) -> None:
        self.open: dict[int, Start] = {}
        self.counts: Counter[str] = Counter()
        self.faults = 0
        self._settings = settings
        self._fates = fates
        self._limits = list(limits)
        self._answers = [0] * len(limits)
        self._aborts: list[list[float]] = [[] for _ in limits]
        self._live: Counter[int] = Counter()
        self._charged: Counter[int] = Counter()
        self._pending: dict[int, dict[int, int]] = {}
        self._fallen: dict[int, list[_Loss]] = {}
        self._killed: dict[int, list[int]] = {}
        self._incidents: Counter[int] = Counter()
        self._harmed: dict[int, list[int]] = {}
        self._ended: set[int] = set()
        self._alien = [False] * len(limits)
        self._alive_s = [-math.inf] * len(limits)
        self._seen_well = [position not in starting for position in range(len(limits))]

    # ---- what happens ----

    def started(self, start: Start) -> None:
        """An attempt begins."""
        self.open[start.attempt] = start
        self._live[start.prompt.index] += 1
        if self._live[start.prompt.index] > 1:
            self.counts["hedges"] += 1

    def over(self, start: Start) -> bool:
        """An attempt is over; whether it was not already."""
        if self.open.pop(start.attempt, None) is None:
            return False
        self._live[start.prompt.index] -= 1
        return True

    def check_start(self, start: Start, now_s: float, *, in_tail: bool) -> None:
        """Check that an attempt may begin.

        Raises:
            AssertionError: it may not.
        """
        index, server = start.prompt.index, start.server
        here = [each for each in self.open.values() if each.server == server]
        twins = [each for each in self.open.values() if each.prompt.index == index]
        self._aborts[server] = [until_s for until_s in self._aborts[server] if until_s > now_s]
        taken = len(here) + len(self._aborts[server])
        assert taken < self._limits[server], f"over the limit of server {server}: {taken} slots are taken"
        assert self._seen_well[server], f"server {server} has not been seen well yet"
        assert not self._alien[server], f"server {server} serves another model"
        assert index not in self._ended, f"prompt {index} is sent again, and has ended"
        assert self._charged[index] < self._settings.prompt_attempts or twins, (
            f"prompt {index} was to be given up"
        )
        assert len(twins) <= 1, f"prompt {index} is in flight three times"
        if twins:
            assert in_tail, f"prompt {index} is sent twice, and others wait"
            assert self._settings.hedge, "hedging is off"
            assert twins[0].server != server, f"prompt {index} is sent twice to server {server}"
        self._check_marked(start, here)

    def _check_marked(self, start: Start, here: Sequence[Start]) -> None:
        index = start.prompt.index
        killed = self._killed.get(index, [])
        if len(killed) >= DEATHS_MAX:
            assert self._settings.alone, f"prompt {index} goes to one more server after {killed}"
            assert len(killed) == DEATHS_MAX, f"prompt {index} goes on after {killed}"
            assert start.server in killed, f"prompt {index} goes to a third server after {killed}"
            assert not here, f"prompt {index} was to be alone"
        alone = [each for each in here if len(self._killed.get(each.prompt.index, ())) >= DEATHS_MAX]
        assert not alone, f"prompt {index} joins one that was to be alone"
        if here and self.is_marked(index):
            alive_s = self._alive_s[start.server]
            young = [each for each in here if alive_s < each.started_s + PROBATION_S]
            marked = [each.prompt.index for each in young if self.is_marked(each.prompt.index)]
            assert not marked, (
                f"two at server {start.server} that servers may have died of: {index}, {marked}"
            )

    def is_marked(self, index: int) -> bool:
        """Whether a server may have died of this prompt."""
        return bool(self._killed.get(index)) or bool(self._losses(index))

    def _losses(self, index: int) -> list["_Loss"]:
        return [each for fallen in self._fallen.values() for each in fallen if each.index == index]

    def has_ended(self, index: int) -> bool:
        """Whether a prompt was answered or given up."""
        return index in self._ended

    def answered(self, start: Start) -> None:
        """A good answer came: its server had not died of what was lost before it was asked."""
        index, server = start.prompt.index, start.server
        self._answers[server] += 1
        fallen = self._fallen.get(server, ())
        if fallen and start.started_s >= max(each.lost_s for each in fallen):
            del self._fallen[server]
        self.counts["late answers dropped"] += index in self._ended
        self._ended.add(index)

    def alive(self, server: int, now_s: float) -> None:
        """A server gave a sign of life."""
        self._alive_s[server] = now_s

    def harmed(self, index: int, server: int) -> None:
        """A poison prompt kills a server, or hangs it."""
        self._harmed.setdefault(index, []).append(server)
        self.counts["servers harmed by one prompt, at most"] = max(
            self.counts["servers harmed by one prompt, at most"], len(self._harmed[index])
        )

    def failed(self, start: Start, fault: AttemptError, now_s: float, *, real: bool) -> None:
        """An attempt failed; ``real`` if its server did die, or stood still."""
        index, server = start.prompt.index, start.server
        self.faults += isinstance(fault, ServerFault)
        if not isinstance(fault, ServerFault):
            self._ended.add(index)
        if index in self._ended or not isinstance(fault, ServerFault):
            return
        self.counts[f"{fault.kind}"] += 1
        pending = self._pending.setdefault(index, {})
        for other, answers in list(pending.items()):
            if self._answers[other] > answers:
                del pending[other]
                self._charged[index] += 1
        if fault.kind in (FaultKind.BROKEN, FaultKind.OVERDUE, FaultKind.STALLED):
            pending[server] = self._answers[server]
        if fault.kind in (FaultKind.LOST, FaultKind.STALLED):
            here = self._fallen.setdefault(server, [])
            if self._limits[server] and all(each.index != index for each in here):
                here.append(_Loss(index=index, lost_s=now_s, real=real))

    def aborted(self, start: Start, now_s: float) -> None:
        """A request was given up: its server notices later."""
        self._aborts[start.server].append(now_s + self._settings.abort_s)

    def looked(self, server: int, checkup: Checkup, began_s: float, core: Core) -> None:
        """A server was looked at, from ``began_s`` on: it has died of what was in flight, or has not."""
        if checkup.trouble is not None and not checkup.refused:
            self._alien[server] |= checkup.alien
            return
        self._alien[server] = False
        if checkup.asked and not core.fleet.servers[server].in_use and self._limits[server]:
            self._answers[server] += 1
        if checkup.trouble is None:
            self._seen_well[server] = True
        others = [
            each for each in core.fleet.servers if each.position != server and self._limits[each.position]
        ]
        others_in_use = any(each.in_use for each in others) or not others
        for loss in self._fallen.pop(server, ()):
            if checkup.refused:
                self._incidents[loss.index] += 1
            if checkup.refused and loss.lost_s < began_s and others_in_use:
                self._killed.setdefault(loss.index, []).append(server)

    def limited(self, server: int, limit: int) -> None:
        """A limit was changed, or a server was added (the next position) or removed (0)."""
        if server == len(self._limits):
            self._limits.append(0)
            self._answers.append(0)
            self._aborts.append([])
            self._alien.append(False)
            self._alive_s.append(-math.inf)
            self._seen_well.append(False)
        if self._limits[server] == 0:
            # It was not in the run, and is asked for its health and its model first.
            self._seen_well[server] = self._alien[server] = False
        self._limits[server] = limit
        if limit == 0:
            self._fallen.pop(server, None)

    # ---- what is asked ----

    def check_given_up(self, gave_up: GivenUp) -> None:
        """Check that a prompt is given up for a reason.

        Raises:
            AssertionError: it is given up unjustly.
        """
        index, fate = gave_up.index, self._fates[gave_up.index]
        match gave_up.error_class:
            case "BadLine":
                just = fate is Fate.BAD
            case "PromptFault":
                just = fate is Fate.REFUSED
            case "ServerFault":
                just = self._charged[index] >= self._settings.prompt_attempts
            case _:
                doubts = sum(each.real for each in self._losses(index))
                just = self._incidents[index] + doubts >= DEATHS_MAX
                self.counts["given up as poison"] += 1
                self.counts["innocents given up as poison"] += fate not in (Fate.KILLS, Fate.HANGS)
        self._ended.add(index)
        assert just, f"prompt {index} ({fate}) was given up unjustly: {gave_up.message}"
