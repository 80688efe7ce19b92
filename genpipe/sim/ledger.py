"""Decides anew, from what happened in a world, what may be charged to whom and what may be sent where."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from genpipe.core.errors import AttemptError, FaultKind, ServerFault
from genpipe.core.fleet import BUSY_JITTER
from genpipe.core.flow import Core
from genpipe.core.settings import FlowSettings
from genpipe.core.values import Checkup, Finished, GivenUp, Start
from genpipe.sim.talks import TOKENS, Script, made_json, turn_of
from genpipe.sim.world import Fate

DEATHS_MAX = 2
"""A prompt that was in flight at so many deaths goes to no other server (count)."""


HEDGES_MAX = 2
"""Second attempts of one prompt, one after the other (count)."""

TOLERANCE_S = 1e-6
"""What rounding may make of a moment (seconds)."""

PROBATION_S = 15.0
"""A server that still lives so long after a marked prompt came to it may have another (seconds)."""


_Turn = tuple[int, int]
"""A prompt's index, and which turn of it: each turn has attempts, faults and pauses of its own."""

NOBODY = -1
"""In place of the index where a loss points at no prompt any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """A prompt that was in flight where a connection broke, or a server fell silent.

    Attributes:
        index: of the prompt, or ``NOBODY`` once the turn that was lost is answered.
        server: where.
        lost_s: when.
        real: its server did die, or stand still.
    """

    index: int
    server: int
    lost_s: float
    real: bool


class Ledger:
    """The account of attempts, charges and deaths, kept without a look at the scheduler's own.

    Attributes:
        open: attempts in flight, by number.
        counts: what happened how often, for the summary.
        faults: attempts that ended in a server fault (count).
        tokens: by server: what its answers have of them, late ones left out.
    """

    def __init__(
        self, settings: FlowSettings, limits: Sequence[int], script: Script, starting: Collection[int]
    ) -> None:
        self.open: dict[int, Start] = {}
        self.counts: Counter[str] = Counter()
        self.faults = 0
        self.tokens: Counter[int] = Counter()
        self._settings = settings
        self._script = script
        self._made: defaultdict[int, list[Start]] = defaultdict(list)
        self._sent: Counter[int] = Counter()
        self._to_go_on: set[int] = set()
        self._limits = list(limits)
        self._answers = [0] * len(limits)
        self._aborts: list[list[float]] = [[] for _ in limits]
        self._live: Counter[_Turn] = Counter()
        self._charged: Counter[_Turn] = Counter()
        self._pending: dict[_Turn, dict[int, int]] = {}
        self._fallen: dict[int, list[_Loss]] = {}
        self._killed: dict[int, list[int]] = {}
        self._incidents: Counter[int] = Counter()
        self._harmed: dict[int, list[int]] = {}
        self._ended: set[int] = set()
        self._hedges: Counter[_Turn] = Counter()
        self._asleep_until_s: defaultdict[_Turn, float] = defaultdict(float)
        self._rest_until_s = [0.0] * len(limits)
        self._crowd_until_s = [0.0] * len(limits)
        self._trial_s: list[float | None] = [0.0 if each in starting else None for each in range(len(limits))]
        self._alive_s = [-math.inf] * len(limits)
        self._unwell = [False] * len(limits)
        self._seen_well = [position not in starting for position in range(len(limits))]

    # ---- what happens ----

    def started(self, start: Start) -> None:
        """An attempt begins."""
        index, key = start.prompt.index, _turn(start)
        self.open[start.attempt] = start
        self._sent[index] += 1
        self._to_go_on.discard(index)
        self._live[key] += 1
        if self._live[key] > 1:
            self._hedges[key] += 1
            self.counts["hedges"] += 1

    def over(self, start: Start) -> bool:
        """An attempt is over; whether it was not already."""
        if self.open.pop(start.attempt, None) is None:
            return False
        self._live[_turn(start)] -= 1
        return True

    def check_start(self, start: Start, now_s: float, *, may_be_second: bool) -> None:
        """Check that an attempt may begin.

        Raises:
            AssertionError: it may not.
        """
        index, server, key = start.prompt.index, start.server, _turn(start)
        here = [each for each in self.open.values() if each.server == server]
        twins = [each for each in self.open.values() if each.prompt.index == index and _turn(each) == key]
        self._check_turn(start)
        self._aborts[server] = [until_s for until_s in self._aborts[server] if until_s > now_s]
        taken = len(here) + len(self._aborts[server])
        assert taken < self._limits[server], f"over the limit of server {server}: {taken} slots are taken"
        assert self._seen_well[server], f"server {server} has not been seen well since it was not"
        assert now_s >= self._rest_until_s[server], f"server {server} is busy, and asked for a rest"
        assert twins or now_s >= self._asleep_until_s[key], f"prompt {index} was to wait a little"
        assert index not in self._ended, f"prompt {index} is sent again, and has ended"
        assert self._charged[key] < self._settings.prompt_attempts or twins, (
            f"prompt {index} was to be given up"
        )
        assert len(twins) <= 1, f"prompt {index} is in flight three times"
        if twins:
            assert may_be_second, f"prompt {index} is sent twice, and others wait, or the server is in doubt"
            assert self._settings.hedge, "hedging is off"
            assert twins[0].server != server, f"prompt {index} is sent twice to server {server}"
            assert self._hedges[key] < HEDGES_MAX, f"prompt {index} is sent twice once more"
        self._check_trial(start, here, now_s)
        self._check_marked(start, here)

    def _check_turn(self, start: Start) -> None:
        """Turns come in order, each with the answers before it, and before prompts that were never sent."""
        index, made = start.prompt.index, self._made[start.prompt.index]
        turn, turns = turn_of(start.prompt), self._script.turns[index]
        assert turn == len(made), f"prompt {index} is sent for turn {turn}, and {len(made)} are answered"
        if turns > 1:
            history = start.prompt.conversation.made
            assert history == _numbers(made), f"prompt {index} is sent with other answers than it was given"
        assert start.tries == self._sent[index] + 1, f"prompt {index} was sent {self._sent[index]} times"
        if start.tries == 1:
            careful = self.is_marked
            waiting = [each for each in self._to_go_on if not careful(each) and not self._incidents[each]]
            assert not waiting, f"prompt {index} is sent for the first time, and {waiting} are to go on"

    def _check_trial(self, start: Start, here: Sequence[Start], now_s: float) -> None:
        """A server that is back gets one prompt, and others once that is answered or has a certain age."""
        since_s = self._trial_s[start.server]
        begun_s = [each.started_s for each in here if since_s is not None and each.started_s >= since_s]
        if begun_s:
            old = now_s >= min(begun_s) + self._settings.bench.trial_s - TOLERANCE_S
            assert old, f"server {start.server} is on trial, and gets a second prompt"
            self._trial_s[start.server] = None

    def _check_marked(self, start: Start, here: Sequence[Start]) -> None:
        index = start.prompt.index
        killed, losses = self._killed.get(index, []), self._losses(index)
        known = len(killed) + len(losses)
        if len(killed) >= DEATHS_MAX:
            assert not losses, f"prompt {index} goes on, and nobody knows what became of {losses}"
        else:
            assert known < DEATHS_MAX, f"prompt {index} goes to one more server after {killed} and {losses}"
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

    def is_over(self, start: Start) -> bool:
        """Whether the turn that an attempt is for was answered or given up."""
        index = start.prompt.index
        return index in self._ended or turn_of(start.prompt) < len(self._made[index])

    def answered(self, start: Start) -> None:
        """A good answer came: its server had not died of what was lost before it was asked."""
        index, server = start.prompt.index, start.server
        self._answers[server] += 1
        self._tried(start)
        fallen = self._fallen.get(server, ())
        if fallen and start.started_s >= max(each.lost_s for each in fallen):
            del self._fallen[server]
        is_stuck = self._script.fate(start.prompt) is Fate.STUCK
        if self.is_over(start):
            self.counts["late answers dropped"] += not is_stuck
            return
        self._made[index].append(start)
        if is_stuck:
            self._ended.add(index)
            return
        self.tokens[server] += TOKENS
        if len(self._made[index]) == self._script.turns[index]:
            self._ended.add(index)
            return
        self.counts["turns that others follow"] += 1
        self._to_go_on.add(index)
        for losses in self._fallen.values():
            losses[:] = [replace(each, index=NOBODY) if each.index == index else each for each in losses]

    def _tried(self, start: Start) -> None:
        since_s = self._trial_s[start.server]
        if since_s is not None and start.started_s >= since_s:
            self._trial_s[start.server] = None

    def rests(self, server: int, pause_s: float, now_s: float) -> None:
        """A server said that it is busy, and wants to be left alone for so long from now."""
        if now_s >= self._crowd_until_s[server]:
            self._rest_until_s[server] = now_s + pause_s
        if now_s >= self._rest_until_s[server] or now_s >= self._crowd_until_s[server]:
            # What is turned away before the pause is over belongs to the same crowd; jitter ends it later.
            until_s = now_s + pause_s * BUSY_JITTER
            self._crowd_until_s[server] = max(self._crowd_until_s[server], until_s)

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
        index, server, key = start.prompt.index, start.server, _turn(start)
        self.faults += isinstance(fault, ServerFault)
        is_old = now_s >= start.started_s + self._settings.bench.trial_s
        if not isinstance(fault, ServerFault) or fault.kind is FaultKind.BUSY or is_old:
            self._tried(start)
        if isinstance(fault, ServerFault) and not self._live[key]:
            self._asleep_until_s[key] = now_s + self._settings.backoff_s / 2
        if self.is_over(start):
            return
        if not isinstance(fault, ServerFault):
            self._ended.add(index)
            return
        self.counts[f"{fault.kind}"] += 1
        pending = self._pending.setdefault(key, {})
        for other, answers in list(pending.items()):
            if self._answers[other] > answers:
                del pending[other]
                self._charged[key] += 1
        if fault.kind in (FaultKind.BROKEN, FaultKind.OVERDUE, FaultKind.STALLED):
            pending[server] = self._answers[server]
        if fault.kind in (FaultKind.LOST, FaultKind.STALLED):
            here = self._fallen.setdefault(server, [])
            if self._limits[server] and all(each.index != index for each in here):
                here.append(_Loss(index=index, server=server, lost_s=now_s, real=real))

    def aborted(self, start: Start, now_s: float) -> None:
        """A request was given up: its server notices later."""
        self._aborts[start.server].append(now_s + self._settings.abort_s)

    def looked(self, server: int, checkup: Checkup, began_s: float, now_s: float, core: Core) -> None:
        """A server was looked at, from ``began_s`` on: it has died of what was in flight, or has not."""
        self._unwell[server] = checkup.trouble is not None
        if checkup.refused or checkup.alien:
            self._seen_well[server] = False
        if checkup.trouble is not None and not checkup.refused:
            return
        if checkup.asked and not core.fleet.servers[server].in_use and self._limits[server]:
            self._answers[server] += 1
        if checkup.trouble is None:
            if not core.fleet.servers[server].in_use:
                # A token of its own is as good as a prompt's trial.
                self._trial_s[server] = None if checkup.asked else now_s
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
            self._rest_until_s.append(0.0)
            self._crowd_until_s.append(0.0)
            self._trial_s.append(None)
            self._alive_s.append(-math.inf)
            self._unwell.append(False)
            self._seen_well.append(False)
        if self._limits[server] == 0:
            # It was not in the run, and is asked for its health and its model first.
            self._seen_well[server] = False
        self._limits[server] = limit
        if limit == 0:
            self._fallen.pop(server, None)

    # ---- what is asked ----

    def free(self, server: int, now_s: float) -> int:
        """Slots of a server that hold no request, and none that was given up a moment ago."""
        aborting = sum(until_s > now_s for until_s in self._aborts[server])
        return self._limits[server] - aborting - sum(each.server == server for each in self.open.values())

    def check_finished(self, finished: Finished) -> None:
        """Check that a prompt is saved with the answers to all its turns, in order, each the first that came.

        Raises:
            AssertionError: it is not.
        """
        index, made = finished.prompt.index, self._made[finished.prompt.index]
        answer, turns = finished.answer, self._script.turns[index]
        assert len(made) == turns, f"prompt {index} is saved after {len(made)} of {turns} turns"
        assert answer.more is None, f"prompt {index} is saved, and there was more to ask"
        assert finished.started_s == made[0].started_s, f"prompt {index} began at another time"
        assert answer.output_tokens == TOKENS * turns, f"prompt {index} is saved with other tokens"
        if turns > 1:
            steps = [step["attempt"] for step in answer.steps or ()]
            assert steps == list(_numbers(made)), (
                f"prompt {index} is saved with other answers than it was given"
            )

    def check_given_up(self, gave_up: GivenUp) -> None:
        """Check that a prompt is given up for a reason, and with what it made.

        Raises:
            AssertionError: it is given up unjustly.
        """
        index, made = gave_up.index, self._made[gave_up.index]
        assert gave_up.made_json == made_json(_numbers(made)), (
            f"prompt {index} is given up without its answers"
        )
        is_stuck = self._script.fates[index] is Fate.STUCK and index in self._ended
        turn = len(made) - is_stuck
        fate = self._script.fate_of(index, turn)
        match gave_up.error_class:
            case "BadLine":
                just = fate is Fate.BAD
            case "PromptFault":
                just = fate in (Fate.REFUSED, Fate.STUCK)
            case "ServerFault":
                just = self._charged[index, turn] >= self._settings.prompt_attempts
            case _:
                # What a server that is never well again has done with it, nobody knows.
                doubts = sum(each.real or self._unwell[each.server] for each in self._losses(index))
                just = self._incidents[index] + doubts >= DEATHS_MAX
                self.counts["given up as poison"] += 1
                self.counts["innocents given up as poison"] += fate not in (Fate.KILLS, Fate.HANGS)
        self._ended.add(index)
        assert just, f"prompt {index} ({fate}) was given up unjustly: {gave_up.message}"


def _turn(start: Start) -> _Turn:
    return start.prompt.index, turn_of(start.prompt)


def _numbers(starts: Sequence[Start]) -> tuple[int, ...]:
    return tuple(start.attempt for start in starts)
