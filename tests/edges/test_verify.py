"""What ``genpipe verify`` finds, each kind once, and that a repair leaves none of it."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genpipe.core.errors import ConfigError, Fenced, StoreError
from genpipe.edges import lines
from genpipe.edges.files import OsFiles
from genpipe.edges.lock import FolderLock
from genpipe.edges.reading import driver_at_work
from genpipe.edges.store import Store
from genpipe.edges.verify import repair, verify
from tests.edges import audit
from tests.edges.samples import WALL, given_up, group

NOW = "2026-01-01T00:00:00.000Z"
RUN = {
    "format": 1,
    "run_id": "r",
    "created_at": NOW,
    "inputs": [],
    "settings": {},
    "digest": "44136fa355b3678a",
    "shard_records": 4,
}


def make(folder: Path) -> Path:
    """Two sealed shards of four records, three in the open one, two failures, one segment."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(RUN))
    store = Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(*range(11), failures=[given_up(20), given_up(21, for_good=False)]))
    store.close()
    segment = {"segment": 1, "started_at": NOW, "epoch": 1}
    (folder / "segments.jsonl").write_bytes(2 * lines.encode(json.dumps(segment).encode()[:-1]))
    for sealed in (folder / "shards").glob("*.jsonl"):
        sealed.chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("sound") / "run")


