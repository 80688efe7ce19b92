"""The page of text that shows a run."""

import math
import re
from datetime import datetime

import pytest

from genpipe.core.values import BadLine, CheckReport
from genpipe.ui import terminal
from tests.ui.samples import UNKNOWN, progress, server

AWAY = server(
    7,
    state="benched",
    in_flight=0,
    faults={"unreachable": 3, "busy": 12},
    last_error="cannot connect: " + "x" * 300,
)


def columns(lines, word):
    """Where a word or what stands under it ends."""
    return lines[0].index(word) + len(word)


@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize(
    "changes", [{}, UNKNOWN, {"failed": 12_345, "state": "waiting", "usage_unknown": 99_999}]
)
def test_no_line_is_longer_than_110_columns(count, changes):
    rows = [AWAY, *(server(place) for place in range(count - 1))]
    page = terminal.status(progress(servers=rows, last_error="e" * 2000, **changes))

    assert max(map(len, page.splitlines())) <= 110
    assert sum("http://10.0.0." in line for line in page.splitlines()) == count
    assert all(line == line.rstrip() for line in page.splitlines())


@pytest.mark.parametrize("count", [1, 8, 64])
def test_every_figure_of_the_servers_ends_under_its_heading(count):
    rows = [server(place, in_flight=place, answers=10**place % 9_999_999) for place in range(count)]
    lines = terminal.servers(rows)

    for heading in ("in flight", "answers", "tokens", "wire"):
        end = columns(lines, heading)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in lines), heading


def test_every_share_of_the_slot_time_ends_under_its_heading():
    shares = dict(
        zip(terminal.OWNER_HINTS, [0.5, 0.004, 0.05, 1.0, 0.3, 0.2, 0.1, 0.02, 0.01, 0.9, 0.6], strict=True)
    )
    lines = terminal.slot_time({"whole": shares, "recent": dict.fromkeys(shares, 0.123)})

    assert len(lines) == 1 + len(shares)
    for heading in ("segment", "lately"):
        end = columns(lines, heading)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in lines), heading


def test_owners_without_a_share_are_left_out():
    lines = terminal.slot_time({"whole": {"wire": 0.9996, "input": 0.0004}, "recent": None})

    assert [line.split()[0] for line in lines] == ["slot", "wire"]


def test_a_long_address_keeps_its_end():
    url = f"https://{'long.' * 20}example:30007"
    lines = terminal.servers([server(url=url), server(1)])

    assert lines[1].startswith("…")
    assert "example:30007  up " in lines[1]
    assert max(map(len, lines)) <= 110


def test_why_a_server_is_away_stands_under_it_and_an_old_error_of_one_that_is_up_does_not():
    lines = terminal.servers([AWAY, server(1, last_error="500: old", faults={"broken": 1})])

    assert lines[1].endswith("  3 unreachable, 12 busy")
    assert lines[2].startswith("  cannot connect: xxx")
    assert lines[2].endswith("…")
    assert "old" not in "\n".join(lines)
    assert len(lines) == 4


def test_what_is_unknown_is_a_question_mark_and_never_a_zero_or_none():
    page = terminal.status(progress(**UNKNOWN, completed=0, servers=[server(slot_time=None)]))

    assert "0 of ? (not counted yet)" in page
    assert "?/s now, ?/s in this segment" in page
    assert "end       not known yet" in page
    assert "None" not in page
    assert "nan" not in page
    assert "%" not in page


def test_a_run_under_way_shows_its_rates_and_its_end_by_the_clock_here():
    page = terminal.status(progress())
    at = datetime.fromisoformat("2026-03-01T12:00:00+00:00").astimezone().strftime("%Y-%m-%d %H:%M")

    assert page.splitlines()[:2] == [
        "running  run 01234567, segment 1",
        "[##########..............................] 2,500 of 10,000, 25.0 %, 60 in flight",
    ]
    assert "rate      12.3/s now, 11.0/s in this segment, which began 3 min 48 s ago" in page
    assert "tokens    5,000/s now, 4,900/s in this segment, 400 in an answer on average" in page
    assert f"end       30 min 00 s (24 min 00 s to 45 min 00 s), at {at}" in page


def test_a_run_whose_driver_died_shows_nothing_that_is_so_now():
    page = terminal.status(progress(), alive=False, note="not running")

    assert page.splitlines()[:2] == ["dead  run 01234567, segment 1", "not running"]
    assert " now" not in page
    assert "in flight," not in page.splitlines()[2]
    assert "end  " not in page
    assert "11.0/s in this segment, which took 3 min 48 s" in page


@pytest.mark.parametrize("state", ["done", "stopped", "failed", "interrupted"])
def test_a_run_that_is_over_has_no_end_to_come(state):
    page = terminal.status(progress(state=state))

    assert page.startswith(f"{state}  run ")
    assert "end  " not in page
    assert " now" not in page


def test_what_is_odd_about_the_answers_is_said_and_nothing_is_said_of_nothing():
    quality = {"empty": 3, "cut": 1_200, "looping": None, "unclosed_think": None}
    page = terminal.status(
        progress(quality=quality, usage_unknown=7, last_error="http://a: 500: oh", failed=2)
    )

    assert "answers   3 empty, 1,200 cut off at the length limit" in page
    assert "(not counted in 7)" in page
    assert "error     http://a: 500: oh (the last one)" in page
    assert ", 2 failed" in page
    for word in ("\nanswers", "not counted", "\nerror", "failed"):
        assert word not in terminal.status(progress())


@pytest.mark.parametrize(
    ("total", "completed", "filled"),
    [(10, 0, 0), (10, 5, 20), (10, 10, 40), (0, 0, 0), (None, 5, 0), (10**9, 10**9 - 1, 39)],
)
def test_the_bar_is_full_only_when_all_is_done(total, completed, filled):
    text = terminal.bar(progress(total=total, completed=completed))

    assert text.count("#") == filled
    assert re.match(r"\[[#.]{40}\] ", text)


def test_a_share_below_one_is_never_shown_as_100_per_cent():
    assert ", 99.9 %" in terminal.bar(progress(total=10_000_000, completed=9_999_999))


def report(**changes):
    fields = {
        "records": 1_000,
        "blank_lines": 0,
        "input_bytes": 123_456,
        "shapes": {"prompt": 700, "messages": 300},
        "bad_count": 0,
        "bad_lines": (),
        "payload_bytes_min": 31,
        "payload_bytes_max": 1_234,
    }
    return CheckReport(**{**fields, **changes})


def test_the_report_of_a_check_counts_records_shapes_and_bad_lines():
    bad = tuple(BadLine(index=n, file="in.jsonl", line=n + 1, reason="not JSON") for n in range(2))
    lines = terminal.check_report(report(bad_count=5, bad_lines=bad, blank_lines=1)).splitlines()

    assert lines == [
        "1,000 records in 123,456 bytes, 1 blank line",
        "good      300 messages, 700 prompt",
        "payload   31 to 1,234 bytes",
        "bad       5",
        "  in.jsonl:1: not JSON",
        "  in.jsonl:2: not JSON",
        "  and 3 more",
    ]


def test_the_report_of_an_empty_input_has_no_payload():
    text = terminal.check_report(
        report(records=0, input_bytes=0, shapes={}, payload_bytes_min=None, payload_bytes_max=None)
    )

    assert text == "0 records in 0 bytes\ngood      none\nbad       0"


def test_a_snapshot_with_nothing_in_it_that_is_a_number_is_still_shown():
    shown = terminal.status(progress(rate_per_sec=math.inf, servers=[]))

    assert "server  state" in shown
