"""The page of text that shows a run."""

import math
import re
from datetime import datetime
from typing import get_args

import pytest

from genpipe.core.values import BadLine, CheckReport
from genpipe.edges.prompts.shapes import Shape
from genpipe.ui import terminal
from tests.ui.samples import UNKNOWN, progress, server

SHARES = {
    "whole": {"empty": 0.0012, "cut": 0.48, "looping": 0.02, "unclosed_think": 0.12, "short": 0.87},
    "recent": None,
}

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


# ---- what is to be seen first ----


def test_why_a_run_was_stopped_what_is_wrong_and_what_it_waits_for_stand_right_under_the_heading():
    page = terminal.status(
        progress(
            stop_reason="guards.failed_share: 6 of the last 10 prompts",
            warnings=["guards.cut_share: 7 of the last 10 answers", "guards.empty_share: 8 of the last 10"],
            waiting_for="no server can be used; the next one is asked in 3 s",
        ),
        note="a note",
    )

    assert page.splitlines()[1:7] == [
        "stopping: guards.failed_share: 6 of the last 10 prompts",
        "warning: guards.cut_share: 7 of the last 10 answers",
        "warning: guards.empty_share: 8 of the last 10",
        "waiting: no server can be used; the next one is asked in 3 s",
        "a note",
        "[##########..............................] 2,500 of 10,000, 25.0 %, 60 in flight",
    ]


def test_a_run_that_was_stopped_says_by_what_and_waits_for_nothing_any_more():
    page = terminal.status(
        progress(state="stopped", stop_reason="guards.failed_share: 6 of 10", waiting_for="no server")
    )

    assert page.splitlines()[:2] == [
        "stopped  run 01234567, segment 1",
        "stopped by guards.failed_share: 6 of 10",
    ]
    assert "waiting" not in page


def test_a_dead_run_waits_for_nothing():
    assert "waiting" not in terminal.status(progress(waiting_for="no server"), alive=False)


def test_a_long_reason_is_folded_and_a_huge_one_is_cut():
    page = terminal.status(progress(stop_reason="word " * 1000, tail=None, warnings=None))
    lines = page.splitlines()

    assert lines[1].startswith("stopping: word word")
    assert [line.startswith("[") for line in lines].index(True) == 5
    assert max(map(len, lines)) <= 110


def test_snapshots_of_older_versions_lack_what_is_new_and_show_nothing_of_it():
    older = {key: value for key, value in server().items() if key != "allowed"}
    page = terminal.status(progress(servers=[older]))

    for word in ("warning", "stop", "waiting:", "hedging", "still running", "allowed", "aborting"):
        assert word not in page


# ---- the tail ----


def request(place=0, **changes):
    fields = {
        "index": 7 + 1_000_000 * place,
        "server": f"http://10.0.0.{place % 3 + 1}:30000",
        "age_s": 3_723.0 / (place + 1),
        "tries": 1,
        "hedged": False,
    }
    return {**fields, **changes}


def test_what_still_runs_is_listed_with_its_index_its_server_and_for_how_long():
    requests = [request(), request(1, tries=2, hedged=True), request(2, hedged=True), request(9, tries=3)]
    lines = terminal.tail(requests, 4)

    assert [" ".join(line.split()) for line in lines] == [
        "still running server for",
        "prompt 7 http://10.0.0.1:30000 1 h 02 min",
        "prompt 1,000,007 http://10.0.0.2:30000 31 min 02 s sent 2 times, also at a second server",
        "prompt 2,000,007 http://10.0.0.3:30000 20 min 41 s also at a second server",
        "prompt 9,000,007 http://10.0.0.1:30000 6 min 12 s sent 3 times",
    ]
    assert len({line.index("http") for line in lines[1:]} | {lines[0].index("server")}) == 1
    for line in lines[1:]:
        assert line[: columns(lines, "for")].endswith((" min", " s"))


