"""Keys that expire in mid-run are fetched anew, a clock that is off is waited for, and nothing is dropped."""

import json
import signal
import sys

import pytest

from tests.e2e.harness import (
    genpipe,
    progress,
    report,
    row_of,
    run_command,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)
from tests.e2e.offsite import Stored, connection, environment, options
from tests.s3.proxy import FaultProxy

OLD, NEW = "AKIAOLDOLDOLDOLDOLD1", "AKIANEWNEWNEWNEWNEW1"
ROWS = 600
TEXTS = [f"Row {place} in the hour of the expiry." for place in range(ROWS)]
SPEED = ("--tokens-per-s", "100", "--tokens-per-s-full", "800", "--max-running", "8")
SMALL = "--set=output.shard_records=50"


def with_keys_from(environment, folder, how):
    """Keys out of a file that changes: read by a program, or by the library itself."""
    folder.mkdir()
    config, credentials, keys = folder / "config", folder / "credentials", folder / "keys.json"
    env = {
        name: value
        for name, value in environment.items()
        if name not in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    }
    if how == "credential_process":
        program = folder / "keys.py"
        program.write_text(f"print(open({str(keys)!r}).read())\n")
        config.write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")
        credentials.touch()
    else:
        config.touch()

    def use(key_id):
        keys.write_text(json.dumps({"Version": 1, "AccessKeyId": key_id, "SecretAccessKey": "x" * 40}))
        if how == "file":
            credentials.write_text(
                f"[default]\naws_access_key_id = {key_id}\naws_secret_access_key = {'x' * 40}\n"
            )

    return {**env, "AWS_CONFIG_FILE": str(config), "AWS_SHARED_CREDENTIALS_FILE": str(credentials)}, use


@pytest.mark.parametrize("how", ["credential_process", "file"])
def test_expired_keys_are_fetched_anew_and_what_waited_is_uploaded(tmp_path, moto, how):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS), tmp_path / "out"
    env, use = with_keys_from(environment(moto), tmp_path / "aws", how)
    use(OLD)
    with FaultProxy(moto.url) as proxy, servers(tmp_path, 2, *SPEED, orders=False) as fleet:
        place = moto.place(f"expired-{how}", endpoint_url=proxy.url)
        command = [*run_command(fleet, source, out, 8, *options(place)), SMALL]
        with running(*command, err=tmp_path / "run.err", env=env) as run:
            wait_for(lambda: run.over or proxy.count("PUT", r"/commits/") >= 3, "three commits")
            proxy.answer("ExpiredToken", when=lambda request: request.access_key == OLD)
            done = len(saved(out))
            state = wait_for(
                lambda: (
                    run.over or ((now := progress(out)) and now["s3"]["troubles"].get("credentials") and now)
                ),
                "trouble with the keys",
            )
            # Generation goes on meanwhile.
            wait_for(lambda: run.over or len(saved(out)) >= done + 100, "a hundred records more")
            assert not run.over, run.err
            use(NEW)
            code = run.wait()
    stored = Stored(moto, place)

    assert code == 0, run.err
    assert "the keys have expired" in state["s3"]["last_error"]
    stored.assert_whole(TEXTS)
    assert OLD not in run.err
    assert "x" * 40 not in run.err + (out / "progress.json").read_text() + (out / "s3.json").read_text()


def test_a_clock_that_is_off_for_a_while_is_told_and_waited_for(tmp_path, moto):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS[:200]), tmp_path / "out"
    with FaultProxy(moto.url) as proxy, servers(tmp_path, 2, orders=False) as fleet:
        place = moto.place("skewed", endpoint_url=proxy.url)
        proxy.answer("RequestTimeTooSkewed", method="PUT", key=r"/shards/", times=2)
        ended = genpipe(*run_command(fleet, source, out, 8, *options(place)), SMALL, env=environment(moto))
    state = report(out)

    assert ended.code == 0, ended.err
    assert state["s3"]["troubles"]["clock"] == 2
    Stored(moto, place).assert_whole(TEXTS[:200])


def test_uploads_that_fail_to_the_end_are_loud_and_a_later_start_makes_up_for_them(tmp_path, moto):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS[:200]), tmp_path / "out"
    with FaultProxy(moto.url) as proxy, servers(tmp_path, 2, orders=False) as fleet:
        place = moto.place("failed", endpoint_url=proxy.url)
        proxy.answer("ExpiredToken", method="PUT", key=r"/shards/")
        command = [*run_command(fleet, source, out, 8, *options(place, drain_s=3)), SMALL]
        first = genpipe(*command, env=environment(moto))
        state, kept = report(out), saved(out)
        proxy.clear()
        # Whoever looks meanwhile is told that S3 has not all of it.
        looks = [
            genpipe(*look, env=environment(moto))
            for look in (
                ("status", out),
                ("verify", out),
                ("verify", place.uri, *connection(place)),
                ("export", place.uri, tmp_path / "all.jsonl", *connection(place)),
            )
        ]
        fleet.stop()
        # No server is there any more, and none is needed.
        second = genpipe(*command, env=environment(moto))
        asked = [visit["row"] for visit in fleet.visits()]
    stored = Stored(moto, place)

    assert first.code == 1, first.err
    last_line = first.err.splitlines()[-1]
    for word in ("200 of 200 prompts answered", "4 shards", f"NOT in {place.uri}", "the keys have expired"):
        assert word in last_line, last_line
    assert (state["state"], state["s3"]["waiting"], len(kept)) == ("done", 4, 200)
    # The wait for S3 is in no rate.
    assert state["rate_per_sec_segment"] > 200 / (state["elapsed_s"] - 2.5)
    assert [look.code for look in looks] == [0, 1, 1, 1]
    assert "4 are NOT THERE: the same command uploads them" in looks[0].out
    assert "lacks 200 records of the 200" in looks[2].out
    assert "lacks 200 records of the 200" in looks[3].err
    assert second.code == 0, second.err
    assert sorted(asked) == sorted(map(row_of, TEXTS[:200]))
    stored.assert_whole(TEXTS[:200])
    assert report(out)["s3"]["waiting"] == 0


def test_a_signal_ends_the_wait_for_uploads_and_says_what_is_missing(tmp_path, moto):
    source, out = write_prompts(tmp_path / "in.jsonl", TEXTS[:100]), tmp_path / "out"
    with FaultProxy(moto.url) as proxy, servers(tmp_path, 2, orders=False) as fleet:
        place = moto.place("waiting", endpoint_url=proxy.url)
        proxy.answer("AccessDenied", method="PUT", key=r"/shards/")
        command = [*run_command(fleet, source, out, 8, *options(place, stop_s=0.5)), SMALL]
        with running(*command, err=tmp_path / "run.err", env=environment(moto)) as run:
            wait_for(
                lambda: run.over or ((now := progress(out)) and now["state"] == "draining"), "the uploads"
            )
            run.send(signal.SIGTERM)
            code = run.wait(20)

    assert code == 143, run.err
    assert "2 shards" in run.err.splitlines()[-1]
    assert "AccessDenied" in run.err.splitlines()[-1]
