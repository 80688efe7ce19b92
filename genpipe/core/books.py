"""The owner of each slot-second: who had every slot of every server, at every moment.

A slot that is held belongs to its attempt, whose instants say afterwards how much of it was ``wire``.
An idle slot belongs to one reason, found by counting, in this order: what the server itself closes
(``down``, ``ramp``, ``cut``, ``aborting``), then what the whole run lacks (``backoff``, ``storage``,
``drain``, ``input``), and what is left is ours: ``dispatch``.

The reasons of the whole run change with each event, and there may be thousands of servers. So each of
them is integrated once, as seconds per free slot, and a server takes its part when it is next touched.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

OWNERS = (
    "wire",
    "overhead",
    "dispatch",
    "input",
    "storage",
    "backoff",
    "aborting",
    "down",
    "cut",
    "ramp",
    "drain",
)

# Reasons that the whole run gives to free slots, in the order of the tuples of seconds per free slot.

_SHARED = ("backoff", "storage", "drain", "input", "dispatch")


@dataclass(slots=True)
class RunState:
    """What the run as a whole has and lacks; the core keeps it true.

    Attributes:
        ready: prompts that could be sent now.
        sleeping: prompts that wait out a backoff.
        paused: the writer is so far behind that nothing may be sent.
        exhausted: no prompt will come any more (input at its end, or the run is stopping).
    """

    ready: int = 0
    sleeping: int = 0
    paused: bool = False
    exhausted: bool = False


class _Account:
    """One server's slots."""

    __slots__ = (
        "at_s",
        "closed",
        "free",
        "held",
        "held_since_sum_s",
        "owned_s",
        "per_free_s",
        "slots",
        "slots_since_s",
        "target",
        "whole_s",
    )

    def __init__(self, slots: int, now_s: float) -> None:
        # A limit that was lowered is reached as requests end: until then there are as many slots as are held.
        self.slots = self.target = slots
        self.whole_s = 0.0
        self.slots_since_s = now_s
        self.held = 0
        self.held_since_sum_s = 0.0
        # Slots that the server's own state keeps shut, by reason; idle slots are given to them in this order.
        self.closed: tuple[tuple[str, int], ...] = ()
        self.free = slots
        self.at_s = now_s
        self.per_free_s: tuple[float, ...] = (0.0,) * 5
        self.owned_s = dict.fromkeys(OWNERS, 0.0)

    def resize(self, now_s: float) -> None:
        """Bring the slots as near to the limit as what is held allows."""
        slots = max(self.target, self.held)
        if slots != self.slots:
            self.whole_s += self.slots * (now_s - self.slots_since_s)
            self.slots_since_s = now_s
            self.slots = slots

    def idle(self) -> tuple[int, Sequence[tuple[str, int]]]:
        """Idle slots: how many are free, and how many each closing reason has."""
        left = self.slots - self.held
        assert left >= 0, self.held
        if not self.closed:
            return left, ()
        owned = []
        for reason, closed in self.closed:
            part = min(left, closed)
            if part:
                owned.append((reason, part))
                left -= part
        return left, owned


