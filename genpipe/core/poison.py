"""Prompts that servers may have died of: each is tried where it can harm least, and given up in time.

When connections break with requests in flight, or a server falls silent, all prompts there are marked, and
probes of the server tell whether its process has ended. A marked prompt is then sent to a server only once
the one before it there has been harmless for a while: a second death then points at one prompt, and the
others there are marked as if for the first time.
"""

from collections.abc import Iterator

from genpipe.core.fleet import Fleet
from genpipe.core.server import Server, ServerState
from genpipe.core.values import Checkup, Start
from genpipe.core.waiting import Waiting, Work

DEATHS_MAX = 2
"""A prompt in flight at so many deaths is not sent to a server any more that it has not killed (count)."""

TOGETHER_S = 10.0
"""Servers that go within this time of each other went together (seconds)."""

LAST_WAIT_S = 120.0
"""How long such a prompt waits at the end of a run, for a server that it has killed, or for one that went
silent with it to show what has become of it (seconds)."""


class Poison:
    """Keeps account of deaths, and says what becomes of marked prompts."""

    def __init__(self, fleet: Fleet, waiting: Waiting, *, alone: bool) -> None:
        """Begin.

        Args:
            fleet: the servers.
            waiting: where marked prompts wait.
            alone: one that has killed two servers is tried once more at the end, alone on one of them.
        """
        self._fleet = fleet
        self._waiting = waiting
        self._alone = alone
        self._fallen: dict[int, list[Work]] = {}
        self._fallen_s: dict[int, float] = {}
        self._wait_until_s: float | None = None
        self._waited = False

    def lost(self, work: Work, server: int, now_s: float) -> None:
        """A prompt was lost at ``server``, perhaps because that died of it, or hangs."""
        if self._fleet.servers[server].state is ServerState.GONE:
            # It is not looked at any more, so that nobody would ever know.
            return
        self._fallen_s[server] = now_s
        work.losses += 1
        if server not in work.doubts:
            work.doubts = (*work.doubts, server)
            work.lost_at = work.lost_at | {server}
            self._fallen.setdefault(server, []).append(work)

    def answered(self, start: Start) -> None:
        """A server answered: where it was sent after connections broke there, it had not died."""
        if start.server in self._fallen and start.started_s >= self._fallen_s[start.server]:
            self._decide(start.server, died=False)

    def probed(self, server: int, checkup: Checkup) -> None:
        """A server was looked at: if well, it had not died; if refused, it had; all else tells nothing."""
        if checkup.trouble is None:
            self._decide(server, died=False)
        elif checkup.refused:
            self._decide(server, died=True)

    def forget(self, server: int) -> None:
        """A server was taken out: nobody will know."""
        self._decide(server, died=False)

    def _decide(self, server: int, *, died: bool) -> None:
        fallen = [work for work in self._fallen.pop(server, ()) if server in work.doubts]
        for work in fallen:
            work.doubts = tuple(each for each in work.doubts if each != server)
            # Where all go down at once it is no prompt's doing.
            if died and self._fell_alone(server, beside=work.lost_at):
                work.killed = (*work.killed, server)
            elif died:
                work.uncounted += 1

    def _fell_alone(self, position: int, *, beside: frozenset[int]) -> bool:
        """Whether a server went for itself, and not together with all others but those ``beside`` it."""
        others = [
            server
            for server in self._fleet.servers
            if server.position != position and server.state is not ServerState.GONE
        ]
        together_s = self._fallen_s[position] - TOGETHER_S
        return any(server.in_use for server in others) or all(
            server.left_s < together_s for server in others if server.position not in beside
        )

    def due(self, now_s: float, *, last: bool, idle: bool) -> Iterator[tuple[Work, Server | None]]:
        """Marked prompts that are to be sent now, and where; None: to be given up.

        What is yielded must be sent or given up before the next is asked for.

        Args:
            now_s: the run's clock.
            last: nothing else waits to be sent.
            idle: nor is anything in flight.
        """
        waiting = self._waiting
        if not idle or not waiting.marked:
            self._wait_until_s = None
        elif self._wait_until_s is None:
            self._wait_until_s = now_s + LAST_WAIT_S
        self._waited = self._wait_until_s is not None and now_s >= self._wait_until_s
        for _ in range(len(waiting.marked)):
            work = waiting.take_marked()
            if not work.marked:
                waiting.put_back(work)
                continue
            place = self._place_for(work, now_s, last=last)
            if place is not None or self._is_lost(work):
                yield work, place
            else:
                waiting.put_back(work)

    @property
    def waits(self) -> bool:
        """Whether marked prompts are all that is left, and somebody's fate is waited for."""
        return self._wait_until_s is not None

    @property
    def for_the_end(self) -> int:
        """Marked prompts that wait for the end of the run, to be alone; costs a walk over the marked."""
        return sum(len(work.killed) >= DEATHS_MAX for work in self._waiting.marked)

    def nobody_left_to_ask(self) -> bool:
        """Whether every prompt that waits, and may be sent, has failed in a way that may be its own fault."""
        waiting = self._waiting
        if waiting.suspects + len(waiting.marked) < len(waiting):
            return False
        held = sum(
            not work.pending and len(work.killed) + len(work.doubts) >= DEATHS_MAX for work in waiting.marked
        )
        return waiting.suspects + held == len(waiting)

    def next_timer_s(self) -> float | None:
        """When :meth:`due` is to be asked again though nothing has happened, or None."""
        return None if self._waited else self._wait_until_s

    def _is_lost(self, work: Work) -> bool:
        deaths = len(work.killed)
        if work.is_ill_fated or deaths > DEATHS_MAX or (deaths == DEATHS_MAX and not self._alone):
            return True
        return self._waited and deaths + len(work.doubts) >= DEATHS_MAX

    def _place_for(self, work: Work, now_s: float, *, last: bool) -> Server | None:
        if work.is_ill_fated:
            return None
        if len(work.killed) >= DEATHS_MAX:
            once_more = self._alone and last and len(work.killed) == DEATHS_MAX and not work.doubts
            return self._empty_one_of(work.killed, now_s) if once_more else None
        if len(work.killed) + len(work.doubts) >= DEATHS_MAX:
            return None
        # The emptiest where no other may do harm yet, and the last one it was at only where it is alone.
        return min(
            (each for each in self._fleet.servers if self._may_take(each, work, now_s)),
            key=lambda each: (each.position == work.last_server, each.held / each.spec.limit),
            default=None,
        )

    def _may_take(self, server: Server, work: Work, now_s: float) -> bool:
        if server.on_trial and work.pending and self._waiting.ready:
            # One that breaks answers as well would be the server's only trial each time.
            return False
        return server.room(now_s) > 0 and server.may_take_marked

    def _empty_one_of(self, positions: tuple[int, ...], now_s: float) -> Server | None:
        for position in positions:
            server = self._fleet.servers[position]
            if server.held == 0 and not server.aborts and server.room(now_s) > 0:
                return server
        return None
