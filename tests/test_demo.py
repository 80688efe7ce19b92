"""The demo does what it says, and its audit can fail."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from zlib import crc32

import pytest

from genpipe import demo
from genpipe.core.errors import ConfigError


def play(*args):
    command = [sys.executable, "-m", "genpipe", "demo", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_the_demo_kills_resumes_and_finds_nothing_lost_or_doubled(tmp_path):
    keep = tmp_path / "kept"
    done = play("--prompts", 300, "--keep", keep)

    assert done.returncode == 0, done.stderr
    assert "4 simulated servers of 24 slots, 300 prompts" in done.stdout
    killed = re.search(r"Killed\. No warning, no clean-up; (\d+) answers are on disk", done.stdout)
    assert killed
    assert 50 <= int(killed[1]) < 300
    assert (
        "300 records for 300 prompts,\n0 lost, 0 doubled, 0 with another prompt's answer, 0 damaged"
        in done.stdout
    )
    sent = re.search(
        r"the resumed run sent (\d+) requests, 0 of them\nfor one of the (\d+) that", done.stdout
    )
    assert sent
    assert sent[2] == killed[1]
    assert int(sent[1]) == 300 - int(killed[1])
    assert "All is well." in done.stdout
    assert "Traceback" not in done.stderr
    assert "\r" not in done.stdout
    assert f"genpipe status {keep}" in done.stdout
    assert json.loads((keep / "progress.json").read_bytes())["completed"] == 300
    lines = done.stdout.splitlines()
    # The last one holds the path of the test's folder.
    assert max(map(len, lines[:-1])) <= 110
    assert all(before != after for before, after in pairwise(lines) if before)


@pytest.mark.slow
def test_a_demo_that_is_too_short_to_be_killed_does_not_claim_that_it_was():
    done = play("--prompts", 1)

    assert done.returncode == 0, done.stderr
    assert ("Killed" in done.stdout) != ("Not killed" in done.stdout)
    assert "1 records for 1 prompts,\n0 lost" in done.stdout


def test_a_demo_without_prompts_or_over_another_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^--prompts must be at least 1$"):
        demo.play(prompts=0, seed=1, keep=None)
    with pytest.raises(ConfigError, match="is there already"):
        demo.play(prompts=1, seed=1, keep=tmp_path)


def record(index, text, *, echo=None):
    """One line of a shard, as the format has it."""
    content = f"echo {demo._row(text) if echo is None else echo} and so on"
    members = json.dumps(
        {"index": index, "messages": [{"role": "user", "content": text}], "response": {"content": content}}
    )[:-1].encode()
    return members + b',"_c":"%08x"}\n' % crc32(members)


TEXTS = ["one", "two", "three"]
WHOLE = [record(index, text) for index, text in enumerate(TEXTS)]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (WHOLE, (3, 0, 0, 0, 0)),
        (WHOLE[:2], (2, 0, 1, 0, 0)),
        ([*WHOLE, WHOLE[0]], (4, 0, 0, 1, 0)),
        ([*WHOLE[:2], record(2, "three", echo="0" * 16)], (3, 0, 0, 0, 1)),
        ([*WHOLE[:2], WHOLE[2].replace(b"three", b"threw")], (2, 1, 1, 0, 0)),
        ([*WHOLE, WHOLE[0][:20]], (3, 0, 0, 0, 0)),
        ([], (0, 0, 3, 0, 0)),
    ],
)
def test_the_audit_counts_what_is_lost_doubled_wrong_and_damaged(tmp_path, lines, found):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "part-00001.jsonl").write_bytes(b"".join(lines))
    audit = demo.audit(tmp_path, TEXTS)

    assert (audit.records, audit.damaged, audit.lost, audit.doubled, audit.wrong) == found
    assert audit.good == (found == (3, 0, 0, 0, 0))
