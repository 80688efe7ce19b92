"""Claiming a run folder, and what it says of its run."""

import errno
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from genpipe.core.errors import ConfigError, Fenced, ResumeMismatch
from genpipe.edges import heartbeat
from genpipe.edges.files import OsFiles
from genpipe.edges.lock import FolderLock
from genpipe.edges.run_folder import RunFolder, RunIdentity
from tests.edges.audit import whole_lines

NOW = "2026-01-02T03:04:05.678Z"
SETTINGS = {"model": "m", "request": {"sampling": {"temperature": 0.7, "stop": ["a"]}, "system": None}}


def identity(settings=SETTINGS, *, inputs=("a.jsonl", "b.jsonl"), shard_records=500) -> RunIdentity:
    return RunIdentity(inputs=inputs, settings=settings, shard_records=shard_records, version="0.1.0")


def claim(path: Path, given=None, *, allow_changed=False, warnings=None, **changes) -> RunFolder:
    return RunFolder.open(
        path,
        given or identity(**changes),
        OsFiles(),
        allow_changed=allow_changed,
        now_text=NOW,
        warn=pytest.fail if warnings is None else warnings.append,
    )


def tree(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_new_folder_is_made_with_those_above_it_and_says_what_run_it_is(tmp_path):
    folder = claim(tmp_path / "a" / "run")
    folder.close()
    folder.close()

    run = json.loads((tmp_path / "a" / "run" / "run.json").read_bytes())
    assert run["format"] == 1
    assert (run["run_id"], len(run["run_id"])) == (folder.run_id, 32)
    assert (run["created_at"], run["genpipe"], run["shard_records"]) == (NOW, "0.1.0", 500)
    assert run["inputs"] == [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    assert run["settings"] == SETTINGS
    assert (run["digest"], len(run["digest"])) == (identity().digest, 16)
    assert (folder.is_new, folder.epoch, folder.segment, folder.settings_mark) == (True, 1, 1, None)


def test_the_same_command_resumes_the_same_run_and_leaves_run_json_alone(tmp_path):
    first = claim(tmp_path)
    first.close()
    before = (tmp_path / "run.json").read_bytes()
    second = claim(tmp_path, inputs=("/elsewhere/a.jsonl", "b.jsonl"))
    second.close()

    assert (second.run_id, second.is_new, second.epoch) == (first.run_id, False, 2)
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_folder_with_only_what_a_dead_start_left_is_as_good_as_empty(tmp_path):
    (tmp_path / ".lock").write_bytes(b"")
    (tmp_path / "run.json.tmp").write_bytes(b'{"form')
    claim(tmp_path).close()

    assert (tmp_path / "run.json").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "x.tmp", "shards/part-000000.jsonl", ".done_indices"])
def test_a_folder_of_other_things_is_refused_and_not_touched(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")

    with pytest.raises(ConfigError, match=str(tmp_path)):
        claim(tmp_path)
    assert tree(tmp_path) == {name: b"mine"}


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "out").write_bytes(b"mine")

    with pytest.raises(ConfigError, match="is a file"):
        claim(tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "damaged"),
        (b"\0" * 300, "damaged"),
        (b"[1]", "damaged"),
        (b'{"format": 2}', "format 2"),
        (b'{"format": 1}', "'run_id' is missing"),
        (b"{}", "format None"),
    ],
)
def test_a_run_json_that_is_not_understood_is_never_begun_anew(tmp_path, text, match):
    claim(tmp_path).close()
    (tmp_path / "run.json").write_bytes(text)

    with pytest.raises(ConfigError, match=match) as caught:
        claim(tmp_path)
    assert str(tmp_path / "run.json") in str(caught.value)
    assert (tmp_path / "run.json").read_bytes() == text


def changed():
    return {"model": "m", "request": {"sampling": {"temperature": 1.0, "top_p": 0.9}, "system": "Be brief."}}


def test_changed_settings_are_refused_key_by_key(tmp_path):
    claim(tmp_path).close()

    with pytest.raises(ResumeMismatch) as caught:
        claim(tmp_path, settings=changed())
    message = str(caught.value)
    assert "request.sampling.temperature was 0.7, is 1.0" in message
    assert 'request.sampling.stop was ["a"], is not set' in message
    assert "request.sampling.top_p was not set, is 0.9" in message
    assert 'request.system was null, is "Be brief."' in message
    assert "model" not in message.replace(str(tmp_path), "")
    assert "\n" not in message
    assert "--allow-changed" in message


