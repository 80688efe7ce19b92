"""A run at a glance, as text."""

from typing import Any

from genpipe.core import wording
from genpipe.core.values import CheckReport

BAR_WIDTH = 40
OWNER_HINTS = {
    "wire": "requests at the servers",
    "overhead": "a slot taken, its request not yet sent",
    "dispatch": "work ready and a slot free: the client was late",
    "input": "waiting for prompts to be read",
    "storage": "waiting for the disk",
    "backoff": "prompts waiting after a fault",
    "aborting": "given up, the server has not noticed yet",
    "down": "servers away",
    "cut": "limit lowered because a server said it was busy",
    "ramp": "opening slots at the start",
    "drain": "no prompts left to send",
}


def status(progress: dict[str, Any], *, note: str | None = None) -> str:
    """The run as a page of text: bar, rates, ETA, where the slot time went, servers.

    Args:
        progress: a snapshot.
        note: a line put under the heading.
    """
    lines = [f"{progress['state']}  run {progress['run_id'][:8]}, segment {progress['segment']}"]
    if note:
        lines.append(note)
    lines.append(f"{bar(progress)}, {progress['in_flight']} in flight")
    lines.append(
        f"rate      {wording.number(progress['rate_per_sec'])}/s now, "
        f"{wording.number(progress['rate_per_sec_segment'])}/s since this segment began "
        f"{wording.duration(progress['elapsed_s'])} ago"
    )
    lines.append(
        f"tokens    {wording.number(progress['output_tokens_per_sec'])}/s now, "
        f"{wording.number(progress['output_tokens_per_sec_whole'])}/s this segment, "
        f"{wording.number(progress['avg_output_tokens'])} on average"
        + (f", unknown for {wording.number(progress['usage_unknown'])}" if progress["usage_unknown"] else "")
    )
    if progress["state"] in ("running", "waiting", "starting"):
        at = f", at {progress['eta_at']}" if progress["eta_at"] else ""
        lines.append(f"end       {wording.eta(progress)}{at}")
    if gap := progress["dispatch_gap_ms"]:
        lines.append(f"refill    p50 {gap['p50']:g} ms, p99 {gap['p99']:g} ms, max {gap['max']:g} ms")
    quality = progress["quality"]
    if quality["empty"] or quality["cut"]:
        lines.append(
            f"answers   {wording.number(quality['empty'])} empty, "
            f"{wording.number(quality['cut'])} cut off at the length limit"
        )
    if progress["last_error"]:
        lines.append(f"error     {progress['last_error']} (the last one)")
    lines += ["", *slot_time(progress["slot_time"]), "", *servers(progress["servers"])]
    return "\n".join(lines)


def slot_time(by_span: dict[str, dict[str, float] | None]) -> list[str]:
    """Where the slot time went: a line an owner that had any, this segment and lately."""
    whole, recent = by_span["whole"] or {}, by_span["recent"] or {}
    lines = ["slot time   segment   lately"]
    for owner, hint in OWNER_HINTS.items():
        if whole.get(owner, 0.0) >= 0.0005 or recent.get(owner, 0.0) >= 0.0005:
            lately = wording.percent(recent.get(owner))
            lines.append(f"  {owner:<9} {wording.percent(whole[owner]):>7} {lately:>8}   {hint}")
    return lines


def servers(rows: list[dict[str, Any]]) -> list[str]:
    """The servers, a line each."""
    width = max([len(row["url"]) for row in rows], default=6)
    lines = [f"{'server':<{width}}  state    in flight    answers     tokens   wire  faults"]
    for row in rows:
        wire = wording.percent((row["slot_time"] or {}).get("wire"))
        faults = ", ".join(f"{count} {kind}" for kind, count in row["faults"].items())
        in_flight = f"{row['in_flight']}/{row['limit']}"
        line = (
            f"{row['url']:<{width}}  {row['state']:<8} {in_flight:>9} {wording.number(row['answers']):>10} "
            f"{wording.number(row['output_tokens']):>10} {wire:>6}  {faults}"
        )
        if row["state"] != "up" and row["last_error"]:
            line += f" ({row['last_error']})"
        lines.append(line.rstrip())
    return lines


def check_report(report: CheckReport) -> str:
    """What some input files hold."""
    shapes = ", ".join(f"{wording.number(count)} {shape}" for shape, count in sorted(report.shapes.items()))
    lines = [
        f"{wording.number(report.records)} records in {wording.number(report.input_bytes)} bytes"
        + (f", {wording.number(report.blank_lines)} blank lines" if report.blank_lines else ""),
        f"good      {shapes or 'none'}",
    ]
    if report.payload_bytes_max is not None:
        shortest, longest = wording.number(report.payload_bytes_min), wording.number(report.payload_bytes_max)
        lines.append(f"payload   {shortest} to {longest} bytes")
    lines.append(f"bad       {wording.number(report.bad_count)}")
    lines += [f"  {bad.file}:{bad.line}: {bad.reason}" for bad in report.bad_lines]
    if more := report.bad_count - len(report.bad_lines):
        lines.append(f"  and {wording.number(more)} more")
    return "\n".join(lines)


def bar(progress: dict[str, Any]) -> str:
    """How far the run is."""
    total, completed = progress["total"], progress["completed"]
    share = completed / total if total else 0.0
    filled = int(share * BAR_WIDTH)
    text = (
        f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {wording.number(completed)} of {wording.number(total)}"
    )
    if total:
        text += f", {100 * share:.1f} %"
    if progress["failed"]:
        text += f", {wording.number(progress['failed'])} failed"
    return text
