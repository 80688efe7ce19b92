"""A run at a glance, as text."""

import textwrap
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from genpipe.core import wording
from genpipe.core.values import BadLine, CheckReport

BAR_WIDTH = 40
WIDTH = 110
"""No line is longer, but the last error, which is folded (characters)."""

URL_WIDTH = 44
"""A longer address loses its beginning, since servers differ at the end (characters)."""

ERROR_LINES_MAX = REASON_LINES_MAX = 4

LIVE = ("starting", "running", "waiting", "draining")
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

SHAPES = {
    "messages": "messages",
    "sharegpt": "conversations (ShareGPT)",
    "turns": "turns",
    "alpaca": "instruction (Alpaca)",
    "prompt": "prompt",
    "question": "question",
    "text": "text",
    "input_ids": "input_ids",
}
"""What the shapes of records are called to users."""


def status(progress: dict[str, Any], *, note: str | None = None, alive: bool = True) -> str:
    """The run as a page of text: bar, rates, ETA, where the slot time went, servers.

    Args:
        progress: a snapshot.
        note: put under the heading.
        alive: a driver is at work: what is so "now" is only shown then.
    """
    state, on = progress["state"], alive and progress["state"] in LIVE
    if state in LIVE and not alive:
        state = "dead"
    lines = [f"{state}  run {progress['run_id'][:8]}, segment {progress['segment']}"]
    lines += _matters(progress, note, on=on)
    lines.append(bar(progress) + (f", {wording.number(progress['in_flight'])} in flight" if on else ""))
    took = wording.duration(progress["elapsed_s"])
    rate = f"{wording.number(progress['rate_per_sec_segment'])}/s in this segment, which "
    rate += f"began {took} ago" if on else f"took {took}"
    tokens = f"{wording.number(progress['output_tokens_per_sec_whole'])}/s in this segment, "
    tokens += f"{wording.number(progress['avg_output_tokens'])} in an answer on average"
    if progress["usage_unknown"]:
        tokens += f" (not counted in {wording.number(progress['usage_unknown'])})"
    if on:
        rate = f"{wording.number(progress['rate_per_sec'])}/s now, {rate}"
        tokens = f"{wording.number(progress['output_tokens_per_sec'])}/s now, {tokens}"
    lines += [f"rate      {rate}", f"tokens    {tokens}"]
    if on and state != "draining":
        at = f", at {_clock(progress['eta_at'])}" if progress["eta_at"] else ""
        lines.append(f"end       {wording.eta(progress).removeprefix('eta ')}{at}")
    if gap := progress["dispatch_gap_ms"]:
        lines.append(f"refill    p50 {gap['p50']:g} ms, p99 {gap['p99']:g} ms, max {gap['max']:g} ms")
    if odd := wording.oddities(progress):
        lines += textwrap.wrap(f"answers   {odd}", WIDTH, subsequent_indent=" " * 10)
    if progress.get("hedged") or progress.get("late"):
        hedged, late = progress.get("hedged") or 0, progress.get("late") or 0
        dropped = f"; {_count(late, 'late answer')} dropped" if late else ""
        lines.append(f"hedging   {_count(hedged, 'request')} sent to a second server as well{dropped}")
    if progress["s3"]:
        lines += _uploads(progress["s3"], on=on)
    if progress["last_error"]:
        error = f"{progress['last_error']} (the last one)"
        folded = textwrap.wrap(error, WIDTH, initial_indent="error     ", subsequent_indent=" " * 10)
        lines += folded[:ERROR_LINES_MAX]
    if on and progress.get("tail"):
        lines += ["", *tail(progress["tail"], progress["in_flight"])]
    lines += ["", *slot_time(progress["slot_time"]), "", *servers(progress["servers"])]
    return "\n".join(_fitting(line) for line in lines)


def _matters(progress: dict[str, Any], note: str | None, *, on: bool) -> list[str]:
    """What is to be seen before all else: why the run stops, what is wrong, what it waits for."""
    texts = []
    if progress.get("stop_reason"):
        texts.append(f"{'stopping:' if on else 'stopped by'} {progress['stop_reason']}")
    texts += [f"warning: {text}" for text in progress.get("warnings") or ()]
    if on and progress.get("waiting_for"):
        texts.append(f"waiting: {progress['waiting_for']}")
    if note:
        texts.append(note)
    return [line for text in texts for line in textwrap.wrap(text, WIDTH)[:REASON_LINES_MAX]]