def test_changed_settings_that_are_allowed_are_marked_and_run_json_keeps_the_first(tmp_path):
    claim(tmp_path).close()
    before = (tmp_path / "run.json").read_bytes()
    warnings: list[str] = []
    folder = claim(tmp_path, settings=changed(), allow_changed=True, warnings=warnings)
    folder.close()

    assert folder.settings_mark == identity(changed()).digest != identity().digest
    assert len(warnings) == 1
    assert (tmp_path / "run.json").read_bytes() == before
    claim(tmp_path).close()


def test_a_long_setting_that_differs_at_its_end_is_seen_and_shown_short(tmp_path):
    claim(tmp_path, settings={"system": "x" * 5000 + "a"}).close()

    with pytest.raises(ResumeMismatch, match="system was") as caught:
        claim(tmp_path, settings={"system": "x" * 5000 + "b"})
    assert len(str(caught.value)) < 1000


def test_the_order_of_settings_does_not_matter(tmp_path):
    claim(tmp_path).close()
    claim(tmp_path, settings=dict(reversed(SETTINGS.items()))).close()

    assert identity(dict(reversed(SETTINGS.items()))).digest == identity().digest


def test_settings_that_json_does_not_have_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no place in JSON"):
        claim(tmp_path, settings={"temperature": float("nan")})
    assert not (tmp_path / "run.json").exists()


def test_the_number_of_input_files_may_not_change(tmp_path):
    claim(tmp_path).close()

    with pytest.raises(ResumeMismatch, match="2 input files, and now there are 3"):
        claim(tmp_path, inputs=("a.jsonl", "b.jsonl", "c.jsonl"))


@pytest.mark.parametrize(
    ("began", "now"),
    [(("*.jsonl",), ("a.jsonl", "b.jsonl")), (("a.jsonl", "b.jsonl"), ("*.jsonl",)), (("?", "c"), ("c",))],
)
def test_a_pattern_stands_for_any_number_of_files(tmp_path, began, now):
    claim(tmp_path, inputs=began).close()
    before = (tmp_path / "run.json").read_bytes()
    again = claim(tmp_path, inputs=now)
    again.close()

    assert again.epoch == 2
    assert (tmp_path / "run.json").read_bytes() == before


def test_shards_keep_the_size_that_the_run_began_with(tmp_path):
    claim(tmp_path).close()
    warnings: list[str] = []
    folder = claim(tmp_path, shard_records=100, warnings=warnings)
    folder.close()

    assert folder.shard_records == 500
    assert len(warnings) == 1


def test_a_second_driver_is_turned_away_with_the_name_of_the_first(tmp_path):
    first = claim(tmp_path)
    before = tree(tmp_path)

    with pytest.raises(Fenced) as caught:
        claim(tmp_path)
    assert caught.value.exit_code == 75
    for word in (str(tmp_path), f"pid {os.getpid()}", os.uname().nodename, NOW):
        assert word in str(caught.value)
    assert tree(tmp_path) == before
    owner = json.loads(before[".lock"])
    assert owner.keys() == {
        *("pid", "pid_start", "pid_namespace", "host", "boot_id", "start", "epoch", "nonce", "inode"),
    }
    first.check_still_mine()
    first.close()
    claim(tmp_path).close()


