"""Servers that stop in the middle: what hangs there is answered elsewhere, and no honest long answer is cut.

A server's process is stopped, or a proxy passes nothing on any more while connections stay open. The times
are those that the settings promise: a server that neither answers nor shows any work for ``request.silent_s``
is given up, and it is looked at every sixth of that.
"""

import http.client
import json
import math
import time
from collections import defaultdict
from contextlib import ExitStack

import pytest

from tests.e2e.harness import (
    audit,
    report,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    without_probes,
    write_prompts,
)
from tests.e2e.tcp_proxy import TcpProxy
from tests.faults.soak import SOAK

FULL = SOAK > 1
SILENT_S = 60.0 if FULL else 3.0
LONG_S = 420.0 if FULL else 9.0
ROWS = 6000 if FULL else 420
COUNT, LIMIT, DELAY_S = 3, 4, 0.25
LOOK_S = SILENT_S / 6
GIVEN_UP_S = SILENT_S + 2 * LOOK_S + 2.0
"""A look may just miss the end of the silence, and takes its own time; then the prompt pauses a little."""
BACK_S = 15.0
QUICK = () if FULL else (f"--set=request.silent_s={SILENT_S}", "--set=retry.pause_max_s=1")

LONG = [f"Long {place}. {'word ' * 2000} <<tokens=300 delay={LONG_S}>>" for place in range(2)]
LONG_TOKENS = 1000
"""A server that has more of them has one of the long prompts."""
TEXTS = [*LONG, *(f"Row {place}. <<tokens=5 delay={DELAY_S}>>" for place in range(ROWS))]


class Stopped:
    """A server whose process can be made to stand still."""

    def __init__(self, fleet, _stack):
        self.url = fleet.urls[0]
        self.stop, self.go_on = fleet.pause, fleet.go_on

    busy = True
    """Whether a long answer is cut off as well."""


class BlackHole:
    """A server behind a proxy that can swallow what is sent, either way."""

    busy = True
    new = True
    """Whether it swallows connections to come as well."""

    def __init__(self, fleet, stack):
        self._proxy = stack.enter_context(TcpProxy(fleet.ports[0]))
        self.url = self._proxy.url

    def stop(self):
        self._proxy.black_hole(new=self.new)

    def go_on(self):
        self._proxy.forward()


class OldConnections(BlackHole):
    """Likewise, of the connections of now alone: the server itself goes on, and is done soon."""

    busy = new = False


class Seen:
    """What the servers' logs say of each prompt, and when the victim stood still (seconds, monotonic)."""

    def __init__(self, fleets, victim, stopped_s, went_on_s):
        self.victim = victim
        self.stopped_s, self.went_on_s = stopped_s, went_on_s
        self.by_row = defaultdict(list)
        for place, fleet in enumerate(fleets):
            for visit in without_probes(fleet.visits()):
                self.by_row[visit["row"]].append((place, visit))

    def stuck(self):
        """Of each row that was at the victim as it stopped: how long until it was sent again."""
        waits_s = {}
        for row, visits in self.by_row.items():
            there = [visit for place, visit in visits if place == self.victim]
            if any(visit["arrival_s"] < self.stopped_s < visit["end_s"] for visit in there):
                later = [visit["arrival_s"] for _, visit in visits if visit["arrival_s"] > self.stopped_s]
                waits_s[row] = min(later, default=math.inf) - self.stopped_s
        return waits_s

    def back_after_s(self):
        """How long after it went on the victim was given a prompt again, and answered it."""
        good = [
            visit["arrival_s"]
            for visits in self.by_row.values()
            for place, visit in visits
            if place == self.victim and visit["arrival_s"] > self.went_on_s and not visit["client_gone"]
        ]
        return min(good, default=math.inf) - self.went_on_s


