"""Work follows speed, and no server is given more than its limit, not even a slow one at the end."""

from collections import Counter

from tests.e2e.harness import assert_within_limit, audit, genpipe, servers, write_prompts


def test_a_slow_server_gets_less_and_does_not_hold_up_the_end(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay={0.05 + 0.01 * (place % 11)}>>" for place in range(800)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 4) as fleet:
        fleet.mode(0, "slow", value=8)
        ended = genpipe(
            *("run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out),
            *("--set", "start.ramp_s=0"),
        )
        fleet.stop()
        visits = fleet.visits()
    answers = Counter(visit["port"] for visit in visits)
    fast = [answers[port] for port in fleet.ports[1:]]
    wall_s = max(visit["end_s"] for visit in visits) - visits[0]["arrival_s"]

    assert ended.code == 0, ended.err
    audit(out, texts)
    assert_within_limit(fleet, 8)
    assert max(fast) < 1.3 * min(fast)
    assert 0.05 < answers[fleet.ports[0]] / (sum(fast) / 3) < 0.25
    # 800 rows of 0.1 s over 24 fast slots and 8 that count an eighth are 3.2 s; the slow tail is 1.2 s.
    assert wall_s < 1.2 * 3.2 + 1.2
