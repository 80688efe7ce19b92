"""Numbers and states as people read them."""

import pytest

from genpipe.core import wording


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.0, "0 s"),
        (45.4, "45 s"),
        (59.6, "1 min 00 s"),
        (200.0, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (3900.0, "1 h 05 min"),
        (86_399.0, "23 h 59 min"),
        (183_600.0, "2 d 3 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert wording.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "?"), (7, "7"), (1234567, "1,234,567"), (3.14159, "3.1"), (1234.5, "1,234")]
)
def test_a_number_has_decimals_only_where_they_tell_something(value, text):
    assert wording.number(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(None, "?"), (0.0, "0.0 %"), (0.0312, "3.1 %"), (0.0996, "10 %"), (1.0, "100 %")]
)
def test_a_share_is_per_cent(share, text):
    assert wording.percent(share) == text


def a_progress(**changes):
    return {
        "state": "running",
        "completed": 1200,
        "total": 5000,
        "percent": 24.0,
        "rate_per_sec": 12.34,
        "output_tokens_per_sec": 4321.0,
        "eta_hours": 0.5,
        "eta_hours_low": 0.4,
        "eta_hours_high": 0.75,
        "in_flight": 64,
        "failed": 0,
        "servers": [{"url": "http://a", "state": "up", "last_error": None}],
        **changes,
    }


def test_the_eta_has_its_range_or_says_that_there_is_none():
    assert wording.eta(a_progress()) == "eta 30 min 00 s (24 min 00 s to 45 min 00 s)"
    assert wording.eta(a_progress(eta_hours=None)) == "eta not known yet"


def test_a_run_in_one_line():
    assert wording.line(a_progress()) == (
        "running: 1,200/5,000 done, 24.0 %, 12.3/s, 4,321 tok/s, "
        "eta 30 min 00 s (24 min 00 s to 45 min 00 s), 64 in flight"
    )


def test_the_line_tells_of_failures_and_of_servers_that_are_away():
    servers = [
        {"url": "http://a", "state": "benched", "last_error": "refused"},
        {"url": "http://b", "state": "up", "last_error": None},
    ]
    text = wording.line(a_progress(failed=3, servers=servers, percent=None, total=None))

    assert "3 failed" in text
    assert "1 of 2 servers away (http://a: refused)" in text
    assert "1,200/? done" in text


def test_a_run_that_has_ended_has_no_eta():
    assert "eta" not in wording.line(a_progress(state="done"))


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999.6, "1000 B"), (1500, "1.5 kB"), (26e6, "26.0 MB"), (1_204_300_000_000, "1,204.3 GB")],
)
def test_a_size_has_the_unit_that_fits(size_bytes, text):
    assert wording.size(size_bytes) == text