def _uploads(s3: dict[str, Any], *, on: bool) -> list[str]:
    """How the uploads are."""
    text = f"s3        {wording.number(s3['uploaded'])} shards are in {s3['uri']}"
    if s3["waiting"] and on:
        text += f", {wording.number(s3['waiting'])} wait"
        if s3["failed"]:
            text += f" ({wording.number(s3['failed'])} failed, and are tried again)"
    elif s3["waiting"]:
        text += f"; {wording.number(s3['waiting'])} are NOT THERE: the same command uploads them"
    if on and s3["tail_age_s"] is not None:
        text += f"; what is not sealed: {wording.duration(s3['tail_age_s'])} ago"
    if not s3["conditional"]:
        text += "; this store lets two drivers overwrite each other"
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=" " * 10)
    if s3["last_error"] and s3["waiting"]:
        tries = f"{wording.number(s3['retries'])} tries failed in all"
        when = f"{wording.duration(s3['last_error_age_s'])} ago; {tries}" if on else tries
        error = f"{s3['last_error']} ({when})"
        folded = textwrap.wrap(error, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)
        lines += folded[:ERROR_LINES_MAX]
    return lines


def _clock(moment: str) -> str:
    """A moment as clocks here show it, to the minute."""
    return f"{datetime.fromisoformat(moment).astimezone():%Y-%m-%d %H:%M}"