@pytest.fixture
def folder(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def look(folder, **options):
    return verify(folder, OsFiles(), progress=lambda *_: None, **options)


def told(folder) -> tuple[list[str], list[str]]:
    """Problems and notes, as "file: what"."""
    problems: list[str] = []
    notes: list[str] = []
    for finding in look(folder).findings:
        (problems if finding.is_problem else notes).append(f"{finding.file}: {finding.what}")
    return problems, notes


def mend(folder) -> list[str]:
    """A repair; what it told."""
    done: list[str] = []
    repair(folder, OsFiles(), now_text=NOW, warn=done.append)
    return done


class Damage:
    """Changes to the run folder of :func:`make`, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards = folder / "shards"
        self.first, self.second = (self.shards / f"part-00000{n}.jsonl" for n in (0, 1))
        self.open = self.shards / "part-000002.jsonl.open"
        self.manifest = folder / "manifest.jsonl"
        self.done_indices = folder / ".done_indices"

    def change(self, path: Path, old: bytes, new: bytes, count: int = 1) -> None:
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, count))

    def add(self, path: Path, data: bytes) -> None:
        path.write_bytes(path.read_bytes() + data)

    def a_flipped_byte(self):
        self.change(self.first, b"answer to 2", b"answer to 3")

    def zeros_of_the_right_length(self):
        self.second.write_bytes(b"\0" * self.second.stat().st_size)

    def a_cut_shard(self):
        self.first.write_bytes(self.first.read_bytes()[:-7])

    def a_shard_cut_between_lines(self):
        self.first.write_bytes(b"".join(self.first.read_bytes().splitlines(keepends=True)[:3]))

    def a_longer_shard(self):
        self.add(self.first, self.second.read_bytes())

    def a_line_sealed_anew(self):
        (line,) = [
            line for line in self.first.read_bytes().splitlines(keepends=True) if b'"index":2,' in line
        ]
        other = line.replace(b"answer to 2", b"Answer to 2")
        self.change(self.first, line, lines.encode(lines.body_of(other)[:-1]))

    def other_sums(self):
        (line,) = [
            line for line in self.first.read_bytes().splitlines(keepends=True) if b'"index":2,' in line
        ]
        other = line.replace(b'"completion_tokens":12', b'"completion_tokens":99')
        self.change(self.first, line, lines.encode(lines.body_of(other)[:-1]))

    def another_index(self):
        (line,) = [
            line for line in self.first.read_bytes().splitlines(keepends=True) if b'"index":2,' in line
        ]
        other = line.replace(b'"index":2,', b'"index":7777,')
        self.change(self.first, line, lines.encode(lines.body_of(other)[:-1]))

    def a_lost_shard(self):
        self.first.unlink()

    def a_shard_that_is_not_listed(self):
        self.manifest.write_bytes(self.manifest.read_bytes().splitlines(keepends=True)[1])

    def a_missing_manifest(self):
        self.manifest.unlink()

    def a_damaged_manifest(self):
        self.change(self.manifest, b'"bytes":', b'"bytes":1')

    def a_manifest_that_lies(self):
        entry = json.loads(self.manifest.read_bytes().splitlines()[0])
        del entry["_c"]
        entry["indices"] = [[100, 103]]
        self.add(self.manifest, lines.encode(json.dumps(entry).encode()[:-1]))

    def a_torn_tail(self):
        self.open.write_bytes(self.open.read_bytes()[:-5])

    def damage_in_the_open_shard(self):
        self.change(self.open, b"answer to 8", b"answer to X")

    def two_open_shards(self):
        (self.shards / "part-000003.jsonl.open").write_bytes(b"")

    def a_sealed_twin(self):
        (self.shards / "part-000001.jsonl.open").write_bytes(self.open.read_bytes())
        self.open.unlink()

    def a_record_doubled_across_shards(self):
        self.add(self.open, self.first.read_bytes().splitlines(keepends=True)[0])

    def a_record_doubled_within_a_shard(self):
        self.add(self.open, self.open.read_bytes().splitlines(keepends=True)[0])

    def an_index_without_a_record(self):
        self.add(self.done_indices, b"999\n")

    def an_index_twice(self):
        self.add(self.done_indices, b"3\n")

    def a_line_that_is_no_number(self):
        self.add(self.done_indices, b"1x2\n")

    def half_a_line_of_the_list(self):
        self.add(self.done_indices, b"12")

    def no_list_of_failures(self):
        (self.folder / "failed.jsonl").unlink()

    def a_missing_list_of_indices(self):
        self.done_indices.unlink()

    def a_torn_failure(self):
        path = self.folder / "failed.jsonl"
        path.write_bytes(path.read_bytes()[:-5])

    def a_damaged_segment(self):
        self.change(self.folder / "segments.jsonl", b'"epoch":', b'"epoch":1')

    def an_unreadable_middle(self):
        self.change(self.folder / "failed.jsonl", b'"message"', b'"massage"')


FIRST, SECOND, OPEN = "part-000000.jsonl", "part-000001.jsonl", "part-000002.jsonl.open"
KINDS = {
    "a_flipped_byte": [
        f"shards/{FIRST}: has another SHA-256",
        f"shards/{FIRST}: lacks 1 of the 4 prompts",
        f"shards/{FIRST}: IS DAMAGED: 1 places",
        ".done_indices: has 1 lines without a record",
    ],
    "zeros_of_the_right_length": [
        f"shards/{SECOND}: has another SHA-256",
        f"shards/{SECOND}: lacks 4 of the 4",
        f"shards/{SECOND}: ends in ",
        ".done_indices: has 4 lines without a record",
    ],
    "a_cut_shard": [
        f"shards/{FIRST}: has ",
        f"shards/{FIRST}: lacks 1 of the 4",
        f"shards/{FIRST}: ends in ",
        ".done_indices: has 1 lines",
    ],
    "a_shard_cut_between_lines": [
        f"shards/{FIRST}: has ",
        f"shards/{FIRST}: lacks 1",
        ".done_indices: has 1 lines without",
    ],
    "a_longer_shard": [
        f"shards/{FIRST}: has 1420 bytes behind",
        f"shards/{SECOND}: holds 4 records of prompts",
    ],
    "a_line_sealed_anew": [f"shards/{FIRST}: has another SHA-256"],
    "other_sums": [f"shards/{FIRST}: has another SHA-256", f"shards/{FIRST}: holds records of other lengths"],
    "another_index": [
        f"shards/{FIRST}: has ",
        f"shards/{FIRST}: lacks 1 of the 4",
        ".done_indices: has 1 lines without a record, 1 records without a line",
    ],
    "a_lost_shard": [f"shards/{FIRST}: is gone, with 4 records", ".done_indices: has 4 lines without"],
    "a_shard_that_is_not_listed": [f"shards/{FIRST}: is not listed"],
    "a_missing_manifest": ["manifest.jsonl: is missing"],
    "a_damaged_manifest": [
        "manifest.jsonl: holds 1 lines that do not count",
        f"shards/{FIRST}: is not listed",
    ],
    "a_manifest_that_lies": [f"shards/{FIRST}: holds other prompts than the manifest lists"],
    "a_torn_tail": [f"shards/{OPEN}: ends in ", ".done_indices: has 1 lines without"],
    "damage_in_the_open_shard": [f"shards/{OPEN}: IS DAMAGED", ".done_indices: has 1 lines without"],
    "two_open_shards": [f"shards/{OPEN}: is open and not the newest"],
    "a_sealed_twin": ["shards/part-000001.jsonl.open: has a sealed twin"],
    "a_record_doubled_across_shards": [f"shards/{OPEN}: holds 1 records of prompts that stand before them"],
    "a_record_doubled_within_a_shard": [f"shards/{OPEN}: holds 1 records of prompts that stand before them"],
    "an_index_without_a_record": [".done_indices: has 1 lines without a record"],
    "an_index_twice": [".done_indices: has 1 repeated lines"],
    "a_line_that_is_no_number": [".done_indices: has 1 lines that are no number"],
    "no_list_of_failures": ["failed.jsonl: is missing"],
    "a_missing_list_of_indices": [".done_indices: is missing"],
    "a_torn_failure": ["failed.jsonl: ends in "],
    "an_unreadable_middle": ["failed.jsonl: IS DAMAGED"],
    "a_damaged_segment": ["segments.jsonl: IS DAMAGED"],
}
NEEDS_REPAIR = {
    *("a_flipped_byte", "a_line_sealed_anew", "other_sums", "a_lost_shard", "a_manifest_that_lies"),
    "a_damaged_segment",
}
"""What an ordinary start leaves as it is."""


def test_a_sound_folder_has_no_findings(folder):
    report = look(folder)

    assert report.findings == ()
    assert (report.shards, report.records, report.problem_count) == (3, 11, 0)
    assert report.size_bytes == sum(path.stat().st_size for path in (folder / "shards").iterdir())
    assert not report.driver_at_work
    assert (
        report.as_text() == f"{folder}: sound, 3 shards, 11 records, {report.size_bytes:,} bytes, 0 problems"
    )
    assert mend(folder) == []


def test_every_kind_of_damage_is_in_the_table():
    assert {name for name in vars(Damage) if not name.startswith("_")} - {
        *("change", "add", "half_a_line_of_the_list")
    } == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_damage_is_found_and_after_a_repair_it_is_gone(folder, name):
    getattr(Damage(folder), name)()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    problems, _ = told(folder)
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert after == before
    assert len(problems) == len(KINDS[name]), problems
    assert [p for p, wanted in zip(problems, KINDS[name], strict=True) if not p.startswith(wanted)] == []
    assert mend(folder) != []
    assert told(folder)[0] == []
    assert max(audit.counts(OsFiles(), folder).values()) == 1
    audit.check_at_rest(OsFiles(), folder)
    assert mend(folder) == []


@pytest.mark.parametrize("name", KINDS)
def test_what_is_said_to_need_no_repair_is_mended_by_a_start(folder, name):
    getattr(Damage(folder), name)()
    Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=lambda _: None).close()

    assert (told(folder)[0] != []) == (name in NEEDS_REPAIR)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_no_changed_byte_of_a_shard_goes_unseen_and_every_repair_is_clean(data, sound, tmp_path_factory):
    folder = Path(shutil.copytree(sound, tmp_path_factory.mktemp("any") / "run"))
    path = data.draw(st.sampled_from(sorted((folder / "shards").iterdir())))
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start, min(len(whole), start + 400)))
    new = data.draw(st.sampled_from([b"", b"\n", b"\0" * (stop - start), b"x\ny", whole[:200]]))
    path.write_bytes(whole[:start] + new + whole[stop:])
    is_changed = path.read_bytes() != whole

    assert (look(folder).problem_count > 0) == is_changed
    mend(folder)
    assert told(folder)[0] == []
    assert max(audit.counts(OsFiles(), folder).values()) == 1


# What a kill leaves is a note.


def test_a_list_that_lags_is_a_note_and_a_start_mends_it(folder):
    damage = Damage(folder)
    damage.done_indices.write_bytes(damage.done_indices.read_bytes()[:-3])
    damage.manifest.write_bytes(damage.manifest.read_bytes().splitlines(keepends=True)[0])
    problems, notes = told(folder)

    assert problems == []
    assert notes == [
        f"shards/{SECOND}: is not listed in the manifest",
        ".done_indices: has 1 records without a line",
    ]
    Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=lambda _: None).close()
    assert told(folder) == ([], [])


def test_half_a_line_that_a_kill_leaves_in_a_list_is_a_note_and_a_start_mends_it(folder):
    damage = Damage(folder)
    damage.half_a_line_of_the_list()
    damage.add(damage.manifest, b'{"seq":7,"fi')
    problems, notes = told(folder)

    assert problems == []
    assert [note.split(":")[0] for note in notes] == ["manifest.jsonl", ".done_indices"]
    Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=lambda _: None).close()
    assert told(folder) == ([], [])


def test_more_unlisted_shards_than_a_kill_leaves_are_a_problem(folder):
    store = Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(11, 12))
    store.close()
    (folder / "manifest.jsonl").write_bytes(b"")

    assert len(told(folder)[0]) == 3


def test_leftovers_and_quarantine_are_notes(folder):
    Damage(folder).a_torn_tail()
    mend(folder)
    (folder / "shards" / "x.tmp").write_bytes(b"")

    assert told(folder) == (
        [],
        [
            "shards/x.tmp: was left behind half-written",
            "quarantine: holds 1 files of 353 bytes that were no records",
        ],
    )


# Beside a driver.


@pytest.fixture
def driver(folder):
    """A driver that owns the folder."""
    lock = FolderLock.take(folder, started_at=NOW, warn=pytest.fail)
    yield lock
    lock.release()


def test_a_repair_of_a_finished_run_begins_no_shard(folder):
    store = Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)
    store.seal_last()
    store.close()
    before = sorted(path.name for path in (folder / "shards").iterdir())
    mend(folder)

    assert sorted(path.name for path in (folder / "shards").iterdir()) == before
    assert told(folder) == ([], [])


@pytest.mark.parametrize("name", ["a_torn_tail", "a_torn_failure", "half_a_line_of_the_list"])
def test_beside_a_driver_what_it_is_writing_is_no_finding(folder, driver, name):
    damage = Damage(folder)
    getattr(damage, name)()
    if name == "a_torn_tail":
        damage.done_indices.write_bytes(damage.done_indices.read_bytes()[:-3])
    damage.manifest.write_bytes(damage.manifest.read_bytes().splitlines(keepends=True)[0])
    (folder / "progress.json.tmp").write_bytes(b"{")
    report = look(folder)

    assert report.findings == ()
    assert report.driver_at_work
    assert "a driver is at work" in report.as_text()


@pytest.mark.parametrize(
    "name", ["a_flipped_byte", "a_lost_shard", "an_index_without_a_record", "two_open_shards"]
)
def test_beside_a_driver_real_damage_is_found_and_is_not_repaired(folder, driver, name):
    getattr(Damage(folder), name)()

    assert look(folder).problem_count > 0
    with pytest.raises(Fenced, match=str(os.getpid())):
        mend(folder)


def test_a_look_does_not_claim_the_folder(folder):
    assert not driver_at_work(folder)
    lock = FolderLock.take(folder, started_at=NOW, warn=pytest.fail)
    assert driver_at_work(folder)
    lock.release()
    assert not driver_at_work(folder)


class BusyFiles(OsFiles):
    """A disk on which a driver goes on while somebody looks."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.open(folder, OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)
        self.next = 11

    def read(self, path):
        data = super().read(path)
        self.go_on()
        return data

    def sizes(self, path):
        sizes = super().sizes(path)
        self.go_on()
        return sizes

    def go_on(self):
        self.store.commit(group(*range(self.next, self.next + 3)))
        self.next += 3


def test_a_driver_that_goes_on_between_any_two_steps_is_no_problem(folder, driver):
    files = BusyFiles(folder)
    report = verify(folder, files, progress=lambda *_: None, threads=1)
    files.store.close()

    assert files.next > 30
    assert [str(finding) for finding in report.findings] == []
    assert report.records > 11


# What cannot be looked at.


def test_what_is_no_run_folder_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    make(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{")

    for name, what in {"empty": "holds no run", "nowhere": "holds no run", "run": "is damaged"}.items():
        with pytest.raises(ConfigError, match=what):
            look(tmp_path / name)


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_lost_shards_are_a_problem_that_nothing_can_repair(folder, how):
    for path in (folder / "shards").iterdir():
        path.unlink()
    if how == "gone":
        (folder / "shards").rmdir()

    assert any(problem == f"shards: is {how}" for problem in told(folder)[0])
    with pytest.raises(StoreError, match="put the shards back"):
        mend(folder)


def test_a_shard_that_cannot_be_read_is_named_and_the_others_are_looked_at(folder):
    class Refusing(OsFiles):
        def read(self, path):
            if path.name == FIRST:
                raise OSError(5, "Input/output error")
            return super().read(path)

    report = verify(folder, Refusing(), progress=lambda *_: None)

    assert f"shards/{FIRST}: cannot be read: Input/output error" in str(report.findings[0])
    assert report.records == 7


def test_a_report_for_programs_has_the_same_findings(folder):
    Damage(folder).a_torn_failure()
    data = look(folder).as_json()

    assert data["sound"] is False
    assert data["problems"] == 1
    assert [(finding["kind"], finding["file"]) for finding in data["findings"]] == [
        ("problem", "failed.jsonl")
    ]
    assert json.loads(json.dumps(data)) == data


def test_progress_ends_at_all_bytes_and_goes_shard_by_shard(folder):
    steps: list[tuple[int, int]] = []
    report = verify(folder, OsFiles(), progress=lambda *step: steps.append(step), threads=2)

    assert len(steps) == 3
    assert steps[-1] == (report.size_bytes, report.size_bytes)
    assert sorted(steps) == steps
