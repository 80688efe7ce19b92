"""No pool of connections stands below the concurrency that was asked for."""

import pytest

from tests.e2e.harness import (
    assert_within_limit,
    audit,
    genpipe,
    mean_in_flight,
    progress,
    servers,
    write_prompts,
)

LIMIT = 64


@pytest.mark.slow
def test_four_servers_hold_64_requests_each_until_the_tail(tmp_path):
    texts = [f"Row {place}. <<tokens=5 delay=1>>" for place in range(2000)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 4) as fleet:
        ended = genpipe(
            "run", "--prompts", source, "--servers", fleet.address, "--concurrency", LIMIT, "--out", out
        )
        fleet.stop()
        visits = fleet.visits()
    began_s, last_s = visits[0]["arrival_s"], visits[-1]["arrival_s"]
    wall_s = max(visit["end_s"] for visit in visits) - began_s

    assert ended.code == 0, ended.err
    audit(out, texts)
    assert_within_limit(fleet, LIMIT)
    for port in fleet.ports:
        mine = [visit for visit in visits if visit["port"] == port]
        assert max(visit["in_flight"] for visit in mine) == LIMIT
        assert mean_in_flight(mine, began_s + 1.5, last_s) > 0.95 * LIMIT
    # 2,000 rows of a second over 256 slots are 7.8 s; slots open over the first second.
    assert wall_s < 1.2 * (2000 / 256 + 1)
    shares = (progress(out) or {})["slot_time"]["whole"]
    assert shares["overhead"] + shares["dispatch"] < 0.05
