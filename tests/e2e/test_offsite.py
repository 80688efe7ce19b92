"""Runs with S3 beside them: races, machines that wake up, outages, stops, and looks from elsewhere."""

import json
import shutil
import signal
import time

import pytest

from tests.e2e.harness import (
    assert_one_error,
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
from tests.faults.mounts import CannotMountError, in_memory
from tests.s3.proxy import FaultProxy

SPEED = ("--tokens-per-s", "200", "--tokens-per-s-full", "1600", "--max-running", "8")
"""Sixteen tokens an answer, eight at once: a hundred answers a second of each server."""
SMALL = "--set=output.shard_records=20"


def texts(count, what="far away"):
    return [f"Row {place} {what}." for place in range(count)]


def command(fleet, source, out, place, **settings):
    return [*run_command(fleet, source, out, 8, *options(place, **settings)), SMALL]


def assert_all_there(server, place, rows):
    stored = Stored(server, place)
    stored.assert_whole(rows)
    return stored


def last_line(text):
    return text.splitlines()[-1]


# ---- one prefix, several drivers ----


@pytest.mark.timeout(120)
def test_of_two_drivers_that_race_for_one_prefix_one_wins_and_the_other_is_told_who(tmp_path, weed):
    rows, env = texts(600, "of the race"), environment(weed)
    source = write_prompts(tmp_path / "in.jsonl", rows)
    for turn in range(2):
        place = weed.place(f"race-{turn}")
        (tmp_path / f"{turn}").mkdir()
        outs = [tmp_path / f"{turn}" / name for name in ("one", "two")]
        with (
            servers(tmp_path / f"{turn}", 2, *SPEED, orders=False) as fleet,
            running(*command(fleet, source, outs[0], place), err=tmp_path / f"{turn}-0", env=env) as one,
            running(*command(fleet, source, outs[1], place), err=tmp_path / f"{turn}-1", env=env) as two,
        ):
            codes = {one.wait(): one, two.wait(): two}
        assert sorted(codes) == [0, 75], (one.err, two.err)
        refused = last_line(codes[75].err)
        assert refused.startswith("genpipe: error: ")
        assert place.uri in refused
        assert "pid" in refused
        assert str(codes[0].pid) in refused
        assert_all_there(weed, place, rows)


@pytest.mark.timeout(120)
def test_a_machine_that_wakes_up_after_another_went_on_is_fenced(tmp_path, weed):
    rows, env, place = texts(900, "that sleeps"), environment(weed), weed.place("sleeper")
    source, old, new = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "old", tmp_path / "new"
    with servers(tmp_path, 2, *SPEED, orders=False) as fleet:
        with running(*command(fleet, source, old, place), err=tmp_path / "old.err", env=env) as sleeper:
            wait_for(lambda: sleeper.over or len(saved(old)) >= 200, "two hundred records")
            sleeper.send(signal.SIGSTOP)
            went_on = genpipe(*command(fleet, source, new, place), env=env)
            whole = assert_all_there(weed, place, rows)
            sleeper.send(signal.SIGCONT)
            code = sleeper.wait(30)
        assert went_on.code == 0, went_on.err
        assert code == 75, sleeper.err
        assert place.uri in last_line(sleeper.err)
        assert report(old)["state"] == "failed"
        # It put nothing more: not one object is new or another.
        assert Stored(weed, place).commits == whole.commits

        # The same folder again: behind, and told so; mended, it has nothing to add and nothing is asked.
        again = genpipe(*command(fleet, source, old, place), env=env)
        assert again.code == 75, again.err
        assert f"genpipe verify {old} --repair" in last_line(again.err)
        mended = genpipe("verify", old, "--repair", env=env)
        assert mended.code == 0, mended.out
        asked_before = len(fleet.visits_until_now())
        at_last = genpipe(*command(fleet, source, old, place), env=env)
        assert at_last.code == 0, at_last.err
        assert len(fleet.visits_until_now()) == asked_before
    assert_all_there(weed, place, rows)


@pytest.mark.timeout(120)
def test_a_store_that_ignores_conditions_is_told_of_and_a_second_driver_refused(tmp_path, rclone):
    rows, env, place = texts(500, "of the weak store"), environment(rclone), rclone.place("weak")
    source = write_prompts(tmp_path / "in.jsonl", rows)
    with servers(tmp_path, 2, *SPEED, orders=False) as fleet:
        one = command(fleet, source, tmp_path / "one", place)
        with running(*one, err=tmp_path / "one.err", env=env) as first:
            wait_for(lambda: first.over or len(saved(tmp_path / "one")) >= 50, "fifty records")
            fleet.pause()  # So that the first is still there, however slow this machine is.
            second = genpipe(*command(fleet, source, tmp_path / "two", place), env=env)
            assert not first.over, first.err
            fleet.go_on()
            code = first.wait()
    assert code == 0, first.err
    assert "ignores conditions on writes" in first.err
    assert second.code == 75, second.err
    assert str(first.pid) in last_line(second.err)
    assert_all_there(rclone, place, rows)
    assert report(tmp_path / "one")["s3"]["conditional"] is False


@pytest.mark.timeout(120)
def test_a_copy_of_a_live_runs_folder_is_turned_away_and_hurts_nobody(tmp_path, weed):
    rows, env, place = texts(1200, "that was copied"), environment(weed), weed.place("copied")
    source, out, copy = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out", tmp_path / "copy"
    with (
        servers(tmp_path, 2, *SPEED, orders=False) as fleet,
        running(*command(fleet, source, out, place), err=tmp_path / "1.err", env=env) as first,
    ):
        wait_for(lambda: first.over or len(saved(out)) >= 60, "sixty records")
        shutil.copytree(out, copy)
        second = genpipe(*command(fleet, source, copy, place), env=env)
        code = first.wait()
    assert second.code == 75, second.err
    assert str(first.pid) in last_line(second.err)
    assert code == 0, first.err
    assert_all_there(weed, place, rows)


@pytest.mark.timeout(120)
def test_a_run_that_waits_for_servers_keeps_its_prefix_and_uploads_what_is_left(tmp_path, weed):
    rows, env, place = texts(120, "before the servers"), environment(weed), weed.place("no-servers")
    source, out = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out"
    more = write_prompts(tmp_path / "more.jsonl", texts(200, "before the servers"))
    with servers(tmp_path, 1, orders=False) as fleet:
        first = genpipe(*run_command(fleet, source, out, 8), SMALL, env=env)
        fleet.stop()
        with running(*command(fleet, more, out, place), err=tmp_path / "1.err", env=env) as waiting:
            wait_for(lambda: waiting.over or len(Stored(weed, place).keys("w00/commits/")) == 6, "uploads")
            second = genpipe(*command(fleet, more, tmp_path / "two", place), env=env)
            assert not waiting.over, waiting.err
            waiting.send(signal.SIGTERM)
            code = waiting.wait(15)
    assert first.code == 0, first.err
    assert second.code == 75, second.err
    assert code == 143, waiting.err


@pytest.mark.timeout(120)
def test_a_run_that_waits_for_servers_and_loses_its_prefix_ends_at_once(tmp_path, weed):
    rows, env, place = texts(20, "that nobody serves"), environment(weed), weed.place("lost-waiting")
    source, out = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out"
    more = write_prompts(tmp_path / "more.jsonl", texts(40, "that nobody serves"))
    with servers(tmp_path, 1, orders=False) as fleet:
        first = genpipe(*command(fleet, source, out, place), env=env)
        fleet.stop()
        with running(*command(fleet, more, out, place), err=tmp_path / "1.err", env=env) as waiting:
            held = "w00/lease.json"
            wait_for(
                lambda: waiting.over or not json.loads(Stored(weed, place).read(held))["released"], "a claim"
            )
            time.sleep(1.0)
            waiting.send(signal.SIGSTOP)
            elsewhere = command(fleet, more, tmp_path / "two", place)
            with running(*elsewhere, err=tmp_path / "2.err", env=env) as other:
                wait_for(lambda: other.over or "taken over as claim" in other.err, "the other", 20)
                waiting.send(signal.SIGCONT)
                code = waiting.wait(15)
                assert not other.over, other.err
    assert first.code == 0, first.err
    assert code == 75, waiting.err
    assert place.uri in last_line(waiting.err)


# ---- another machine ----


@pytest.mark.timeout(120)
def test_a_killed_run_goes_on_from_s3_alone_with_what_was_not_sealed(tmp_path, weed):
    rows, env, place = texts(700, "that moved"), environment(weed), weed.place("moved")
    source, lost, new = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "lost", tmp_path / "new"
    slow_shards = {"tail_s": 0.3}
    with servers(tmp_path, 2, *SPEED, orders=False) as fleet:
        big = [*command(fleet, source, lost, place, **slow_shards), "--set=output.shard_records=150"]
        with running(*big, err=tmp_path / "1.err", env=env) as run:
            wait_for(lambda: run.over or len(saved(lost)) >= 260, "a sealed shard, and most of a second")
            # What is durable here must be in a snapshot that begins after it.
            time.sleep(0.8)
            run.send(signal.SIGSTOP)
            safe = {record["index"] for record in tail_of(weed, place)} | Stored(weed, place).indices
            run.kill()
        shutil.rmtree(lost)
        killed_s = time.monotonic()
        moved = [*command(fleet, source, new, place, **slow_shards), "--set=output.shard_records=150"]
        again = genpipe(*moved, env=env)
        fleet.stop()
        later = {visit["row"] for visit in fleet.visits() if visit["arrival_s"] > killed_s}
    assert again.code == 0, again.err
    assert len(safe) > 200
    assert later == {row_of(rows[index]) for index in set(range(700)) - safe}
    assert_all_there(weed, place, rows)
    assert report(new)["segment"] == 2


def tail_of(server, place):
    """The records in the newest tail."""
    import zstandard

    from tests.edges.audit import whole_lines

    stored = Stored(server, place)
    packed = stored.read(max(stored.keys("w00/tail/")))
    return whole_lines(zstandard.ZstdDecompressor().decompress(packed, max_output_size=1 << 28))


@pytest.mark.timeout(120)
def test_another_input_on_the_new_machine_is_refused(tmp_path, weed):
    rows, env, place = texts(200, "of the first file"), environment(weed), weed.place("other-input")
    source = write_prompts(tmp_path / "in.jsonl", rows)
    with servers(tmp_path, 1, orders=False) as fleet:
        first = genpipe(*command(fleet, source, tmp_path / "one", place), env=env)
        other = write_prompts(tmp_path / "other.jsonl", texts(210, "of another file"))
        second = genpipe(*command(fleet, other, tmp_path / "two", place), env=env)
        before = Stored(weed, place)
        other_settings = genpipe(
            *command(fleet, source, tmp_path / "three", place),
            "--set=request.sampling.max_tokens=7",
            env=env,
        )
    assert first.code == 0, first.err
    assert second.code == 2, second.err
    assert "other.jsonl" in last_line(second.err)
    assert_one_error(other_settings, 2, "request.sampling.max_tokens", "not set", "7")
    assert Stored(weed, place).commits == before.commits


@pytest.mark.timeout(120)
def test_another_prefix_is_refused_where_shards_are_in_the_first_alone(tmp_path, weed):
    rows, env = texts(100, "of two prefixes"), environment(weed)
    source, moved = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "moved"
    first, other = weed.place("first-prefix"), weed.place("other-prefix")
    with servers(tmp_path, 1, orders=False) as fleet:
        ended = [genpipe(*command(fleet, source, out, first), env=env) for out in (tmp_path / "a", moved)]
        refused = genpipe(*command(fleet, source, moved, other), env=env)
        without = genpipe(*run_command(fleet, source, moved, 8), SMALL, env=env)
        # Where all of them are on disk, they are sent to the other one too.
        whole = genpipe(*command(fleet, source, tmp_path / "a", other), env=env)
        asked = len(fleet.visits_until_now())
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    assert_one_error(refused, 2, first.uri, other.uri, "5 shards", "100 records")
    assert without.code == 0, without.err
    assert f"also goes to {first.uri}" in without.err
    assert whole.code == 0, whole.err
    assert asked == len(rows)
    assert_all_there(weed, other, rows)


# ---- outages and stops ----


@pytest.mark.timeout(120)
def test_a_black_hole_holds_up_nothing_but_the_end_and_the_same_command_uploads_later(tmp_path, weed):
    rows, env = texts(600, "at a black hole"), environment(weed)
    source, out = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out"
    with FaultProxy(weed.url) as proxy, servers(tmp_path, 2, *SPEED, orders=False) as fleet:
        place = weed.place("hole", endpoint_url=proxy.url)
        with running(*command(fleet, source, out, place, drain_s=2), err=tmp_path / "1.err", env=env) as run:
            wait_for(lambda: run.over or proxy.count("PUT", r"/commits/") >= 2, "two commits")
            proxy.black_hole()
            seen = wait_for(
                lambda: run.over or ((now := progress(out)) and now["s3"]["waiting"] >= 5 and now),
                "a backlog",
            )
            looked = genpipe("status", out)
            code = run.wait(60)
        left = report(out)
        proxy.clear()
        fleet.stop()
        again = genpipe(*command(fleet, source, out, place), env=env)
    assert code == 1, run.err
    assert f"NOT in {place.uri}" in last_line(run.err)
    assert seen["rate_per_sec"] is None or seen["rate_per_sec"] > 50
    assert "wait" in looked.out
    assert place.uri in looked.out
    assert (left["state"], left["completed"]) == ("done", 600)
    assert left["s3"]["waiting"] >= 5
    assert left["s3"]["troubles"]["timeout"] >= 1
    assert again.code == 0, again.err
    assert_all_there(weed, place, rows)


@pytest.mark.timeout(120)
def test_a_run_that_ends_on_a_full_disk_says_what_is_not_in_s3_either(tmp_path, weed):
    rows, env = texts(4_000, "for a disk that is too small"), environment(weed)
    source = write_prompts(tmp_path / "in.jsonl", rows)
    try:
        disk = in_memory(tmp_path, "2m")
    except CannotMountError as error:
        pytest.skip(str(error))
    with disk as mounted, FaultProxy(weed.url) as proxy, servers(tmp_path, 2, orders=False) as fleet:
        place = weed.place("small-disk", endpoint_url=proxy.url)
        proxy.answer("AccessDenied", method="PUT", key=r"/shards/", skip=2)
        out = mounted.folder / "out"
        full = genpipe(*command(fleet, source, out, place, stop_s=1), "--set=output.disk_wait_s=1", env=env)
        state = report(out)
    assert full.code == 73, full.err
    assert f"NOT in {place.uri}" in last_line(full.err)
    assert "no room" in last_line(full.err)
    assert state["completed"] > 100
    # The prefix is free: the next driver need not wait.
    assert json.loads(Stored(weed, place).read("w00/lease.json"))["released"] is True


@pytest.mark.timeout(120)
def test_a_store_that_is_frozen_and_goes_on_later_does_no_harm(tmp_path, weed):
    rows, env, place = texts(800, "in the frost"), environment(weed), weed.place("frozen")
    source, out = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out"
    with (
        servers(tmp_path, 2, *SPEED, orders=False) as fleet,
        running(*command(fleet, source, out, place), err=tmp_path / "1.err", env=env) as run,
    ):
        wait_for(lambda: run.over or len(saved(out)) >= 100, "a hundred records")
        weed.stop()
        try:
            wait_for(lambda: run.over or len(saved(out)) >= 500, "four hundred records more")
            time.sleep(3.5)
        finally:
            weed.cont()
        code = run.wait(60)
    assert code == 0, run.err
    assert_all_there(weed, place, rows)


@pytest.mark.timeout(120)
def test_a_stop_while_uploads_are_slow_ends_in_time_and_keeps_a_snapshot(tmp_path, weed):
    rows, env = texts(900, "under a slow store"), environment(weed)
    source, out = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out"
    with FaultProxy(weed.url) as proxy, servers(tmp_path, 2, *SPEED, orders=False) as fleet:
        place = weed.place("slow-stop", endpoint_url=proxy.url, timeout_s=30)
        slow = command(fleet, source, out, place, timeout_s=30, tail_s=60, stop_s=1)
        with running(*slow, "--set=request.grace_s=0.5", err=tmp_path / "1.err", env=env) as run:
            wait_for(lambda: run.over or len(saved(out)) >= 95, "nearly a hundred records")
            proxy.delay(20, method="PUT", key=r"/shards/")
            wait_for(lambda: run.over or len(saved(out)) >= 230, "more of them")
            run.send(signal.SIGTERM)
            began_s = time.monotonic()
            code = run.wait(20)
            took_s = time.monotonic() - began_s
        err, state = run.err, report(out)
        tails = Stored(weed, place).keys("w00/tail/")
        proxy.clear()
        again = genpipe(*command(fleet, source, out, place), env=env)
    assert code == 143, err
    assert took_s < 0.5 + 1 + 3 + 1.5
    assert state["state"] == "interrupted"
    assert "NOT in" in last_line(err)
    assert tails
    assert again.code == 0, again.err
    assert_all_there(weed, place, rows)


# ---- looking from elsewhere ----


@pytest.mark.timeout(120)
def test_status_verify_and_export_read_from_s3(tmp_path, weed):
    rows, env, place = texts(300, "seen from afar"), environment(weed), weed.place("afar")
    source, out = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out"
    with (
        servers(tmp_path, 2, *SPEED, orders=False) as fleet,
        running(*command(fleet, source, out, place), err=tmp_path / "1.err", env=env) as run,
    ):
        wait_for(lambda: run.over or Stored(weed, place).keys("w00/progress.json"), "a report in S3")
        early = genpipe("status", place.uri, *connection(place), env=env)
        code = run.wait()
    # The library's own variable does as well.
    late = genpipe("status", place.uri, "--json", env={**env, "AWS_ENDPOINT_URL_S3": weed.url})
    verified = genpipe("verify", place.uri, *connection(place), env=env)
    near, far = tmp_path / "near.jsonl", tmp_path / "far.jsonl"
    ended = [
        genpipe("export", out, near, env=env),
        genpipe("export", place.uri, far, *connection(place), env=env),
    ]
    assert code == 0, run.err
    assert early.code == 0, early.err
    assert "of 300" in early.out
    state = json.loads(late.out)
    assert (state["state"], state["completed"], state["alive"]) == ("done", 300, False)
    assert verified.code == 0, verified.out + verified.err
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    assert near.read_bytes() == far.read_bytes()
    assert near.read_bytes().count(b"\n") == 300

    # A folder whose shards are in S3 alone exports them from there.
    moved = tmp_path / "moved"
    with servers(tmp_path, 1, orders=False) as fleet:
        again = genpipe(*command(fleet, source, moved, place), env=env)
    assert again.code == 0, again.err
    assert not list((moved / "shards").glob("*.jsonl"))
    from_moved = genpipe("export", moved, tmp_path / "moved.jsonl", env=env)
    assert from_moved.code == 0, from_moved.err
    assert (tmp_path / "moved.jsonl").read_bytes() == near.read_bytes()

    # What is damaged there is found.
    commit = Stored(weed, place).commits[3]
    weed.write(place.prefix + commit["key"], b"something else")
    found = genpipe("verify", place.uri, *connection(place), env=env)
    assert found.code == 1
    assert commit["key"] in found.out


@pytest.mark.timeout(120)
def test_prompts_may_be_objects(tmp_path, weed):
    rows, env, place = texts(120, "out of an object"), environment(weed), weed.place("fed")
    source, out = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out"
    weed.write("prompts/in.jsonl", source.read_bytes())
    uri = "s3://runs/prompts/in.jsonl"
    with servers(tmp_path, 1, orders=False) as fleet:
        first = genpipe(*command(fleet, uri, out, place), env=env)
        weed.delete("prompts/in.jsonl")
        second = genpipe(*command(fleet, uri, out, place), env=env)
        (copy,) = (out / "inputs").glob("*.jsonl")
        weed.write("prompts/in.jsonl", source.read_bytes().replace(b"Row 7 ", b"Row x "))
        changed = genpipe(*command(fleet, uri, out, place), env=env)
        gone = genpipe(*command(fleet, uri + ".none", tmp_path / "no", place), env=env)
    checked = genpipe("check", uri, *connection(place), env=env)
    assert first.code == 0, first.err
    assert second.code == 0, second.err
    assert f"its copy is used: {copy}" in second.err
    # The copy that the run began with is kept, and named.
    assert changed.code == 2, changed.err
    assert f"has changed; {copy} is how it was" in changed.err
    assert copy.read_bytes() == source.read_bytes()
    assert_one_error(gone, 2, uri + ".none")
    assert not (tmp_path / "no").exists()
    assert checked.code == 0, checked.err
    assert "120 records" in checked.out
    assert_all_there(weed, place, rows)


# ---- what can be wrong at the start ----


def wrong(weed, what):
    env, place, changes = environment(weed), weed.place(f"wrong-{what}"), {}
    if what == "secret":
        env = {**env, "AWS_SECRET_ACCESS_KEY": "b" * 40}
    elif what == "key":
        env = {**env, "AWS_ACCESS_KEY_ID": "AKIANOBODY0000000000"}
    elif what == "no keys":
        env = {
            name: value for name, value in env.items() if "AWS_ACCESS" not in name and "SECRET" not in name
        }
    elif what == "rubbish":
        del env["AWS_ACCESS_KEY_ID"], env["AWS_SECRET_ACCESS_KEY"]
        config = weed.folder / "rubbish-config"
        config.write_text("[default]\ncredential_process = echo []\n")
        env["AWS_CONFIG_FILE"] = str(config)
    elif what == "bucket":
        place = weed.place("x", bucket="no-such-bucket")
    elif what == "endpoint":
        place = weed.place("x", endpoint_url="http://127.0.0.1:9")
    elif what == "style":
        url = place.endpoint_url.replace("127.0.0.1", "localhost")
        place, changes = weed.place("x", endpoint_url=url), {"path_style": False}
    return env, place, changes


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("secret", ("SignatureDoesNotMatch",)),
        ("key", ("InvalidAccessKeyId",)),
        ("no keys", ("no keys are found",)),
        ("rubbish", ("the S3 library fails",)),
        ("bucket", ("no-such-bucket",)),
        ("endpoint", ("127.0.0.1:9", "--s3")),
        ("style", ("s3.path_style",)),
    ],
)
def test_a_wrong_setting_is_one_clear_line_within_seconds(tmp_path, weed, what, words):
    env, place, changes = wrong(weed, what)
    source, out = write_prompts(tmp_path / "in.jsonl", texts(5)), tmp_path / "out"
    with servers(tmp_path, 1, orders=False) as fleet:
        ended = genpipe(*command(fleet, source, out, place, **changes), env=env)
        fleet.stop()
        visits = fleet.visits()

    assert_one_error(ended, 2, *words)
    assert ended.took_s < 20
    assert visits == []
    assert not out.exists()
    assert "b" * 40 not in ended.err


def test_a_damaged_shard_is_not_uploaded_and_holds_up_no_other(tmp_path, weed):
    rows, env, place = texts(100, "with one bad shard"), environment(weed), weed.place("damaged")
    source, out = write_prompts(tmp_path / "in.jsonl", rows), tmp_path / "out"
    with servers(tmp_path, 1, orders=False) as fleet:
        first = genpipe(*run_command(fleet, source, out, 8), SMALL, env=env)
        shard = out / "shards" / "part-000002.jsonl"
        shard.chmod(0o644)
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        second = genpipe(*command(fleet, source, out, place, drain_s=3), env=env)
    assert first.code == 0, first.err
    assert second.code == 1, second.err
    assert "2" in last_line(second.err)
    assert "genpipe verify" in last_line(second.err)
    assert len(Stored(weed, place).commits) == 4