def _fitting(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def slot_time(by_span: dict[str, dict[str, float] | None]) -> list[str]:
    """Where the slot time went: a line an owner that had any, this segment and lately."""
    whole, recent = by_span["whole"] or {}, by_span["recent"] or {}
    lines = ["slot time  segment   lately"]
    if not whole:
        return [*lines, "  nothing yet"]
    for owner, hint in OWNER_HINTS.items():
        if whole.get(owner, 0.0) >= 0.0005 or recent.get(owner, 0.0) >= 0.0005:
            lately = wording.percent(recent.get(owner))
            segment = wording.percent(whole.get(owner))
            lines.append(f"  {owner:<9} {segment:>6} {lately:>8}   {hint}")
    return lines


def tail(requests: list[dict[str, Any]], in_flight: int) -> list[str]:
    """The oldest requests that still run, a line each.

    Args:
        requests: the oldest, in this order.
        in_flight: how many run in all.
    """
    width = min(URL_WIDTH, max([len(request["server"]) for request in requests], default=6))
    lines = [f"{'still running':<20}  {'server':<{width}}            for"]
    for request in requests:
        how = "also at a second server" if request.get("hedged") else ""
        if (request.get("tries") or 1) > 1:
            how = f"sent {request['tries']} times" + (f", {how}" if how else "")
        line = (
            f"  prompt {wording.number(request['index']):>11}  {_ending(request['server'], width):<{width}} "
            f"{wording.duration(request['age_s']):>14}   {how}"
        )
        lines.append(line.rstrip())
    if (more := in_flight - len(requests)) > 0:
        lines.append(f"  and {wording.number(more)} more")
    return [_fitting(line) for line in lines]


def servers(rows: list[dict[str, Any]]) -> list[str]:
    """The servers, a line each; those that are used no more come last.

    What only some servers have has a column only then: how much a busy one is allowed of its limit, and slots
    that wait for a server to notice that their request was given up.
    """
    rows = sorted(rows, key=lambda row: row["state"] == "gone")
    extras = [
        (heading, shown)
        for heading, shown in (("allowed", _allowed), ("aborting", _aborting))
        if any(shown(row) for row in rows)
    ]
    widest = URL_WIDTH - sum(len(heading) + 2 for heading, _ in extras)
    width = min(widest, max([len(row["url"]) for row in rows], default=6))
    more = "".join(f"  {heading}" for heading, _ in extras)
    heads = f"{'server':<{width}}  state    in flight{more}    answers         tokens   wire  faults"
    lines = [heads]
    for row in rows:
        wire = wording.percent((row["slot_time"] or {}).get("wire"))
        faults = ", ".join(f"{count} {kind}" for kind, count in row["faults"].items())
        in_flight = f"{row['in_flight']}/{row['limit']}"
        more = "".join(f"  {shown(row):>{len(heading)}}" for heading, shown in extras)
        line = (
            f"{_ending(row['url'], width):<{width}}  {row['state']:<8} {in_flight:>9}{more} "
            f"{wording.number(row['answers']):>10} {wording.number(row['output_tokens']):>14} {wire:>6}"
        )
        if not faults:
            lines.append(line)
        elif len(line) + 2 + len(faults) <= WIDTH:
            lines.append(f"{line}  {faults}")
        else:
            lines += [line, f"  faults: {faults}"]
        if row["state"] != "up" and row["last_error"]:
            lines.append(f"  {row['last_error']}")
    return [_fitting(line) for line in lines]


def _allowed(row: dict[str, Any]) -> str:
    """What a server is allowed now, where that is less than its limit."""
    allowed = row.get("allowed")
    return "" if row["state"] == "gone" or allowed is None or allowed >= row["limit"] else str(allowed)


def _aborting(row: dict[str, Any]) -> str:
    """Slots of requests that were given up and that the server has not noticed yet."""
    return str(row["aborting"]) if row.get("aborting") else ""


def _ending(url: str, width: int) -> str:
    return url if len(url) <= width else "…" + url[1 - width :]


def check_report(report: CheckReport) -> str:
    """What some input files hold."""
    shapes = ", ".join(
        f"{wording.number(report.shapes[shape])} {SHAPES[shape]}"
        for shape in sorted(report.shapes, key=list(SHAPES).index)
    )
    records, size = _count(report.records, "record"), _count(report.input_bytes, "byte")
    lines = [
        f"{records} in {size}"
        + (f", {_count(report.blank_lines, 'blank line')}" if report.blank_lines else ""),
        f"good      {shapes or 'none'}",
    ]
    if report.several_turns:
        lines.append(f"turns     {wording.number(report.several_turns)} with more than one turn of the user")
    if report.ends_in_answer:
        lines.append(f"endings   {wording.number(report.ends_in_answer)} end in an answer, {wording.GOES_ON}")
    if report.payload_bytes_max is not None:
        shortest, longest = wording.number(report.payload_bytes_min), wording.number(report.payload_bytes_max)
        lines.append(f"payload   {shortest} to {longest} bytes")
    lines.append(f"bad       {wording.number(report.bad_count)}")
    lines += _bad_lines(report.bad_lines)
    if more := report.bad_count - len(report.bad_lines):
        lines.append(f"  and {wording.number(more)} more")
    lines += [
        f"hint      with --set {setting}, {wording.number(count)} of the bad could be read"
        for setting, count in report.hints
    ]
    return "\n".join(lines)


def _bad_lines(bad_lines: Sequence[BadLine]) -> Iterator[str]:
    """Where they are and why; neighbours with one reason share a line."""

    def kind(numbered: tuple[int, BadLine]) -> tuple[str, str, int]:
        place, bad = numbered
        return bad.file, bad.reason, bad.line - place

    for (file, reason, _), group in groupby(enumerate(bad_lines), kind):
        numbers = [bad.line for _, bad in group]
        to = f"-{numbers[-1]}" if numbers[1:] else ""
        yield f"  {file}:{numbers[0]}{to}: {reason}"


def _count(count: int, what: str) -> str:
    return f"{wording.number(count)} {what}" + ("" if count == 1 else "s")


def bar(progress: dict[str, Any]) -> str:
    """How far the run is."""
    total, completed = progress["total"], progress["completed"]
    # Rounded downwards, so that nothing is full with work left.
    filled = BAR_WIDTH * completed // total if total else 0
    of = "? (not counted yet)" if total is None else wording.number(total)
    text = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {wording.number(completed)} of {of}"
    if total:
        text += f", {1000 * completed // total / 10:.1f} %"
    if progress["failed"]:
        text += f", {wording.number(progress['failed'])} failed"
    return text