def has_long(fleet):
    """Whether a server has one of the long prompts now, by the tokens that it holds."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.ports[0], timeout=10)
    try:
        connection.request("GET", "/v1/loads")
        (load,) = json.loads(connection.getresponse().read())["loads"]
    finally:
        connection.close()
    return load["num_used_tokens"] > LONG_TOKENS


def faults_at(out, place):
    """Attempts that are known to have failed at a server by now."""
    return sum(report(out)["servers"][place]["faults"].values())


def play(tmp_path, kind):
    """A run over three servers of which one stops for longer than it may be silent."""
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with ExitStack() as stack:
        fleets = []
        for place in range(COUNT):
            folder = tmp_path / f"server{place}"
            folder.mkdir()
            fleets.append(stack.enter_context(servers(folder, 1)))
        kinds = [kind(fleet, stack) for fleet in fleets]
        command = ["run", "--prompts", source, "--out", out, "--concurrency", LIMIT, "--no-hedge", *QUICK]
        command += [f"--servers={each.url}" for each in kinds]
        with running(*command, err=tmp_path / "run.err") as run:
            wait_for(lambda: len(saved(out)) > 20, "answers")
            victim = next(place for place, fleet in enumerate(fleets) if has_long(fleet) == kind.busy)
            kinds[victim].stop()
            stopped_s = time.monotonic()
            try:
                wait_for(lambda: faults_at(out, victim) >= LIMIT, "requests to be given up", 2 * GIVEN_UP_S)
                noticed_s = time.monotonic() - stopped_s
                # It stays away until all that hung there must have been sent elsewhere.
                time.sleep(max(0.0, GIVEN_UP_S + 0.5 - noticed_s))
                shown = report(out)["servers"][victim]
            finally:
                kinds[victim].go_on()
            went_on_s = time.monotonic()
            code = run.wait(2 * LONG_S)
        for fleet in fleets:
            fleet.stop()
    assert code == 0, run.err
    return out, shown, noticed_s, Seen(fleets, victim, stopped_s, went_on_s)


@pytest.mark.timeout(1200 if FULL else 90)
@pytest.mark.parametrize("kind", [Stopped, BlackHole, *([OldConnections] if SOAK > 1 else [])])
def test_what_hangs_is_answered_elsewhere_in_time_and_long_answers_of_others_survive(tmp_path, kind):
    out, shown, noticed_s, seen = play(tmp_path, kind)
    stuck = seen.stuck()
    records = audit(out, TEXTS)
    server = report(out)["servers"][seen.victim]
    print(kind.__name__, noticed_s, sorted(stuck.values()), seen.back_after_s())

    assert (out / "failed.jsonl").read_bytes() == b""
    # All of its slots were in use, and were given up in the promised time; a snapshot tells a second late.
    assert len(stuck) == LIMIT
    assert noticed_s <= GIVEN_UP_S
    assert seen.back_after_s() <= BACK_S
    # The honest long answers of the other servers took one attempt, that nobody cut.
    honest = [place for place, text in enumerate(LONG) if row_of(text) not in stuck]
    assert len(honest) == (1 if kind.busy else 2)
    for place in honest:
        ((_, visit),) = seen.by_row[row_of(LONG[place])]
        assert (visit["client_gone"], records[place]["attempts"]) == (False, 1)
    # Nothing but the victim was blamed.
    assert [each["faults"] for each in report(out)["servers"] if each["url"] != server["url"]] == [{}, {}]
    assert sum(server["faults"].values()) >= LIMIT
    if kind is OldConnections:
        # On another connection it says, again and again, that it has nothing to do: no silence is waited for.
        assert server["faults"] == {"overdue": LIMIT}
        assert noticed_s < SILENT_S + 1.1
        assert max(stuck.values()) < math.inf
    else:
        # No guess is made before the silence has lasted; then the prompts go out at once, to other servers.
        assert shown["state"] == "benched"
        assert server["faults"]["stalled"] >= LIMIT
        assert min(stuck.values()) >= SILENT_S - LOOK_S
        assert max(stuck.values()) <= GIVEN_UP_S


def test_a_request_older_than_the_bound_that_was_set_is_given_up_though_its_server_works(tmp_path):
    """Three are never answered, by servers that answer all the others: no silence, and nobody is idle."""
    hanging = (5, 17, 40)
    texts = [
        f"Row {place}. <<delay=0.1 {'hang=headers times=1' if place in hanging else ''}>>"
        for place in range(300)
    ]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        command = run_command(fleet, source, out, LIMIT, "--no-hedge", "--set=request.stall_s=1.2")
        with running(*command, err=tmp_path / "run.err") as run:
            code = run.wait()
        fleet.stop()
        visits = without_probes(fleet.visits())
    last_s = visits[-1]["arrival_s"]

    assert code == 0, run.err
    audit(out, texts)
    for place in hanging:
        first, again = (visit for visit in visits if visit["row"] == row_of(texts[place]))
        # Each quarter of the bound is a look; they hang for that long in mid-run.
        assert 1.2 <= first["gone_s"] - first["arrival_s"] < 1.2 * 1.25 + 0.5
        assert first["gone_s"] < last_s
        assert again["status"] == 200
    assert sum(server["faults"].get("overdue", 0) for server in report(out)["servers"]) == len(hanging)
