"""Whether no server can be used, since when, and when that has lasted for too long."""

from genpipe.core import wording
from genpipe.core.fleet import Fleet, ServerState

PROVEN_S = 6.0
"""A server that can be used for so long has passed its trial (seconds)."""


class Outage:
    """No server is in use, or all that are only turn prompts away.

    It ends with an answer, or once a server can be used for a while: one that fails in its trial has not
    ended it.

    Attributes:
        since_s: when it began, or None (seconds, run clock).
    """

    def __init__(self, fleet: Fleet, give_up_s: float | None) -> None:
        self.since_s: float | None = None
        self._usable_s: float | None = None
        self._fleet = fleet
        self._give_up_s = give_up_s

    def answered(self) -> None:
        """A prompt was answered."""
        self.since_s = None

    def look(self, now_s: float) -> str | None:
        """Look at the servers; why the run should end, or None."""
        if self._fleet.usable():
            self._usable_s = now_s if self._usable_s is None else self._usable_s
            if now_s >= self._usable_s + PROVEN_S:
                self.since_s = None
            return None
        if self._usable_s is not None and now_s >= self._usable_s + PROVEN_S:
            self.since_s = None
        self._usable_s = None
        if self.since_s is None:
            self.since_s = now_s
        if self._give_up_s is None or now_s < self.since_s + self._give_up_s:
            return None
        waited = f"{self._give_up_s:g} s" if self._give_up_s < 1 else wording.duration(now_s - self.since_s)
        return f"retry.give_up_s: no server could be used for {waited}{self._last_trouble()}"

    def next_timer_s(self) -> float | None:
        """When :meth:`look` is to be called again though nothing has happened, or None."""
        if self._give_up_s is None or self.since_s is None or self._fleet.usable():
            return None
        return self.since_s + self._give_up_s

    def text(self, now_s: float) -> str | None:
        """What is waited for, in one line; None while a server can be used."""
        if self._fleet.usable():
            return None
        servers = [server for server in self._fleet.servers if server.state is not ServerState.GONE]
        if not servers:
            return "no server is left in the run: add one with genpipe limit"
        text = "no server can be used"
        if self.since_s is not None and now_s - self.since_s >= 1.0:
            text += f" for {wording.duration(now_s - self.since_s)}"
        return f"{text}{self._last_trouble()}; all answers that came are kept, and the run goes on by itself"

    def _last_trouble(self) -> str:
        told = (server for server in self._fleet.servers if server.last_error)
        last = max(told, key=lambda server: server.left_s, default=None)
        return "" if last is None else f" ({last.spec.url}: {last.last_error})"