def test_the_tail_stands_in_the_page_while_the_run_goes_on_and_says_how_many_more_there_are():
    requests = [request(place) for place in range(10)]
    page = terminal.status(progress(tail=requests, in_flight=23))

    assert page.index("hedging" if "hedging" in page else "refill") < page.index("still running")
    assert page.index("still running") < page.index("slot time")
    assert "\n  and 13 more\n" in page
    assert "and 0 more" not in terminal.status(progress(tail=requests, in_flight=10))
    for state, alive in (("running", False), ("done", True)):
        assert "still running" not in terminal.status(progress(tail=requests, state=state), alive=alive)


def test_a_tail_of_long_addresses_fits():
    requests = [request(server=f"https://{'long.' * 30}example:30007", tries=4, hedged=True, index=10**9)]

    assert max(map(len, terminal.tail(requests, 1))) <= 110


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"hedged": 1, "late": 0}, "hedging   1 request sent to a second server as well\n"),
        (
            {"hedged": 1_200, "late": 2},
            "hedging   1,200 requests sent to a second server as well; 2 late answers dropped\n",
        ),
        ({"hedged": None, "late": 1}, "hedging   0 requests sent to a second server as well; 1 late answer"),
    ],
)
def test_hedges_and_late_answers_are_counted(counts, said):
    assert said in terminal.status(progress(**counts))


def test_no_hedges_are_not_spoken_of():
    assert "hedging" not in terminal.status(progress(hedged=0, late=0))


# ---- servers in every state ----


def test_what_a_busy_server_is_allowed_and_what_is_aborting_have_columns_only_where_there_is_any():
    plain = terminal.servers([server(allowed=64, aborting=0)])
    lines = terminal.servers(
        [
            server(0, aborting=0),
            server(1, allowed=8, aborting=0),
            server(2, aborting=12),
            server(3, allowed=0, aborting=3),
        ]
    )

    assert "allowed" not in plain[0]
    assert "aborting" not in plain[0]
    for heading, expected in (("allowed", ["", "8", "", "0"]), ("aborting", ["", "", "12", "3"])):
        end = columns(lines, heading)
        assert [line[end - len(heading) : end].strip() for line in lines[1:]] == expected
    for heading in ("in flight", "answers", "tokens", "wire"):
        end = columns(lines, heading)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in lines), heading


def test_servers_that_are_gone_come_last_and_say_why():
    lines = terminal.servers(
        [
            server(0, state="gone", allowed=3, last_error="it serves another model"),
            server(1),
            server(2, state="gone"),
            server(3, state="starting"),
        ]
    )

    assert [line.split()[:2] for line in lines[1:]] == [
        ["http://10.0.0.2:30000", "up"],
        ["http://10.0.0.4:30000", "starting"],
        ["http://10.0.0.1:30000", "gone"],
        ["it", "serves"],
        ["http://10.0.0.3:30000", "gone"],
    ]
    assert "allowed" not in lines[0]


def test_why_a_server_is_suspect_stands_under_it():
    lines = terminal.servers([server(state="suspect", last_error="silent for 61 s")])

    assert lines[2] == "  silent for 61 s"


def test_faults_that_do_not_fit_beside_a_server_stand_under_it():
    faults = {"unreachable": 123, "lost": 4, "stalled": 55, "busy": 6_666, "broken": 7}
    row = server(url=f"https://{'long.' * 30}example:30007", allowed=1, aborting=9, faults=faults)
    lines = terminal.servers([row, server(1, faults={"lost": 1})])

    assert lines[2] == "  faults: 123 unreachable, 4 lost, 55 stalled, 6666 busy, 7 broken"
    assert lines[3].endswith("  1 lost")
    assert max(map(len, lines)) <= 110


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
    quality = {"empty": 3, "cut": 1_200, "looping": 0, "unclosed_think": 0, "short": 0, "shares": SHARES}
    page = terminal.status(
        progress(quality=quality, usage_unknown=7, last_error="http://a: 500: oh", failed=2)
    )

    assert "answers   3 empty (0.1 %), 1,200 cut off at the length limit (48 %)" in page
    assert "(not counted in 7)" in page
    assert "error     http://a: 500: oh (the last one)" in page
    assert ", 2 failed" in page
    for word in ("\nanswers", "not counted", "\nerror", "failed"):
        assert word not in terminal.status(progress())


