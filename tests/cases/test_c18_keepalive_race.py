"""A connection that the server closes as a request goes out costs no row and no attempt, and is counted."""

import http.client
import json
import signal
import time
from collections import Counter

from tests.e2e.harness import (
    audit,
    genpipe,
    report,
    row_of,
    run_command,
    running,
    servers,
    wait_for,
    without_probes,
    write_prompts,
)
from tests.e2e.tcp_proxy import TcpProxy
from tests.faults.soak import SOAK

ROWS, LIMIT = 300, 50
KEEP_S = 2.0 if SOAK > 1 else 1.0
"""How long the server keeps idle connections."""


def run(source, url, out, *options):
    return genpipe(
        *(
            "run",
            "--prompts",
            source,
            "--servers",
            url,
            "--concurrency",
            LIMIT,
            "--out",
            out,
            "--no-hedge",
            *options,
        ),
        timeout_s=110,
    )


def assert_nothing_was_charged(code, out, texts, visits):
    """Every row answered at its first attempt, and the server saw each once."""
    records = audit(out, texts)
    (server,) = report(out)["servers"]

    assert code == 0
    assert server["faults"] == {}, server["last_error"]
    assert {record["attempts"] for record in records.values()} == {1}
    assert Counter(visit["row"] for visit in visits) == Counter(row_of(text) for text in texts)


def in_flight_at(fleet, server):
    """Requests that a server has now, by its own count."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.ports[server], timeout=10)
    try:
        connection.request("GET", "/_fake/stats")
        stats = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return stats["ports"][server]["in_flight"]


def test_connections_closed_just_as_they_are_used_again_are_no_fault_of_anybody(tmp_path):
    """Each connection is closed as its second request comes, which is the race lost every time."""
    texts = [f"Row {place}. <<delay={0.01 * (place % 7)}>>" for place in range(ROWS)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet, TcpProxy(fleet.ports[0]) as proxy:
        proxy.close_reused = True
        ended = run(source, proxy.url, out)
        fleet.stop()
        visits = without_probes(fleet.visits())
        closed = proxy.closed
    (server,) = report(out)["servers"]

    assert_nothing_was_charged(ended.code, out, texts, visits)
    assert closed > ROWS / 3
    # What genpipe asks beside the rows may meet a closed connection too.
    assert closed - 3 <= server["reconnects"] <= closed


def test_lulls_about_as_long_as_the_server_keeps_connections_cost_no_row(tmp_path):
    """The program stands still for 0.9 to 1.2 times as long as its idle connections live, again and again."""
    texts = [f"Row {place}. <<delay={0.02 + 0.05 * (place % 7)}>>" for place in range(3 * ROWS)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        fleet.mode(0, "keepalive", value=KEEP_S)
        with running(*run_command(fleet, source, out, LIMIT, "--no-hedge"), err=tmp_path / "run.err") as run:
            for share in (0.9, 0.95, 1.0, 1.05, 1.1, 1.2):
                wait_for(lambda: in_flight_at(fleet, 0) > LIMIT / 2, "requests in flight")
                run.send(signal.SIGSTOP)
                time.sleep(share * KEEP_S)
                run.send(signal.SIGCONT)
                time.sleep(0.1)
            assert not run.over
            code = run.wait()
        fleet.stop()
        visits = without_probes(fleet.visits())

    assert_nothing_was_charged(code, out, texts, visits)


def test_a_server_that_closes_after_each_reply_costs_nothing(tmp_path):
    texts = [f"Row {place}. <<delay={0.01 * (place % 7)}>>" for place in range(ROWS)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        fleet.mode(0, "keepalive", value=0)
        ended = run(source, fleet.address, out)
        fleet.stop()
        visits = without_probes(fleet.visits())

    assert_nothing_was_charged(ended.code, out, texts, visits)
    assert report(out)["servers"][0]["reconnects"] == 0
