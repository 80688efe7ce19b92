"""What must hold of a simulated run: after every event, and of its end."""

from genpipe.core.errors import FaultKind
from genpipe.core.flow import Core
from genpipe.core.poison import LAST_WAIT_S
from genpipe.core.server import ServerState
from genpipe.sim.ledger import Ledger
from genpipe.sim.wire import Wire
from genpipe.sim.world import World

IN_USE_AGAIN_S = 15.0
"""A server that is well is in use again within this (seconds)."""

USABLE_S = 30.0
"""A server that was in use for so long was no mere trial (seconds)."""

LONGEST_S = 600.0
"""No latency is taken to be longer (seconds)."""

PER_FAULT_S = 20.0
"""What one fault keeps waiting: its prompt's backoff, or the bench and the probe after it (seconds)."""


class Promises:
    """Watches one run. Nothing is promised for ever: the run's bound in time is derived from its world.

    Attributes:
        changed_s: when a limit was changed last.
    """

    def __init__(self, world: World, core: Core, ledger: Ledger, wire: Wire) -> None:
        self.changed_s = self._bound_at_least_s = 0.0
        self._world, self._core, self._ledger, self._wire = world, core, ledger, wire
        self._out_since_s: dict[int, float] = {}
        self._used_since_s: dict[int, float] = {}
        self._used_s = 0.0
        self._faults = self._deaths = 0

    def check(self, now_s: float) -> None:
        """What must hold after every event.

        Raises:
            AssertionError: it does not.
        """
        core = self._core
        core.check()
        assert core.in_flight == len(self._ledger.open), "a slot that nothing is in, or the other way round"
        for start in self._ledger.open.values():
            in_vain = self._ledger.is_over(start) and start.attempt not in self._wire.calls
            assert not in_vain, (
                f"prompt {start.prompt.index} was answered, or has ended, and is in flight at server "
                f"{start.server}"
            )
        timer_s = core.next_timer_s()
        assert timer_s is None or timer_s > now_s, "a timer for what should have happened"
        run = core.books.run
        assert not run.ready or run.paused or core.fleet.room(now_s) == 0, "work ready and a slot free"
        if run.ready and not run.paused and now_s > core.settings.ramp_s:
            self._check_full(now_s)
        self._look(now_s)
        if now_s < self._world.quiet_s or core.stopping:
            self._faults = self._ledger.faults
            self._deaths = self._ledger.counts["deaths"]
            return
        if now_s > self._bound_at_least_s:
            self._bound_at_least_s = self._bound_s(now_s)
            past_s = now_s - self._world.quiet_s
            assert now_s <= self._bound_at_least_s, f"not finished {past_s:.0f} s after all was quiet"

    def _check_full(self, now_s: float) -> None:
        """Work waits: then a server that nothing speaks against has as many requests as it may have."""
        for server in self._core.fleet.servers:
            reduced = server.on_trial or server.alone or server.faults[FaultKind.BUSY]
            if server.in_use and not reduced:
                free = self._ledger.free(server.position, now_s)
                assert free <= 0, f"work is ready, and server {server.position} has {free} free slots"

    def slack(self, now_s: float) -> float:
        """The part of its bound that a run took after all was quiet."""
        quiet_s = self._world.quiet_s
        return max(0.0, now_s - quiet_s) / (self._bound_s(now_s) - quiet_s) if now_s > quiet_s else 0.0

    def _look(self, now_s: float) -> None:
        """Who is in use, and since when; who is well has to be."""
        for server in self._core.fleet.servers:
            position = server.position
            if server.in_use and (server.held or not server.turned_away):
                if now_s - self._used_since_s.setdefault(position, now_s) >= USABLE_S:
                    self._used_s = now_s
            else:
                self._used_since_s.pop(position, None)
            if server.in_use:
                self._out_since_s.pop(position, None)
                continue
            out_s = self._out_since_s.setdefault(position, now_s)
            well_s = self._wire.servers[position].well_since_s()
            if server.state is not ServerState.GONE and not self._core.stopping:
                waited_s = now_s - max(out_s, well_s)
                assert waited_s <= IN_USE_AGAIN_S, (
                    f"server {position} is well for {waited_s:.0f} s and not in use"
                )

    def check_refusal(self, now_s: float) -> None:
        """A run that ends for want of servers has had none for long enough."""
        give_up_s = self._core.settings.give_up_s
        assert give_up_s is not None, self._core.refusal
        since_s = now_s - self._used_s
        assert since_s >= give_up_s - 1e-6, (
            f"ended for want of servers, and one was in use {since_s:.0f} s ago"
        )

    def _bound_s(self, now_s: float) -> float:
        """When the run must be over.

        From the moment in which all is quiet, a server works at something, or a fault keeps what waits
        waiting. So the run lasts no longer than all attempts one after the other, and all such waits, and the
        looks and the last wait that settle what was left from before.
        """
        world, servers, silent_s = self._world, self._wire.servers, self._core.settings.silent_s
        quiet_s = max([world.quiet_s, self.changed_s, *(server.dead_until_s for server in servers)])
        deaths = self._ledger.counts["deaths"] - self._deaths
        waits_s = (self._ledger.faults - self._faults) * PER_FAULT_S
        waits_s += deaths * (world.revive_s + world.watchdog_s + world.kill_s)
        edges_s = world.prompts * (world.read_s + world.commit_s) + self._core.settings.ramp_s
        longest_s = max(min(server.law.longest_s, LONGEST_S) for server in servers) + world.long_s
        settling_s = 2 * silent_s + LAST_WAIT_S + 2 * IN_USE_AGAIN_S + longest_s
        working_s = sum(
            now_s - each.started_s
            for each in self._ledger.open.values()
            if each.attempt in servers[each.server].requests
        )
        return quiet_s + self._wire.busy_s + working_s + waits_s + edges_s + settling_s