class Books:
    """The account of all servers.

    Call :meth:`tick` first at each event, then say what changed. Times are seconds of the run's clock.

    Attributes:
        run: what the run has and lacks, to be kept true between ticks.
    """

    def __init__(self, slots: Sequence[int], now_s: float) -> None:
        self.run = RunState()
        self._began_s = now_s
        self._now_s = 0.0
        self._accounts = [_Account(count, 0.0) for count in slots]
        self._free = sum(slots)
        self._per_free_s: tuple[float, ...] = (0.0,) * 5

    @property
    def elapsed_s(self) -> float:
        """Seconds since the books were opened, at the last tick."""
        return self._now_s

    def tick(self, now_s: float) -> None:
        """Give the time since the last tick to its owners."""
        now_s -= self._began_s
        past_s = now_s - self._now_s
        assert past_s >= 0, f"the clock went back by {-past_s} s"
        if past_s == 0:
            return
        self._now_s = now_s
        if self._free == 0:
            return
        backoff, storage, drain, input_, dispatch = self._shares()
        each_s = past_s / self._free
        b, s, d, i, p = self._per_free_s
        self._per_free_s = (
            b + backoff * each_s,
            s + storage * each_s,
            d + drain * each_s,
            i + input_ * each_s,
            p + dispatch * each_s,
        )

    def _shares(self) -> tuple[int, int, int, int, int]:
        """How many of the free slots each reason of the run has."""
        run, free = self.run, self._free
        workable = min(free, run.ready)
        waiting = free - workable
        backoff = min(waiting, run.sleeping)
        rest = waiting - backoff
        if run.paused:
            return backoff, workable + rest, 0, 0, 0
        if run.exhausted:
            return backoff, 0, rest, 0, workable
        return backoff, 0, 0, rest, workable

    def hold(self, server: int) -> None:
        """A slot of ``server`` is taken, now."""
        account = self._settled(server)
        account.held += 1
        account.held_since_sum_s += self._now_s
        self._recount(account)

    def release(self, server: int, *, held_s: float, wire_s: float, late_s: float, lost: bool) -> None:
        """A slot of ``server`` is given back, now.

        Args:
            server: whose slot.
            held_s: how long it was held.
            wire_s: of that, from the request's last byte to the reply's.
            late_s: of that, from the reply's last byte until now: our lateness.
            lost: the attempt never reached the wire and failed there, so the rest is the server's.
        """
        account = self._settled(server)
        account.held -= 1
        account.resize(self._now_s)
        account.held_since_sum_s -= self._now_s - held_s
        owned_s = account.owned_s
        owned_s["wire"] += wire_s
        owned_s["dispatch"] += late_s
        owned_s["down" if lost else "overhead"] += held_s - wire_s - late_s
        self._recount(account)

    def resize(self, server: int, slots: int) -> None:
        """From now on ``server`` has so many slots, or as many as it still holds if those are more."""
        account = self._settled(server)
        account.target = slots
        account.resize(self._now_s)
        self._recount(account)

    def add(self, slots: int) -> None:
        """One more server, from now on."""
        account = _Account(slots, self._now_s)
        account.per_free_s = self._per_free_s
        self._accounts.append(account)
        self._free += slots

    def close(self, server: int, closed: tuple[tuple[str, int], ...]) -> None:
        """From now on ``server`` itself keeps slots shut: (reason, count), most important first."""
        account = self._accounts[server]
        if account.closed != closed:
            account = self._settled(server)
            account.closed = closed
            self._recount(account)

    def owned_s(self, server: int) -> dict[str, float]:
        """Slot-seconds of one server by owner, at the last tick; what is in flight counts as ``wire``."""
        account = self._settled(server)
        owned_s = dict(account.owned_s)
        owned_s["wire"] += account.held * self._now_s - account.held_since_sum_s
        return owned_s

    def owned_by_all_s(self) -> dict[str, float]:
        """Slot-seconds of the fleet by owner, at the last tick."""
        total = dict.fromkeys(OWNERS, 0.0)
        for server in range(len(self._accounts)):
            for owner, seconds in self.owned_s(server).items():
                total[owner] += seconds
        return total

    def check(self) -> None:
        """The books balance: every slot-second has one owner, and none has a negative account."""
        for server, account in enumerate(self._accounts):
            owned_s = self.owned_s(server)
            whole_s = account.whole_s + account.slots * (self._now_s - account.slots_since_s)
            assert math.isclose(sum(owned_s.values()), whole_s, rel_tol=1e-6, abs_tol=1e-5), (server, owned_s)
            assert all(seconds >= -1e-6 for seconds in owned_s.values()), (server, owned_s)
        assert self._free == sum(account.free for account in self._accounts)

    def _settled(self, server: int) -> _Account:
        """The account of ``server``, brought up to the last tick."""
        account = self._accounts[server]
        if account.held < account.slots:
            free, closed = account.idle()
            past_s = self._now_s - account.at_s
            for reason, count in closed:
                account.owned_s[reason] += count * past_s
            if free and account.per_free_s is not self._per_free_s:
                for reason, now, before in zip(_SHARED, self._per_free_s, account.per_free_s, strict=True):
                    account.owned_s[reason] += free * (now - before)
        account.at_s = self._now_s
        account.per_free_s = self._per_free_s
        return account

    def _recount(self, account: _Account) -> None:
        free = account.idle()[0]
        self._free += free - account.free
        account.free = free


class Window:
    """Slot-time shares over the recent past, from totals noted now and then.

    Attributes:
        length_s: how far back the window reaches (seconds).
    """

    __slots__ = ("_notes", "length_s")

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._notes: list[tuple[float, dict[str, float]]] = []

    def shares(self, elapsed_s: float, owned_s: dict[str, float]) -> dict[str, float] | None:
        """Note the totals at ``elapsed_s``; shares since the window began, or None where it is empty."""
        self._notes.append((elapsed_s, owned_s))
        while len(self._notes) > 2 and self._notes[1][0] <= elapsed_s - self.length_s:
            self._notes.pop(0)
        began_s = self._notes[0][1] if self._notes[0][0] > 0 and len(self._notes) > 1 else {}
        return shares({owner: seconds - began_s.get(owner, 0.0) for owner, seconds in owned_s.items()})


def shares(owned_s: dict[str, float]) -> dict[str, float] | None:
    """Slot-seconds as shares of their sum, or None where there are none."""
    whole_s = sum(owned_s.values())
    if whole_s <= 0:
        return None
    return {owner: seconds / whole_s for owner, seconds in owned_s.items()}
