"""Work follows speed, and no server is given more than its limit, not even a slow one at the end."""

from collections import Counter

from tests.e2e.harness import (
    assert_within_limit,
    audit,
    genpipe,
    report,
    running,
    servers,
    wait_for,
    without_probes,
    write_prompts,
)

LIMIT = 8


def test_a_slow_server_gets_less_and_does_not_hold_up_the_end(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay={0.05 + 0.01 * (place % 11)}>>" for place in range(800)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 4) as fleet:
        fleet.mode(0, "slow", value=8)
        ended = genpipe(
            *("run", "--prompts", source, "--servers", fleet.address, "--concurrency", LIMIT, "--out", out),
            *("--set", "start.ramp_s=0"),
        )
        fleet.stop()
        visits = without_probes(fleet.visits())
    answers = Counter(visit["port"] for visit in visits if visit["status"] == 200)
    fast = [answers[port] for port in fleet.ports[1:]]
    wall_s = max(visit["end_s"] for visit in visits if visit["status"] == 200) - visits[0]["arrival_s"]
    # From here on every row has been asked.
    asked_last_s = max(visit["arrival_s"] for visit in visits if visit["attempt"] == 1)
    left = [visit for visit in visits if visit["port"] == fleet.ports[0] and visit["end_s"] > asked_last_s]

    assert ended.code == 0, ended.err
    audit(out, texts)
    assert_within_limit(fleet, LIMIT)
    assert max(fast) < 1.3 * min(fast)
    assert 0.05 < answers[fleet.ports[0]] / (sum(fast) / 3) < 0.25
    # At the end the slow one has what fits into it, and nothing that waits behind that.
    assert len(left) <= LIMIT
    # 800 rows of 0.1 s over 24 fast slots and 8 that count an eighth are 3.2 s; the slow tail is 1.2 s.
    assert wall_s < 1.2 * 3.2 + 1.2


def test_a_server_that_is_absent_at_the_start_is_reported_and_the_run_goes_on(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay=0.1>>" for place in range(400)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 4) as fleet:
        fleet.mode(3, "down", through=0)
        command = [
            "run",
            "--prompts",
            source,
            "--servers",
            fleet.address,
            "--concurrency",
            LIMIT,
            "--out",
            out,
        ]
        with running(*command, err=tmp_path / "run.err") as run:
            absent = wait_for(
                lambda: (
                    (out / "progress.json").exists()
                    and (state := report(out))["servers"][3]["last_error"]
                    and state["servers"]
                ),
                "the absent server to be reported",
            )
            shown = genpipe("status", out).out
            code = run.wait()
        fleet.stop()
        visits = without_probes(fleet.visits())

    assert code == 0, run.err
    audit(out, texts)
    assert (out / "failed.jsonl").read_bytes() == b""
    assert [server["state"] for server in absent[:3]] == ["up"] * 3
    assert absent[3]["state"] in ("starting", "benched")
    assert "cannot connect" in absent[3]["last_error"]
    assert f"{fleet.urls[3]}  " in shown
    assert {visit["port"] for visit in visits} == set(fleet.ports[:3])


def test_a_doubled_address_is_one_server_and_does_not_double_the_limit(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay=0.05>>" for place in range(200)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        again = f"{fleet.urls[1]}/v1/"
        ended = genpipe(
            *("run", "--prompts", source, "--servers", fleet.address, "--servers", fleet.urls[1]),
            *("--servers", again, "--concurrency", LIMIT, "--out", out, "--set=start.ramp_s=0"),
        )
        fleet.stop()
        visits = without_probes(fleet.visits())
    by_port = Counter(visit["port"] for visit in visits)

    assert ended.code == 0, ended.err
    audit(out, texts)
    assert_within_limit(fleet, LIMIT)
    assert [server["url"] for server in report(out)["servers"]] == fleet.urls
    assert max(by_port.values()) < 1.3 * min(by_port.values())