def test_a_child_does_not_keep_the_folder_of_a_killed_driver_locked(tmp_path):
    code = (
        "import subprocess, sys\n"
        "from tests.edges.test_run_folder import claim, Path\n"
        f"folder = claim(Path({str(tmp_path)!r}))\n"
        "child = subprocess.Popen(['sleep', '60'], close_fds=False, stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as driver:
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        try:
            with pytest.raises(Fenced, match=f"pid {driver.pid}"):
                claim(tmp_path)
            driver.kill()
            driver.wait()
            folder = claim(tmp_path)
            assert (folder.epoch, folder.is_new) == (2, False)
            folder.close()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_lock_file_that_is_not_ours_any_more_is_noticed(tmp_path, how):
    folder = claim(tmp_path)
    (tmp_path / ".lock").unlink()
    if how == "replaced":
        claim(tmp_path).close()

    with pytest.raises(Fenced, match="removed or replaced"):
        folder.check_still_mine()
    folder.close()


def test_on_a_file_system_without_locks_a_run_is_claimed_with_a_warning(tmp_path, monkeypatch):
    def flock(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("genpipe.edges.run_folder.FolderLock.take", partial(FolderLock.take, flock=flock))
    monkeypatch.setattr(heartbeat, "SETTLE_S", 0.01)
    warnings: list[str] = []
    first = claim(tmp_path, warnings=warnings)

    assert [("cannot lock" in warning, "\n" in warning) for warning in warnings] == [(True, False)]
    with pytest.raises(Fenced, match=f"pid {os.getpid()}"):
        claim(tmp_path, warnings=[])
    first.check_still_mine()
    (tmp_path / ".lock.heartbeat").unlink()
    with pytest.raises(Fenced, match="heartbeat was removed"):
        first.check_still_mine()
    first.close()
    claim(tmp_path, warnings=[]).close()


@pytest.mark.parametrize("data", [b"", b"{}"])
def test_a_start_that_died_in_its_claim_leaves_a_folder_that_can_be_claimed(tmp_path, monkeypatch, data):
    monkeypatch.setattr(heartbeat, "TTL_S", 0.1)
    monkeypatch.setattr(heartbeat, "SETTLE_S", 0.01)
    monkeypatch.setattr(heartbeat, "LOOK_S", 0.01)
    (tmp_path / ".lock").write_bytes(b"")
    (tmp_path / ".lock.heartbeat").write_bytes(data)
    (tmp_path / ".lock.heartbeat.0123.tmp").write_bytes(data)
    claim(tmp_path, warnings=[]).close()

    assert (tmp_path / "run.json").exists()


def test_a_lock_file_without_sense_is_no_hindrance(tmp_path):
    claim(tmp_path).close()
    (tmp_path / ".lock").write_bytes(b"\0" * 5000)
    claim(tmp_path).close()

    assert json.loads((tmp_path / ".lock").read_bytes())["pid"] == os.getpid()


def test_an_owner_that_cannot_be_read_is_still_an_owner(tmp_path):
    folder = claim(tmp_path)
    (tmp_path / ".lock").write_bytes(b"")

    with pytest.raises(Fenced, match="pid unknown"):
        claim(tmp_path)
    folder.close()


def note_segments(folder: RunFolder) -> None:
    folder.start_segment(NOW, {"settings": {"model": "m"}})
    folder.end_segment(NOW, why="done", sums={"records": 3}, wall_s=1.23456, slot_seconds={"wire": 2.5})
    folder.close()


def test_segments_are_noted_and_numbered_on(tmp_path):
    note_segments(claim(tmp_path))
    second = claim(tmp_path)
    note_segments(second)

    entries = whole_lines((tmp_path / "segments.jsonl").read_bytes())
    assert [entry["segment"] for entry in entries] == [1, 1, 2, 2]
    assert entries[0] == {"segment": 1, "started_at": NOW, "epoch": 1, "settings": {"model": "m"}} | {
        "_c": entries[0]["_c"]
    }
    assert (entries[1]["why"], entries[1]["wall_s"], entries[1]["slot_seconds"]) == (
        "done",
        1.235,
        {"wire": 2.5},
    )
    assert [entry.get("why") for entry in second.segments] == [None, "done"]


@pytest.mark.parametrize("tail", [b'{"segment":2,"star', b"\0" * 100, b"xx\n"])
def test_a_torn_segment_line_is_cut_before_the_next(tmp_path, tail):
    note_segments(claim(tmp_path))
    path = tmp_path / "segments.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    warnings: list[str] = []
    note_segments(claim(tmp_path, warnings=warnings))

    assert [str(path) in warning for warning in warnings] == [True]
    assert [kept.read_bytes() for kept in (tmp_path / "quarantine").iterdir()] == [tail]
    assert path.read_bytes().startswith(whole + b'{"segment":2,')
    assert len(whole_lines(path.read_bytes())) == 4


def test_a_damaged_history_is_said_and_does_not_stop_the_run(tmp_path):
    note_segments(claim(tmp_path))
    note_segments(claim(tmp_path))
    path = tmp_path / "segments.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"segment":1,"ended', b'"segment":1,"Ended'))
    warnings: list[str] = []
    folder = claim(tmp_path, warnings=warnings)
    folder.close()

    assert folder.segment == 3
    assert [str(path) in warning for warning in warnings] == [True]


# A run that is kept elsewhere, too.


class Elsewhere:
    """Says what it is told to, and notes what it sees of the folder."""

    name = "s3://bucket/run"

    def __init__(self, *, run=None, error=None, fails_at="") -> None:
        self.run = run
        self.error = error
        self.fails_at = fails_at
        self.had_segments = True
        self.asked: list[tuple[object, ...]] = []

    def agree(self, run, *, is_new):
        self.asked.append(("agree", run["run_id"], is_new))
        if self.fails_at == "agree":
            raise self.error
        return self.run or run

    def take_over(self, path, lock):
        run = json.loads((path / "run.json").read_bytes())
        self.asked.append(("take_over", run["run_id"], lock.nonce, lock.previous_nonce))
        # What is brought must be there before it is opened.
        self.had_segments = (path / "segments.jsonl").exists()
        if self.fails_at == "take_over":
            raise self.error


def claim_with(path, elsewhere, **changes):
    return RunFolder.open(
        path,
        identity(**changes),
        OsFiles(),
        allow_changed=False,
        now_text=NOW,
        warn=pytest.fail,
        elsewhere=elsewhere,
    )


def test_a_new_run_is_agreed_upon_before_it_is_written_and_taken_over_after(tmp_path):
    elsewhere = Elsewhere()
    folder = claim_with(tmp_path, elsewhere)
    folder.close()

    assert elsewhere.asked == [
        ("agree", folder.run_id, True),
        ("take_over", folder.run_id, folder.nonce, None),
    ]
    assert not elsewhere.had_segments
    assert folder.is_new
    assert folder.previous_nonce is None


def test_a_folder_that_has_a_run_says_so_and_whose_claim_came_before(tmp_path):
    first = claim(tmp_path)
    first.close()
    elsewhere = Elsewhere()
    second = claim_with(tmp_path, elsewhere)
    second.close()

    assert elsewhere.asked == [
        ("agree", first.run_id, False),
        ("take_over", first.run_id, second.nonce, first.nonce),
    ]
    assert second.previous_nonce == first.nonce != second.nonce
    assert not second.is_new


def test_a_run_that_is_elsewhere_is_adopted_as_it_is(tmp_path):
    claim(tmp_path / "a", shard_records=7).close()
    run = json.loads((tmp_path / "a" / "run.json").read_bytes())
    warnings: list[str] = []
    folder = RunFolder.open(
        tmp_path / "b", identity(), OsFiles(), allow_changed=False, now_text=NOW, warn=warnings.append,
        elsewhere=Elsewhere(run=run),
    )  # fmt: skip
    folder.close()

    assert (folder.run_id, folder.is_new, folder.shard_records) == (run["run_id"], False, 7)
    assert (tmp_path / "b" / "run.json").read_bytes() == (tmp_path / "a" / "run.json").read_bytes()
    assert ["s3://bucket/run has shards of 7" in warning for warning in warnings] == [True]


def test_a_run_that_is_elsewhere_is_held_against_the_settings_and_not_written_where_they_differ(tmp_path):
    claim(tmp_path / "a", settings={"model": "other"}).close()
    elsewhere = Elsewhere(run=json.loads((tmp_path / "a" / "run.json").read_bytes()))

    with pytest.raises(ResumeMismatch, match=r'the run in s3://bucket/run began.*model was "other"'):
        claim_with(tmp_path / "b", elsewhere)
    assert list(tree(tmp_path / "b")) == [".lock"]
    assert [word for word, *_ in elsewhere.asked] == ["agree"]


@pytest.mark.parametrize("at", ["agree", "take_over"])
def test_a_place_elsewhere_that_refuses_leaves_a_folder_that_can_be_claimed(tmp_path, at):
    error = Fenced("another has it")
    with pytest.raises(Fenced, match="another has it"):
        claim_with(tmp_path, Elsewhere(error=error, fails_at=at))
    assert (tmp_path / "run.json").exists() == (at == "take_over")
    claim(tmp_path).close()


def test_settings_without_a_place_in_json_are_found_before_anybody_is_asked(tmp_path):
    elsewhere = Elsewhere()

    with pytest.raises(ConfigError, match="no place in JSON"):
        claim_with(tmp_path, elsewhere, settings={"temperature": float("inf")})
    assert elsewhere.asked == []
