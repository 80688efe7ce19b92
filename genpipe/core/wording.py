"""Numbers as people read them, and a run's state in one line."""

from typing import Any

_ODD = {
    "empty": "empty",
    "cut": "cut off at the length limit",
    "looping": "looping",
    "unclosed_think": "within their reasoning",
    "short": "short",
}

GOES_ON = (
    "which the model would be asked to go on from: request.multi_turn=true has it answered anew, "
    "request.extra_body.continue_final_message=true continues it"
)
"""What follows from a conversation that ends in an answer. SGLang takes such an answer for the user's words,
unless it is told otherwise."""

UPLOADS_UNDER_WAY = 8
"""So few shards that wait for S3 are nothing to speak of."""


def duration(seconds: float | None) -> str:
    """A span of time in its two largest units: ``2 d 3 h``, ``1 h 05 min``, ``3 min 20 s``, ``45 s``."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def number(value: float | None, *, digits: int = 1) -> str:
    """A number with thousands set off; ``?`` for None; decimals only below a hundred."""
    if value is None:
        return "?"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.{digits}f}"


def size(size_bytes: float) -> str:
    """A number of bytes in decimal units: ``12 B``, ``1.5 kB``, ``26.0 MB``, ``1,204.3 GB``."""
    for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:,.1f} {unit}"
    return f"{size_bytes:.0f} B"


def percent(share: float | None) -> str:
    """A share of one as per cent, with a decimal where it is small."""
    if share is None:
        return "?"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def oddities(progress: dict[str, Any]) -> str:
    """What is odd about the answers, with the share of all of them; nothing where nothing is."""
    quality = progress["quality"]
    shares = (quality.get("shares") or {}).get("whole") or {}
    texts = []
    for flag, what in _ODD.items():
        if count := quality.get(flag):
            share = f" ({percent(shares[flag])})" if shares.get(flag, 0.0) >= 0.0005 else ""
            texts.append(f"{number(count)} {what}{share}")
    return ", ".join(texts)


def eta(progress: dict[str, Any]) -> str:
    """The ETA with its range, or why there is none."""
    hours = progress.get("eta_hours")
    if hours is None:
        return "eta not known yet"
    low, high = progress["eta_hours_low"], progress["eta_hours_high"]
    return f"eta {duration(hours * 3600)} ({duration(low * 3600)} to {duration(high * 3600)})"


def line(progress: dict[str, Any]) -> str:
    """A run's state in one line."""
    parts = [f"{number(progress['completed'])}/{number(progress['total'])} done"]
    if progress["percent"] is not None:
        parts.append(f"{progress['percent']:.1f} %")
    parts.append(f"{number(progress['rate_per_sec'])}/s")
    parts.append(f"{number(progress['output_tokens_per_sec'])} tok/s")
    ended = progress["completed"] + progress["failed"]
    if progress["state"] in ("running", "waiting", "starting") and ended != progress["total"]:
        parts.append(eta(progress))
    parts.append(f"{progress['in_flight']} in flight")
    if progress["failed"]:
        parts.append(f"{number(progress['failed'])} failed")
    if away := servers_away(progress):
        named = ", ".join(
            f"{server['url']}: {server['last_error'] or 'not asked yet'}" for server in away[:3]
        )
        parts.append(f"{servers_away_text(progress)} ({named})")
    if waiting := uploads_waiting(progress):
        parts.append(waiting)
    return f"{progress['state']}: " + ", ".join(parts)


def servers_away(progress: dict[str, Any]) -> list[dict[str, Any]]:
    """Servers of the run that are given no prompts."""
    return [server for server in progress["servers"] if server["state"] in ("starting", "benched")]


def servers_away_text(progress: dict[str, Any]) -> str:
    """How many they are; nothing where there is none."""
    away = len(servers_away(progress))
    return f"{away} of {_servers_in_run(progress)} servers away" if away else ""


def _servers_in_run(progress: dict[str, Any]) -> int:
    return sum(server["state"] != "gone" for server in progress["servers"])


def uploads_waiting(progress: dict[str, Any]) -> str:
    """How much is not in S3 yet; nothing where that is so little that it is only under way."""
    s3 = progress.get("s3")
    if not s3 or (
        s3["waiting"] <= UPLOADS_UNDER_WAY and not s3["failed"] and progress["state"] != "draining"
    ):
        return ""
    return f"{number(s3['waiting'])} shards wait for S3" if s3["waiting"] else ""
