"""Traces of what the store does, replayed on the weakest disk that POSIX allows."""

import os
import subprocess
from zlib import crc32

import pytest

from tests.e2e import harness
from tests.faults.folders import GROUPS_BEFORE, left_by_crashes
from tests.faults.lint import replay, traced
from tests.faults.store_driver import Plan
from tests.faults.traces import LINE_OPTIONS, calls
from tests.faults.weakest import TRACED, Weakest

KILLS = ("write", "fdatasync", "fsync", "rename", "openat")


def test_the_store_relies_on_nothing_that_was_not_synced(launchers, tmp_path, count):
    folder = tmp_path / "run"
    folder.mkdir()
    disk = Weakest(folder)
    ended = traced(launchers, tmp_path / "first", folder, disk)
    count("lint: acknowledgements replayed").tried(disk.acks)

    assert ended.code == 0, ended.err
    assert disk.complaints == []
    assert disk.acks == len(list(Plan().groups()))
    assert disk.acked == set(Plan().indices)


def test_a_start_relies_on_nothing_that_was_not_synced(launchers, tmp_path, count):
    left_by_crashes(tmp_path / "run", Plan())
    disk = Weakest(tmp_path / "run")
    ended = traced(launchers, tmp_path / "first", tmp_path / "run", disk)
    count("lint: acknowledgements replayed").tried(disk.acks)

    assert ended.code == 0, ended.err
    assert disk.complaints == []
    assert disk.acked == set(Plan().indices)
    assert disk.acks >= len(list(Plan().groups())) - GROUPS_BEFORE


def test_a_start_after_a_kill_trusts_nothing_that_only_memory_has(launchers, tmp_path, count):
    """What the killed driver had not synced is still unsafe for the one that finds it."""

    def killed_and_resumed(point: tuple[str, int]) -> None:
        name, at = point
        scratch = tmp_path / f"{name}-{at}"
        folder = scratch / "run"
        folder.mkdir(parents=True)
        disk = Weakest(folder)
        inject = ["-e", f"inject={name}:signal=SIGKILL:when={at}"]
        assert traced(launchers, scratch / "first", folder, disk, strace=inject).code == -9
        assert traced(launchers, scratch / "second", folder, disk).code == 0
        count("lint: acknowledgements replayed").tried(disk.acks)
        assert disk.complaints == [], point
        assert disk.acked == set(Plan().indices)

    launchers.each(killed_and_resumed, [(name, at) for name in KILLS for at in (1, 2, 3, 4, 5)])


def test_a_whole_run_relies_on_nothing_that_was_not_synced(tmp_path, count, strace):
    texts = [f"prompt {place} <<tokens=20 delay=0.01>>" for place in range(40)]
    texts[7] = "never <<status=400>>"
    source, out = harness.write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    trace = tmp_path / "trace"
    disk = Weakest(tmp_path)
    with harness.servers(tmp_path, 2) as fleet:
        command = [
            *("strace", "-f", "-o", str(trace), *LINE_OPTIONS, "-e", f"trace={TRACED}"),
            *harness.GENPIPE,
            *("run", "--prompts", source, "--servers", fleet.address, "--out", out, "--concurrency", "4"),
            *("--set", "output.shard_records=15"),
        ]
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=90,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
    replay(disk, trace)
    count("lint: records of a whole run replayed").tried(len(disk.acked))

    assert done.returncode in {0, 1}, done.stderr
    assert disk.complaints == []
    assert disk.acked == set(range(40)) - {7}
    assert (out / "progress.json").exists()


# ---- the model itself ----


def quoted(members: str) -> str:
    """A checksummed line as strace writes it."""
    line = members.encode() + b',"_c":"%08x"}\n' % crc32(members.encode())
    return '"{}", {}'.format(line.decode().replace('"', '\\"').replace("\n", "\\n"), len(line))