def test_all_that_can_be_odd_about_answers_is_shown_and_folded():
    flags = ("empty", "cut", "looping", "unclosed_think", "short")
    quality = dict.fromkeys(flags, 4_321_765) | {"shares": SHARES}
    lines = terminal.status(progress(quality=quality)).splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.startswith("answers ")]

    assert " ".join(f"{lines[place]} {lines[place + 1]}".split()) == (
        "answers 4,321,765 empty (0.1 %), 4,321,765 cut off at the length limit (48 %), "
        "4,321,765 looping (2.0 %), 4,321,765 within their reasoning (12 %), 4,321,765 short (87 %)"
    )
    assert max(map(len, lines)) <= 110


def test_a_report_of_an_earlier_version_is_shown_too():
    quality = {"empty": 3, "cut": 0, "looping": None, "unclosed_think": None}

    assert "\nanswers   3 empty\n" in terminal.status(progress(quality=quality))


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
    where = [("in.jsonl", 1), ("in.jsonl", 2), ("in.jsonl", 4), ("b.jsonl", 5)]
    bad = tuple(
        BadLine(index=n, file=file, line=line, reason="not JSON") for n, (file, line) in enumerate(where)
    )
    lines = terminal.check_report(report(bad_count=7, bad_lines=bad, blank_lines=1)).splitlines()

    assert lines == [
        "1,000 records in 123,456 bytes, 1 blank line",
        "good      300 messages, 700 prompt",
        "payload   31 to 1,234 bytes",
        "bad       7",
        "  in.jsonl:1-2: not JSON",
        "  in.jsonl:4: not JSON",
        "  b.jsonl:5: not JSON",
        "  and 3 more",
    ]


def test_the_report_names_shapes_in_words_and_says_what_would_help():
    names = ("input_ids", "text", "question", "prompt", "alpaca", "turns", "sharegpt", "messages")
    shapes = dict(zip(names, range(996, 1004), strict=True))
    hints = (("request.multi_turn=true", 1200), ("input.dialect=text", 1))

    lines = terminal.check_report(
        report(shapes=shapes, bad_count=1201, bad_lines=(), several_turns=1500, hints=hints)
    ).splitlines()

    assert lines[1] == (
        "good      1,003 messages, 1,002 conversations (ShareGPT), 1,001 turns, 1,000 instruction (Alpaca), "
        "999 prompt, 998 question, 997 text, 996 input_ids"
    )
    assert lines[2:] == [
        "turns     1,500 with more than one turn of the user",
        "payload   31 to 1,234 bytes",
        "bad       1,201",
        "  and 1,201 more",
        "hint      with --set request.multi_turn=true, 1,200 of the bad could be read",
        "hint      with --set input.dialect=text, 1 of the bad could be read",
    ]


def test_the_report_counts_what_ends_in_an_answer_and_names_both_remedies():
    lines = terminal.check_report(report(ends_in_answer=1_200)).splitlines()

    assert lines[2] == (
        "endings   1,200 end in an answer, which the model would be asked to go on from: "
        "request.multi_turn=true has it answered anew, "
        "request.extra_body.continue_final_message=true continues it"
    )
    assert "endings" not in terminal.check_report(report())


def test_every_shape_of_a_record_has_a_name_for_users():
    assert set(terminal.SHAPES) == set(get_args(Shape))


def test_the_report_of_an_empty_input_has_no_payload():
    text = terminal.check_report(
        report(records=0, input_bytes=0, shapes={}, payload_bytes_min=None, payload_bytes_max=None)
    )

    assert text == "0 records in 0 bytes\ngood      none\nbad       0"


def test_a_snapshot_with_nothing_in_it_that_is_a_number_is_still_shown():
    shown = terminal.status(progress(rate_per_sec=math.inf, servers=[]))

    assert "server  state" in shown
