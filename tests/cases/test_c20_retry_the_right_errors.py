"""What is the prompt's fault is asked once, what passes is waited out, and a full queue slows us down."""

from collections import Counter

from tests.e2e.harness import (
    assert_within_limit,
    audit,
    failures,
    genpipe,
    in_flight,
    report,
    row_of,
    run_command,
    servers,
    without_probes,
    write_prompts,
)
from tests.faults.soak import SOAK

KINDS = (
    "status=400 why=too_long",
    "status=503 times=3",
    "status=500 times=1",
    "status=500",
    "status=429 retry_after=2 times=1",
    "status=422",
    "status=413",
    "reset=1",
    "usage=none",
    "usage=null",
    "usage=zero",
    "finish=length tokens=64",
)
"""Each stands twice in the input, with a plain row before it."""

TEXTS = [
    f"Error mix {place:02d}. <<{KINDS[place // 2 % len(KINDS)] if place % 2 else 'tokens=25'}>>"
    for place in range(4 * len(KINDS))
]
REFUSED = {
    place: int(text[text.index("status=") + 7 :][:3])
    for place, text in enumerate(TEXTS)
    if "<<status=4" in text and "429" not in text
}
HOPELESS = [place for place, text in enumerate(TEXTS) if "<<status=500>>" in text]
BAD = sorted([*REFUSED, *HOPELESS])
PAUSES_S = {"backoff_s": 0.05, "pause_max_s": 0.5, "bench_pause_s": 0.05}
QUICK = () if SOAK > 1 else tuple(f"--set=retry.{name}={value}" for name, value in PAUSES_S.items())
"""Pauses a tenth as long as by default."""
ATTEMPTS = 4
"""Faults that are charged to a prompt before it is given up (``retry.prompt_attempts``)."""


def places_with(order):
    return [place for place, text in enumerate(TEXTS) if f"<<{order}>>" in text]


def run(tmp_path, limit, *options, **modes):
    """The mix over two servers: what is left of it, and the servers' log."""
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with servers(tmp_path, 2, *options) as fleet:
        for mode, value in modes.items():
            for server in range(2):
                fleet.mode(server, mode, value=value)
        ended = genpipe(*run_command(fleet, source, out, limit, "--set=start.ramp_s=0", *QUICK))
        fleet.stop()
        visits = without_probes(fleet.visits())
    assert_within_limit(fleet, limit)
    return ended, out, visits


def assert_outcome(ended, out):
    """Forty rows good, eight failed, each with its status and what the server said."""
    failed = failures(out)

    assert ended.code == 1, ended.err
    audit(out, TEXTS, but=BAD)
    assert sorted(failed) == BAD
    assert {place: failed[place]["last_status"] for place in BAD} == {
        **REFUSED,
        **dict.fromkeys(HOPELESS, 500),
    }
    assert all(len(failed[place]["message"]) > 10 for place in BAD)
    for place in places_with("status=400 why=too_long"):
        assert "context length" in failed[place]["message"]


def test_the_mix_of_errors_ends_with_forty_good_rows_and_eight_reasons(tmp_path):
    ended, out, visits = run(tmp_path, 8)
    asked = Counter(visit["row"] for visit in visits)
    failed, report_ = failures(out), report(out)

    assert_outcome(ended, out)
    assert {asked[row_of(TEXTS[place])] for place in REFUSED} == {1}
    assert {failed[place]["attempts"] for place in REFUSED} == {1}
    # A 5xx counts only once its server has answered somebody else, so that a few more may be asked for.
    assert all(ATTEMPTS <= asked[row_of(TEXTS[place])] <= 3 * ATTEMPTS for place in HOPELESS)
    assert {asked[row_of(TEXTS[place])] for place in places_with("status=503 times=3")} == {4}
    for order in ("status=500 times=1", "status=429 retry_after=2 times=1", "reset=1"):
        assert {asked[row_of(TEXTS[place])] for place in places_with(order)} == {2}, order
    plain = [place for place in range(len(TEXTS)) if place % 2 == 0]
    assert {asked[row_of(TEXTS[place])] for place in plain} == {1}
    assert (report_["completed"], report_["failed"]) == (40, 8)


