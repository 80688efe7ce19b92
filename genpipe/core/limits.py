"""How many requests one server may have at once."""

import math

BUSY_PAUSE_S = 1.0
"""Rest of a server that said it is busy and named no time (seconds)."""

RETRY_AFTER_MAX_S = 60.0
"""A server's wish for a longer pause is not followed further than this (seconds)."""


class Limiter:
    """The limit in force, reduced for a while when the server says that it is busy.

    Additive increase, multiplicative decrease: a 429 or 503 halves what is allowed, each answer gives
    an eighth of a slot back.
    """

    __slots__ = ("_allowed", "_limit", "_rest_until_s")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._allowed = float(limit)
        self._rest_until_s = -math.inf

    def allowed(self, now_s: float) -> int:
        """Requests that may be open at once, now."""
        return 0 if now_s < self._rest_until_s else int(self._allowed)

    def resize(self, limit: int) -> None:
        """Another limit from now on; a reduction that is in force keeps its share of it."""
        self._allowed = max(1.0, self._allowed * limit / self._limit)
        self._limit = limit

    def busy(
        self, in_flight: int, retry_after_s: float | None, now_s: float, *, jitter: float = 1.0
    ) -> float:
        """The server turned a request away with ``in_flight`` others open.

        Replies that come while it rests belong to the same crowd and cut nothing more.

        Args:
            in_flight: requests open there.
            retry_after_s: the pause that it asked for, or None.
            now_s: the run's clock.
            jitter: makes the pause longer (factor, >= 1), so that not all clients come back at one instant.

        Returns:
            How long the server is left alone from now (seconds).
        """
        if now_s < self._rest_until_s:
            return self._rest_until_s - now_s
        pause_s = BUSY_PAUSE_S if retry_after_s is None else min(max(0.0, retry_after_s), RETRY_AFTER_MAX_S)
        pause_s *= jitter
        self._allowed = max(1.0, min(self._allowed, in_flight + 1.0) / 2)
        self._rest_until_s = now_s + pause_s
        return pause_s

    def answered(self) -> bool:
        """An answer came; whether that opens a slot."""
        if self._allowed >= self._limit:
            return False
        before = int(self._allowed)
        self._allowed = min(float(self._limit), self._allowed + 0.125)
        return int(self._allowed) > before
