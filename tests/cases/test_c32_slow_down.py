"""A store that asks for fewer requests holds nobody up, and no object is put more often than is said."""

from tests.e2e.harness import genpipe, report, run_command, servers, write_prompts
from tests.e2e.offsite import Stored, environment, options
from tests.s3.proxy import FaultProxy

ROWS = 300
TEXTS = [f"Row {place} on a slow day." for place in range(ROWS)]


def test_a_third_of_all_puts_turned_away_for_a_while_delays_uploads_alone(tmp_path, moto):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    with FaultProxy(moto.url) as proxy, servers(tmp_path, 2, orders=False) as fleet:
        place = moto.place("slow", endpoint_url=proxy.url)
        proxy.answer("SlowDown", method="PUT", key=r"/(shards|commits|tail)/", share=0.3)
        ended = genpipe(
            *run_command(fleet, source, out, 8, *options(place, uploads=8, progress_s=0.1)),
            "--set=output.shard_records=5",
            env=environment(moto),
            timeout_s=120,
        )
        often = proxy.most_puts_of_a_key(key=r"/progress\.json", within_s=0.9)
        # A lease is renewed and a tail is put by the clock, whatever the store says.
        commits = proxy.count("PUT", r"/commits/")
    state = report(out)
    stored = Stored(moto, place)

    assert ended.code == 0, ended.err
    stored.assert_whole(TEXTS)
    assert len(stored.commits) == ROWS / 5
    assert commits > ROWS / 5
    assert state["s3"]["troubles"]["slow_down"] > 20
    assert state["s3"]["retries"] >= state["s3"]["troubles"]["slow_down"]
    assert often <= 1