APPEND = "O_RDWR|O_CREAT|O_EXCL|O_APPEND|O_CLOEXEC, 0644"
RECORD = quoted('{"index":5')
FAILURE = quoted('{"index":6')
LISTED = quoted('{"seq":0,"file":"part-000000.jsonl","bytes":28,"indices":[[5,5]]')
GOOD = {
    "make shards": '1 mkdir("R/shards", 0777) = 0',
    "open folder": '1 openat(AT_FDCWD, "R", O_RDONLY|O_DIRECTORY) = 9',
    "sync folder": "1 fsync(9) = 0",
    "open shard": f'1 openat(AT_FDCWD, "R/shards/part-000000.jsonl.open", {APPEND}) = 3',
    "open shards": '1 openat(AT_FDCWD, "R/shards", O_RDONLY|O_DIRECTORY) = 8',
    "sync shards": "1 fsync(8) = 0",
    "open list": f'1 openat(AT_FDCWD, "R/.done_indices", {APPEND}) = 4',
    "open manifest": f'1 openat(AT_FDCWD, "R/manifest.jsonl", {APPEND}) = 5',
    "open failures": f'1 openat(AT_FDCWD, "R/failed.jsonl", {APPEND}) = 6',
    "sync folder again": "1 fsync(9) = 0",
    "write record": f"1 write(3, {RECORD}) = 28",
    "sync record": "1 fdatasync(3) = 0",
    "write list": r'1 write(4, "5\n", 2) = 2',
    "write failure": f"1 write(6, {FAILURE}) = 28",
    "sync failure": "1 fdatasync(6) = 0",
    "ack": r'1 write(1, "ack 5 f6\n", 9) = 9',
    "seal": '1 rename("R/shards/part-000000.jsonl.open", "R/shards/part-000000.jsonl") = 0',
    "sync shards again": "1 fsync(8) = 0",
    "sync list": "1 fdatasync(4) = 0",
    "write manifest": f"1 write(5, {LISTED}) = 107",
    "sync manifest": "1 fdatasync(5) = 0",
    "hand on": r'1 write(1, "sealed part-000000.jsonl\n", 25) = 25',
}
"""A trace of one record and one failure in which nothing is wrong, ``R`` being the run folder."""

EIO = "-1 EIO (Input/output error)"
UNSYNCED_RENAME = """
    1 openat(AT_FDCWD, "R/progress.json.tmp", O_WRONLY|O_CREAT|O_TRUNC, 0644) = 7
    1 write(7, "{}", 2) = 2
    1 rename("R/progress.json.tmp", "R/progress.json") = 0
"""
WRITE_BESIDE_SYNC = f"""
    2 write(3, {RECORD} <unfinished ...>
    1 fdatasync(3 <unfinished ...>
    2 <... write resumed>) = 28
    1 <... fdatasync resumed>) = 0
"""


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({}, ""),
        ({"sync record": ""}, "cabd"),
        ({"sync record": f"1 fdatasync(3) = {EIO}"}, "cabd"),
        ({"sync record": "", "write record": WRITE_BESIDE_SYNC}, "cabd"),
        ({"write record": f"1 write(3, {RECORD}) = 27"}, "cagd"),
        ({"sync record": "", "write list": "1 fdatasync(3) = 0\n" + GOOD["write list"]}, ""),
        ({"sync shards": ""}, "ca"),
        ({"sync failure": ""}, "a"),
        ({"write failure": ""}, "a"),
        ({"hand on": UNSYNCED_RENAME}, "b"),
        ({"sync record": GOOD["write list"] + "\n" + GOOD["sync record"], "write list": ""}, "c"),
        ({"sync shards again": ""}, "d"),
        ({"seal": ""}, "d"),
        ({"sync folder": "", "sync folder again": ""}, "eeadh"),
        ({"hand on": f"1 fdatasync(5) = {EIO}\n1 fdatasync(5) = 0"}, "f"),
        ({"hand on": f"1 fsync(8) = {EIO}\n1 fsync(8) = 0"}, "f"),
        ({"hand on": '1 unlink("R/shards/part-000000.jsonl") = 0'}, "g"),
        ({"hand on": "1 ftruncate(3, 0) = 0"}, "g"),
        ({"sync manifest": ""}, "h"),
        ({"sync list": ""}, "h"),
    ],
)
def test_the_weakest_disk_complains_of_each_broken_rule_and_of_nothing_else(tmp_path, changes, rules):
    (tmp_path / "run").mkdir()
    disk = Weakest(tmp_path)
    text = "\n".join({**GOOD, **changes}.values()).replace('"R', f'"{tmp_path}/run')
    disk.replay(calls(line.strip() for line in text.splitlines() if line.strip()))

    assert "".join(complaint[0] for complaint in disk.complaints) == rules, disk.complaints
