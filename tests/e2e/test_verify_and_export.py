"""``genpipe verify`` and ``genpipe export`` on real runs: beside the driver, after a kill, and at the end."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import zstandard

from tests.e2e.harness import (
    GENPIPE,
    assert_one_error,
    audit,
    contents,
    genpipe,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)
from tests.edges.export_runs import json_rows, parquet_rows

ROWS = 120


@pytest.fixture(scope="module")
def texts():
    return [
        f"Row {place}, \u2028 and \u00e9. <<tokens=5 delay={0.05 + place % 7 / 20}>>" for place in range(ROWS)
    ]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, texts):
    """A run that was looked at while it went on, killed, looked at, and finished."""
    folder = tmp_path_factory.mktemp("run")
    source, out = write_prompts(folder / "in.jsonl", texts), folder / "out"
    seen: dict[str, Any] = {}
    with servers(folder, 2) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 4, "--out", out]
        command += ["--set", "output.shard_records=10"]
        with running(*command, err=folder / "1.err") as run:
            wait_for(lambda: len(saved(out)) >= 15, "the first answers")
            # However slow the machine is: the run must outlast what follows, and still go on.
            for server in (0, 1):
                fleet.mode(server, "slow", value=40)
            seen["live"] = [genpipe("verify", out, "--json") for _ in range(3)]
            seen["live export"] = genpipe("export", out, folder / "live.jsonl")
            seen["live repair"] = genpipe("verify", out, "--repair")
            assert not run.over
            run.kill()
        before = contents(out)
        seen["killed"] = genpipe("verify", out)
        seen["killed export"] = genpipe("export", out, folder / "killed.jsonl")
        seen["untouched"] = contents(out) == before
        seen["killed records"] = saved(out)
        for server in (0, 1):
            fleet.mode(server, "slow", value=1)
        seen["again"] = genpipe(*command)
    return folder, out, seen


def indices_in(path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_bytes().split(b"\n")[:-1]]


def test_beside_a_live_driver_all_is_sound_and_repair_is_refused(finished_run):
    _, out, seen = finished_run
    counts = [json.loads(ended.out)["records"] for ended in seen["live"]]

    for ended in seen["live"]:
        found = json.loads(ended.out)
        assert (ended.code, found["sound"], found["driver_at_work"]) == (0, True, True), ended.out
    assert counts == sorted(counts)
    assert counts[0] >= 15
    assert_one_error(seen["live repair"], 75, str(out), "in use by another driver")


def test_an_export_of_a_run_that_goes_on_or_was_killed_has_all_that_is_durable(finished_run):
    folder, _, seen = finished_run

    for name in ("live", "killed"):
        ended, indices = seen[f"{name} export"], indices_in(folder / f"{name}.jsonl")
        assert ended.code == 0, ended.err
        assert indices == sorted(set(indices))
        assert ended.err == f"genpipe: {len(indices)} of {ROWS} records exported\n"
    assert set(indices) == set(seen["killed records"])
    assert seen["untouched"]


def test_a_killed_run_has_lost_nothing_and_a_finished_one_is_sound(finished_run, texts):
    _, out, seen = finished_run
    ended = genpipe("verify", out)

    assert "a driver is at work" not in seen["killed"].out
    assert seen["killed"].code == 0, seen["killed"].out
    assert seen["again"].code == 0, seen["again"].err
    audit(out, texts)
    assert (ended.code, ended.err) == (0, "")
    assert f"sound, {ROWS // 10} shards, {ROWS} records" in ended.out


def test_the_export_is_the_shards_lines_in_order_without_the_checksum(finished_run, tmp_path):
    _, out, _ = finished_run
    before = contents(out)
    ended = genpipe("export", out, tmp_path / "all.jsonl")
    piped = subprocess.run([*GENPIPE, "export", str(out), "-"], capture_output=True, timeout=60)
    stored = [line for path in (out / "shards").iterdir() for line in path.read_bytes().split(b"\n")[:-1]]
    stored.sort(key=lambda line: json.loads(line)["index"])
    wanted = b"".join(line[: -len(b',"_c":"12345678"}')] + b"}\n" for line in stored)

    assert (ended.code, ended.out) == (0, "")
    assert (tmp_path / "all.jsonl").read_bytes() == wanted == piped.stdout
    assert indices_in(tmp_path / "all.jsonl") == list(range(ROWS))
    assert contents(out) == before
    assert_one_error(genpipe("export", out, tmp_path / "all.jsonl"), 2, "exists", "--force")
    assert genpipe("export", out, tmp_path / "all.jsonl", "--force").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "all.jsonl.md"]


def test_each_format_of_a_real_run_and_its_card(finished_run, tmp_path, texts):
    _, out, _ = finished_run
    for name in ("openai.parquet", "openai.jsonl", "sharegpt.jsonl.zst", "prompt.jsonl.gz"):
        ended = genpipe("export", out, tmp_path / name, "--format", name.split(".")[0])
        assert (ended.code, ended.out, ended.err) == (0, "", f"genpipe: {ROWS} of {ROWS} records exported\n")
    rows = parquet_rows(tmp_path / "openai.parquet")
    assert rows == json_rows(tmp_path / "openai.jsonl")
    assert [row["id"] for row in rows] == [f"p-{place}" for place in range(ROWS)]
    assert [row["messages"][0] for row in rows] == [{"role": "user", "content": text} for text in texts]
    assert all(row["messages"][1]["content"] for row in rows)
    turns = [json.loads(line) for line in unpacked(tmp_path / "sharegpt.jsonl.zst")]
    assert [row["conversations"] for row in turns] == [row["messages"] for row in rows]
    packed = gzip.decompress((tmp_path / "prompt.jsonl.gz").read_bytes())
    pairs = [json.loads(line) for line in packed.split(b"\n")[:-1]]
    assert [[*row["prompt"], *row["completion"]] for row in pairs] == [row["messages"] for row in rows]
    card = (tmp_path / "openai.parquet.md").read_text()
    assert f"{ROWS} rows of the format `openai`" in card
    assert f"| prompts of the run | {ROWS} |" in card
    assert f"| `stop` | {ROWS} (100 %) |" in card


def unpacked(path):
    with zstandard.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return list(file)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "csv"], "--format csv: unknown; write one of raw, openai, sharegpt, prompt"),
        (["--without", "cut,odd"], "--without odd: unknown; write one of empty, cut, looping"),
        (["--token-ids"], "--token-ids is for other formats than raw"),
        (["--card", "x.md", "--no-card"], "--card and --no-card: keep one of them"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_is_read(finished_run, tmp_path, options, said):
    assert_one_error(genpipe("export", finished_run[1], tmp_path / "x.jsonl", *options), 2, said)
    assert list(tmp_path.iterdir()) == []


def test_options_of_an_export_reach_it(finished_run, tmp_path):
    out, file = finished_run[1], tmp_path / "x.jsonl"
    ended = genpipe("export", out, file, "--only", "cut", "--only", "empty", "--no-card")
    assert ended.err == f"genpipe: 0 of {ROWS} records exported, {ROWS} left out (not flagged cut or empty)\n"
    assert (ended.code, file.read_bytes()) == (0, b"")
    ended = genpipe("export", out, "-", "--format", "prompt", "--token-ids", "--card", tmp_path / "card.md")
    assert (ended.code, ended.out) == (2, "")
    assert "--token-ids: this run did not begin with request.token_ids=true" in ended.err
    ended = genpipe("export", out, "-", "--only", "cut", "--card", tmp_path / "card.md")
    assert (ended.code, ended.out) == (0, "")
    assert "# `stdout`" in (tmp_path / "card.md").read_text()
    ended = genpipe(
        "export", out, file, "--without", "cut", "--reasoning", "drop", "--format", "openai", "--force"
    )
    assert ended.code == 0
    assert "Reasoning was left out." in (tmp_path / "x.jsonl.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["card.md", "x.jsonl", "x.jsonl.md"]


def copied(out, tmp_path):
    subprocess.run(["/bin/cp", "-r", str(out), str(tmp_path / "run")], check=True)
    return tmp_path / "run"


def test_damage_is_told_by_both_and_repaired_and_the_next_start_fills_the_gap(finished_run, tmp_path):
    out = copied(finished_run[1], tmp_path)
    shard = out / "shards" / "part-000004.jsonl"
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes().replace(b"echo ", b"Echo ", 1))
    found, exported = genpipe("verify", out), genpipe("export", out, tmp_path / "1.jsonl")
    repaired, after = genpipe("verify", out, "--repair"), genpipe("verify", out)

    assert found.code == 1
    assert "problem: shards/part-000004.jsonl: IS DAMAGED" in found.out
    assert "NOT SOUND" in found.out.splitlines()[-1]
    assert exported.code == 1
    assert f"{shard} holds" in exported.err
    assert "--repair" in exported.err
    assert len(indices_in(tmp_path / "1.jsonl")) == ROWS - 1
    assert repaired.code == after.code == 0, repaired.out + repaired.err
    assert any(line.startswith("done: ") and "DAMAGED" in line for line in repaired.out.splitlines())
    assert shard.stat().st_mode & 0o222 == 0
    assert genpipe("export", out, tmp_path / "2.jsonl").code == 0


def test_what_is_no_run_folder_is_a_mistake_of_the_command(finished_run, tmp_path):
    out = copied(finished_run[1], tmp_path)
    (out / "run.json").write_text("{")

    for command in (["verify", out], ["verify", out, "--repair"], ["export", out, tmp_path / "x"]):
        assert_one_error(genpipe(*command), 2, "run.json", "is damaged")
    assert_one_error(genpipe("verify", tmp_path / "nowhere"), 2, "holds no run")


def test_a_reader_that_goes_away_and_a_full_disk_behind_stdout(finished_run, tmp_path):
    command = [*GENPIPE, "export", str(finished_run[1]), "-"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as gone:
        assert gone.stdout is not None
        assert gone.stderr is not None
        gone.stdout.close()
        told = gone.stderr.read()
    with open("/dev/full", "wb") as full:
        refused = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, timeout=60)

    assert (gone.returncode, told) == (0, b"")
    assert refused.returncode == 73
    assert b"cannot write stdout: No space left on device" in refused.stderr
    assert refused.stderr.count(b"\n") == 1
    assert list(tmp_path.iterdir()) == []


SLOW = """
import os, sys, time
real = os.pread
def slow(*arguments):
    print("reading", file=sys.stderr, flush=True)
    # In pieces: a signal that comes just before a sleep begins is heard when it ends.
    for _ in range(600):
        time.sleep(0.1)
    return real(*arguments)
os.pread = slow
from genpipe.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_that_is_stopped_leaves_nothing_behind(finished_run, tmp_path, number):
    command = [sys.executable, "-c", SLOW, "export", finished_run[1], tmp_path / "all.jsonl"]
    # A shell may have had its background jobs ignore SIGINT, and that is inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stderr is not None
        assert b"reading" in process.stderr.readline()
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        began_s = time.monotonic()
        told = process.stderr.read()

    assert process.returncode == 128 + number
    assert time.monotonic() - began_s < 20
    assert b"Traceback" not in told
    assert told.endswith(b"genpipe: the export was stopped: nothing was written\n")
    assert list(tmp_path.iterdir()) == []
