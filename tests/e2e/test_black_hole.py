"""A server that turns every request away at once draws no prompts in: the others need no longer for it.

Two runs go on side by side on the same machine, so that its other work slows both down: one over twenty
servers of which one becomes a black hole as soon as it is in use, one over nineteen. What they need is read
from the servers' own logs.
"""

from contextlib import ExitStack

import pytest

from tests.e2e.harness import (
    audit,
    report,
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
GOOD, LIMIT, DELAY_S = 19, 6, 0.2
ROWS = 50_000 if FULL else 4_000
LONGER_MAX = 1.05 if FULL else 1.1
"""In a run of eight seconds one unlucky moment at its end, such as a probe's, is a twentieth of it."""
FAULTS_MAX = 40
"""Three in a row bench it, and then it is probed; some were under way when it was benched."""


class Refusing:
    """A server that went down: nobody listens there any more."""

    faults = frozenset({"unreachable", "lost"})

    def __init__(self, stack, folder):
        self._fleet = stack.enter_context(servers(folder, 2))
        self.url = self._fleet.urls[1]

    def open(self):
        self._fleet.mode(1, "down", through=0)


class Resetting:
    """It accepts connections, says that it is well, and resets whatever asks it for an answer."""

    faults = frozenset({"lost"})

    def __init__(self, stack, folder):
        fleet = stack.enter_context(servers(folder, 1))
        self._proxy = stack.enter_context(TcpProxy(fleet.ports[0]))
        self.url = self._proxy.url

    def open(self):
        self._proxy.reset_posts = True


def makespan_s(fleet):
    visits = without_probes(fleet.visits())
    return max(visit["end_s"] for visit in visits) - visits[0]["arrival_s"]


@pytest.mark.timeout(900 if FULL else 120)
@pytest.mark.parametrize("hole", [Refusing, *([Resetting] if SOAK > 1 else [])])
def test_with_one_black_hole_among_twenty_nothing_is_given_up_and_nineteen_do_not_wait(tmp_path, hole):
    texts = [f"Row {place}. <<tokens=5 delay={DELAY_S}>>" for place in range(ROWS)]
    source = write_prompts(tmp_path / "in.jsonl", texts)
    outs = {name: tmp_path / name / "out" for name in ("twenty", "nineteen")}
    with ExitStack() as stack:
        fleets, runs = {}, {}
        for name, out in outs.items():
            out.parent.mkdir()
            fleets[name] = stack.enter_context(servers(out.parent, GOOD))
        (tmp_path / "bad").mkdir()
        bad = hole(stack, tmp_path / "bad")
        for name, out in outs.items():
            command = ["run", "--prompts", source, "--concurrency", LIMIT, "--out", out, "--quiet"]
            command += ["--servers", bad.url] if name == "twenty" else []
            command += ["--servers", fleets[name].address]
            runs[name] = stack.enter_context(running(*command, err=out.parent / "run.err"))
        wait_for(lambda: len(saved(outs["twenty"])) > 40, "answers")
        bad.open()
        codes = {name: run.wait(400) for name, run in runs.items()}
        for fleet in fleets.values():
            fleet.stop()
    needed_s = {name: makespan_s(fleet) for name, fleet in fleets.items()}
    records = audit(outs["twenty"], texts)
    shown = report(outs["twenty"])["servers"][0]
    print(needed_s, shown["faults"])

    assert codes == {"twenty": 0, "nineteen": 0}, {name: run.err for name, run in runs.items()}
    assert (outs["twenty"] / "failed.jsonl").read_bytes() == b""
    assert report(outs["twenty"])["failed"] == 0
    assert shown["url"] == bad.url
    assert shown["answers"] < 100
    assert set(shown["faults"]) <= bad.faults
    assert 3 <= sum(shown["faults"].values()) < FAULTS_MAX
    assert sum(record["attempts"] for record in records.values()) < ROWS + FAULTS_MAX
    assert needed_s["twenty"] < LONGER_MAX * needed_s["nineteen"]