def test_a_retry_after_is_kept_and_servers_are_not_asked_again_all_at_one_instant(tmp_path):
    """Eight servers turn away a row each, at about one moment, with a wish for a pause of two seconds."""
    count = 8
    texts = [f"Row {place}. <<status=429 retry_after=2 times=1 delay=0.7>>" for place in range(count)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, count) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 1, "--set=start.ramp_s=0"))
        fleet.stop()
        visits = without_probes(fleet.visits())
    by_port = {port: [visit for visit in visits if visit["port"] == port] for port in fleet.ports}
    pauses_s = [again["arrival_s"] - first["end_s"] for first, again in by_port.values()]

    assert ended.code == 0, ended.err
    audit(out, texts)
    assert min(pauses_s) >= 1.95
    assert max(pauses_s) < 8
    assert max(pauses_s) - min(pauses_s) > 0.1
    assert [server["faults"] for server in report(out)["servers"]] == [{"busy": 1}] * count


def test_a_row_that_is_turned_away_more_often_than_it_may_fail_is_answered_all_the_same(tmp_path):
    """Its servers answer others all the while, so that a fault of its own would be charged to it."""
    often = 2 * ATTEMPTS + 2
    orders = [f"status={status} retry_after=0.05 times={often}" for status in (503, 429)]
    texts = [f"Row {place}. <<{orders[place % 2] if place < 6 else 'delay=0.05'}>>" for place in range(400)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 8, *QUICK))
        fleet.stop()
        asked = Counter(visit["row"] for visit in without_probes(fleet.visits()))

    assert ended.code == 0, ended.err
    audit(out, texts)
    assert {asked[row_of(text)] for text in texts[:6]} == {often + 1}
    assert {asked[row_of(text)] for text in texts[6:]} == {1}


def test_with_a_full_queue_the_outcome_is_the_same(tmp_path):
    """A quarter of what is offered has room; a row takes a quarter of a second there."""
    options = ("--max-running", 4, "--tokens-per-s", 100)
    ended, out, visits = run(tmp_path, 32, *options, queue_limit=4)
    turned_away = Counter(visit["row"] for visit in visits if visit["status"] == 503)
    plain = {row_of(text) for text in TEXTS[::2]}

    assert_outcome(ended, out)
    assert sum(times for row, times in turned_away.items() if row in plain) > 3


def test_while_a_servers_queue_is_full_less_is_sent_there_and_no_row_pays(tmp_path):
    """One server takes eight requests and is offered 32; the other takes all that it gets."""
    texts = [f"Row {place}. <<delay=0.25>>" for place in range(1200)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        fleet.mode(0, "slots", value=4)
        fleet.mode(0, "queue_limit", value=4)
        ended = genpipe(*run_command(fleet, source, out, 32, "--set=start.ramp_s=0"))
        fleet.stop()
        visits = without_probes(fleet.visits())
    small, large = ([visit for visit in visits if visit["port"] == port] for port in fleet.ports)
    refused = [visit for visit in small if visit["status"] == 503]
    began_s, last_s = visits[0]["arrival_s"], visits[-1]["arrival_s"]
    good = [visit for visit in small if visit["status"] == 200]

    assert ended.code == 0, ended.err
    assert (out / "failed.jsonl").read_bytes() == b""
    audit(out, texts)
    assert_within_limit(fleet, 32)
    # The first crowd is turned away at once; from then on it is asked for little more than it takes.
    assert len(refused) < 24 + 0.5 * len(good)
    later = [visit for visit in refused if visit["arrival_s"] > began_s + 1]
    assert len(later) / (last_s - began_s - 1) < 10
    # It is not given up either: it goes on with what it can do, which is 16 a second.
    assert len(good) > 0.5 * 16 * (last_s - began_s)
    assert max(level for _, level in in_flight(large)) == 32
    assert {visit["status"] for visit in large} == {200}
