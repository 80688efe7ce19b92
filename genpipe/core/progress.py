"""The state of a run as one JSON-ready object: what ``progress.json``, the bar and ``status`` show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from genpipe.core.books import Window, shares
from genpipe.core.eta import AGES_MAX, Eta
from genpipe.core.flights import Flight
from genpipe.core.flow import Core
from genpipe.core.histogram import Histogram
from genpipe.core.quality import FLAGS
from genpipe.core.server import Server, ServerState
from genpipe.core.sums import Sums

OVER = frozenset({"done", "stopped", "failed", "interrupted"})
"""States of a run whose driver has ended in an orderly way."""

TAIL_SHOWN_MAX = 10
"""Requests still running that are named near the end, the oldest first (count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What earlier segments left behind.

    Attributes:
        done: prompts answered.
        failed: prompts given up for good, which are not asked again.
        sums: totals over the answered ones.
    """

    done: int = 0
    failed: int = 0
    sums: Sums


class Progress:
    """Looks at a core and says how the run is doing. Unknown values are None, never 0.

    Attributes:
        restored: what this segment began with; it counts as completed and is in no rate.
    """

    def __init__(
        self,
        restored: Restored,
        *,
        began_s: float,
        recent_s: float = 60.0,
        reconnects: Sequence[int] = (),
    ) -> None:
        """Begin.

        Args:
            restored: what earlier segments left behind.
            began_s: when this segment began (seconds, run clock).
            recent_s: how far back "recently" reaches (seconds).
            reconnects: by server, as the transport counts them; looked at for each snapshot.
        """
        self.restored = restored
        self._reconnects = reconnects
        self._began_s = began_s
        self._window = Window(recent_s)

    def snapshot(self, core: Core, total: int | None, now_s: float) -> dict[str, Any]:
        """The keys of ``progress.json`` that the core knows.

        Args:
            core: the scheduler.
            total: records in the input, or None before it is counted.
            now_s: the run's clock.
        """
        completed = self.restored.done + core.done
        failed = self.restored.failed + core.gave_up
        assert total is None or completed + failed <= total, (completed, failed, total)
        core.books.tick(now_s)
        sums = Sums()
        sums.merge(self.restored.sums)
        sums.merge(core.sums)
        known = sums.records - sums.usage_unknown
        rates = core.pace.rates(now_s)
        eta = None if total is None else self._eta(core, total - completed - failed, now_s)
        owned_s = core.books.owned_by_all_s()
        return {
            "state": _state(core),
            "total": total,
            "completed": completed,
            "failed": failed,
            "in_flight": core.in_flight,
            "percent": None if total is None else _percent(completed, total),
            "rate_per_sec": _round(rates.recent),
            "rate_per_sec_segment": _round(rates.segment),
            "eta_hours": _hours(eta.expected_s if eta else None),
            "eta_hours_low": _hours(eta.low_s if eta else None),
            "eta_hours_high": _hours(eta.high_s if eta else None),
            "total_output_tokens": sums.output_tokens,
            "avg_output_tokens": round(sums.output_tokens / known, 3) if known else None,
            "usage_unknown": sums.usage_unknown,
            "output_tokens_per_sec": _round(rates.tokens_recent),
            "output_tokens_per_sec_whole": _round(rates.tokens_segment),
            "elapsed_s": round(now_s - self._began_s, 3),
            "slot_time": {
                "whole": _shares(shares(owned_s)),
                "recent": _shares(self._window.shares(core.books.elapsed_s, owned_s)),
            },
            "dispatch_gap_ms": _gaps(core.fleet.gaps_s),
            "loop_lag_ms": None,
            "verdict": None,
            "quality": _quality(sums, core.quality.recent_shares()),
            "servers": [self._server(core, server, now_s) for server in core.fleet.servers],
            "hedged": core.hedging.count,
            "late": core.late,
            "tail": _tail(core, now_s) if core.in_tail else None,
            "waiting_for": None if core.stopping or core.finished else core.outage.text(now_s),
            "warnings": list(core.quality.warnings),
            "stop_reason": core.refusal,
            "s3": None,
            "last_error": core.disk_trouble or core.last_error,
        }

    def _eta(self, core: Core, remaining: int, now_s: float) -> Eta | None:
        in_flight = core.in_flight
        step = max(1, math.ceil(in_flight / AGES_MAX))
        ages_s = [_age_s(flight, now_s) for flight in islice(core.flights(), 0, None, step)]
        # What has ended and only waits for the disk is not work that a server still has to do.
        left = max(1, remaining - core.unsaved) if remaining else 0
        return core.pace.eta(left, ages_s, min(in_flight, left), now_s)

    def _server(self, core: Core, server: Server, now_s: float) -> dict[str, Any]:
        faults = {kind.value: count for kind, count in server.faults.items() if count}
        position = server.position
        return {
            "url": server.spec.url,
            "state": server.state.value,
            "limit": server.spec.limit,
            "allowed": server.limiter.allowed(now_s),
            "in_flight": server.held,
            "aborting": len(server.aborts),
            "answers": server.answers,
            "output_tokens": server.output_tokens,
            "faults": faults,
            "reconnects": self._reconnects[position] if position < len(self._reconnects) else 0,
            "last_error": server.last_error,
            "slot_time": _shares(shares(core.books.owned_s(position))),
        }


def _age_s(flight: Flight, now_s: float) -> float:
    """How long a prompt has been in work: of a conversation, its earlier turns belong to it."""
    past = flight.work.past
    return now_s - flight.start.started_s + (0.0 if past is None else past.spent_s)


def _state(core: Core) -> str:
    if core.stopping:
        return "draining"
    if core.disk_trouble is not None:
        return "waiting"
    if core.fleet.usable() or core.finished:
        return "running"
    states = {server.state for server in core.fleet.servers if server.state is not ServerState.GONE}
    return "starting" if states == {ServerState.STARTING} else "waiting"


def _tail(core: Core, now_s: float) -> list[dict[str, Any]]:
    """The oldest requests that are still running."""
    return [
        {
            "index": flight.start.prompt.index,
            "server": core.fleet.servers[flight.start.server].spec.url,
            "age_s": round(now_s - flight.start.started_s, 1),
            "tries": flight.start.tries,
            "hedged": flight.work.live > 1,
        }
        for flight in islice(core.flights(), TAIL_SHOWN_MAX)
    ]


def _quality(sums: Sums, recent: dict[str, float] | None) -> dict[str, Any]:
    """Answers by flag, all of the run, and which share of them that is; also of the last ones that came."""
    counts = {flag: sums.flags.get(flag, 0) for flag in FLAGS}
    whole = {flag: count / sums.records for flag, count in counts.items()} if sums.records else None
    if recent is not None:
        recent = {flag: recent.get(flag, 0.0) for flag in FLAGS}
    return {**counts, "shares": {"whole": _shares(whole), "recent": _shares(recent)}}


def _shares(by_name: dict[str, float] | None) -> dict[str, float] | None:
    return None if by_name is None else {name: round(share, 5) for name, share in by_name.items()}


def _gaps(gaps_s: Histogram) -> dict[str, float] | None:
    if gaps_s.count == 0:
        return None
    p50_s, p99_s = gaps_s.quantile(0.5), gaps_s.quantile(0.99)
    assert p50_s is not None
    assert p99_s is not None
    return {
        "p50": round(1000 * p50_s, 3),
        "p99": round(1000 * p99_s, 3),
        "max": round(1000 * gaps_s.largest, 3),
    }


def _percent(completed: int, total: int) -> float:
    """Rounded downwards, so that it is never 100 with work left."""
    return 100_000 * completed // total / 1000 if total else 100.0


def _round(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 4)


def _hours(seconds: float | None) -> float | None:
    """Rounded to a tenth of a second's worth, and upwards, so that it is never 0 with work left."""
    return None if seconds is None else math.ceil(seconds / 3600 * 36_000) / 36_000
