"""What a start makes of a damaged, half-written or meddled-with run folder."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from genpipe.core.errors import DiskFull, Fenced, StoreError
from genpipe.edges import lines
from genpipe.edges.files import OsFiles
from genpipe.edges.record import encode_finished
from genpipe.edges.recovery import Recovery
from genpipe.edges.s3.commits import Commit, encode_all
from genpipe.edges.shards import Entry, Tally
from genpipe.edges.store import Store
from tests.edges import audit
from tests.edges.audit import FOLDER
from tests.edges.memory_files import MemoryFiles, PowerLoss
from tests.edges.samples import WALL, finished, given_up, group

SHARDS = FOLDER / "shards"
SEALED = [SHARDS / "part-000000.jsonl", SHARDS / "part-000001.jsonl"]
OPEN = SHARDS / "part-000002.jsonl.open"
DONE_INDICES = FOLDER / ".done_indices"
MANIFEST = FOLDER / "manifest.jsonl"
FAILED = FOLDER / "failed.jsonl"


def reopen(files, folder=FOLDER, *, shard_records=4, **options) -> tuple[Store, list[str]]:
    """Start, check that all is as it must be after a start, and close; a start after that is silent."""
    warnings: list[str] = []
    store = Store.open(folder, files, shard_records=shard_records, wall=WALL, warn=warnings.append, **options)
    store.close()
    assert set(store.done) == set(audit.counts(files, folder))
    assert store.sums.records == len(store.done)
    assert store.sums.output_tokens == sum(10 + index for index in store.done)
    return store, warnings


def quiet_after(files) -> None:
    """Whatever there was to say has been said, and everything was put right."""
    audit.check_at_rest(files)
    assert reopen(files)[1] == []


@pytest.fixture
def files() -> MemoryFiles:
    """Two sealed shards of four and three records in the open one."""
    files = MemoryFiles([FOLDER])
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(*range(11), failures=[given_up(20), given_up(21, for_good=False)]))
    store.close()
    return files


def test_an_undamaged_folder_opens_without_a_word_and_without_reading_sealed_shards(files):
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=pytest.fail)
    store.close()

    assert list(store.done) == list(range(11))
    assert store.sums.output_tokens == sum(range(10, 21))
    assert not {path.name for path in SEALED} & set(files.reads)


@pytest.mark.parametrize("cut", [1, 7, 40, 200])
def test_a_torn_tail_is_cut_kept_aside_and_only_its_record_runs_again(files, cut):
    data = files.read(OPEN)
    files.put(OPEN, data[:-cut])
    store, warnings = reopen(files)

    assert list(store.done) == list(range(10))
    assert [w for w in warnings if "unfinished write" in w and str(OPEN) in w]
    [name] = files.sizes(FOLDER / "quarantine")
    start = data[:-1].rindex(b"\n") + 1
    assert name == f"{OPEN.name}@{start}"
    assert files.read(FOLDER / "quarantine" / name) == data[start:-cut]
    quiet_after(files)


def test_records_are_never_glued_to_a_torn_tail(files):
    files.put(OPEN, files.read(OPEN)[:-9])
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=lambda _: None)
    store.commit(group(10, 11))
    store.close()

    audit.check(files, range(12))
    quiet_after(files)


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"garbage\n", b'{"index":99}\n', b"\n\n", b'{"index":1'])
def test_any_bytes_after_the_last_good_line_are_a_torn_tail(files, tail):
    files.put(OPEN, files.read(OPEN) + tail)
    store, warnings = reopen(files)

    assert list(store.done) == list(range(11))
    assert len(warnings) == 1
    quiet_after(files)


@pytest.mark.parametrize("shard", [*SEALED, OPEN])
def test_a_bad_line_before_good_ones_is_damage_and_the_good_ones_are_kept(files, shard):
    data = files.read(shard)
    part = data.split(b"\n")
    lost = json.loads(part[1])["index"]
    part[1] = part[1].replace(b"answer", b"ANSWER")
    files.put(shard, b"\n".join(part))
    if shard in SEALED:
        files.remove(MANIFEST)
    store, warnings = reopen(files)

    assert list(store.done) == [index for index in range(11) if index != lost]
    assert [w for w in warnings if "DAMAGED" in w and str(shard) in w]
    assert files.sizes(FOLDER / "quarantine") == {f"{shard.name}@{len(part[0]) + 1}": len(part[1]) + 1}
    quiet_after(files)


def test_a_sound_line_without_an_index_is_no_record(files):
    data = files.read(OPEN)
    files.put(OPEN, lines.encode(b'{"id":5') + data)
    store, warnings = reopen(files)

    assert list(store.done) == list(range(11))
    assert any("DAMAGED" in w for w in warnings)
    assert files.read(OPEN) == data


def test_other_bytes_at_the_same_place_are_kept_beside_the_first(files):
    whole = files.read(OPEN)
    for tail in (b"one", b"two", b"two"):
        files.put(OPEN, whole + tail)
        reopen(files)

    quarantine = FOLDER / "quarantine"
    assert sorted(files.read(quarantine / name) for name in files.sizes(quarantine)) == [b"one", b"two"]


def test_a_sealed_shard_of_another_size_is_read_again(files):
    files.put(SEALED[1], files.read(SEALED[1])[:-7])
    store, warnings = reopen(files)

    assert list(store.done) == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert any(str(SEALED[1]) in w and "manifest says" in w for w in warnings)
    quiet_after(files)


def test_a_crash_between_the_rename_and_the_next_shard_is_gone_on_from(files):
    files.remove(OPEN)
    files.put(DONE_INDICES, b"".join(b"%d\n" % n for n in range(8)))
    _, warnings = reopen(files)

    assert warnings == []
    assert files.sizes(SHARDS)[OPEN.name] == 0


def test_a_full_shard_that_was_not_renamed_is_sealed(files):
    files.put(SHARDS / "part-000001.jsonl.open", files.read(SEALED[1]))
    files.remove(SEALED[1])
    files.remove(OPEN)
    files.put(MANIFEST, files.read(MANIFEST).split(b"\n")[0] + b"\n")
    files.put(DONE_INDICES, b"".join(b"%d\n" % n for n in range(8)))
    _, warnings = reopen(files)

    assert warnings == []
    assert sorted(files.sizes(SHARDS)) == [*(path.name for path in SEALED), OPEN.name]
    quiet_after(files)


def test_of_two_open_shards_the_older_is_sealed(files):
    files.put(SHARDS / "part-000003.jsonl.open", b"")
    _, warnings = reopen(files)

    assert warnings == []
    assert sorted(files.sizes(SHARDS)) == [
        *("part-000000.jsonl", "part-000001.jsonl", "part-000002.jsonl", "part-000003.jsonl.open")
    ]
    quiet_after(files)


def test_an_older_open_shard_without_records_is_removed(files):
    files.put(SHARDS / "part-000005.jsonl.open", files.read(OPEN))
    files.put(OPEN, b"")
    store, _ = reopen(files)

    assert sorted(files.sizes(SHARDS))[2:] == ["part-000005.jsonl.open"]
    assert list(store.done) == list(range(11))


def test_an_open_shard_never_replaces_a_sealed_one_of_the_same_number(files):
    files.put(SHARDS / "part-000001.jsonl.open", files.read(OPEN))
    files.remove(OPEN)
    store, warnings = reopen(files)

    assert list(store.done) == list(range(11))
    assert any("sealed twin" in w for w in warnings)
    quiet_after(files)


def test_a_twin_does_not_get_the_number_of_a_shard_that_is_gone(files):
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(11, number=2))
    store.close()
    files.put(SHARDS / "part-000000.jsonl.open", files.read(SHARDS / "part-000003.jsonl.open"))
    files.remove(SHARDS / "part-000003.jsonl.open")
    files.remove(SHARDS / "part-000002.jsonl")
    _, warnings = reopen(files)

    assert any("part-000002.jsonl is gone" in w for w in warnings)
    assert not {"part-000002.jsonl", "part-000002.jsonl.open"} & set(files.sizes(SHARDS))


def test_of_two_records_of_a_prompt_the_earlier_shards_counts(files):
    again = files.read(SEALED[0]) + files.read(OPEN).splitlines(keepends=True)[0]
    files.put(SHARDS / "part-000003.jsonl", again)
    files.put(MANIFEST, files.read(MANIFEST) + Tally.of(again.splitlines(keepends=True)).entry(3, 1).encode())
    store, warnings = reopen(files)

    assert list(store.done) == list(range(11))
    assert sum("an earlier shard has" in w for w in warnings) == 1
    assert files.read(SHARDS / "part-000003.jsonl") == again
    assert reopen(files)[0].sums.output_tokens == sum(range(10, 21))


def test_doubled_records_of_a_shard_that_is_read_anyway_are_kept_aside(files):
    # What a power loss leaves: a cut that was undone, of a shard that was not listed yet.
    tail = files.read(OPEN)
    files.put(SEALED[1], files.read(SEALED[1]) + tail)
    files.put(MANIFEST, files.read(MANIFEST).splitlines(keepends=True)[0])
    store, warnings = reopen(files)

    assert list(store.done) == list(range(11))
    assert files.read(OPEN) == b""
    assert files.read(FOLDER / "quarantine" / f"{OPEN.name}@0") == tail
    assert len(warnings) == 1
    audit.check(files.crash(), range(11))
    quiet_after(files)


def test_of_two_records_of_a_prompt_in_one_shard_the_first_counts(files):
    files.put(OPEN, files.read(OPEN) + files.read(OPEN).split(b"\n")[0] + b"\n")
    warnings: list[str] = []
    store = Store.open(FOLDER, files, shard_records=8, wall=WALL, warn=warnings.append)

    assert store.sums.records == 11
    assert any("1 records of prompts that stand before them" in w for w in warnings)
    store.commit(group(*range(30, 35)))
    store.close()
    assert audit.manifest(files)[2]["count"] == 8
    assert reopen(files, shard_records=8)[0].sums.records == 16


@pytest.mark.parametrize("damage", ["gone", "empty", "torn", "flipped", "zeros", "disagrees", "garbage"])
def test_the_manifest_is_made_again_from_the_shards(files, damage):
    data = files.read(MANIFEST)
    lie = json.loads(data.split(b"\n")[0])
    lie["count"] += 1
    del lie["_c"]
    damaged = {
        "gone": None,
        "empty": b"",
        "torn": data[:-20],
        "flipped": data.replace(b'"sha256":"', b'"sha256":"x', 1),
        "zeros": b"\0" * len(data),
        "disagrees": lines.encode(json.dumps(lie).encode()[:-1]) + data.split(b"\n")[1] + b"\n",
        "garbage": data.replace(b"\n", b"\nxx\n", 1),
    }[damage]
    if damaged is None:
        files.remove(MANIFEST)
    else:
        files.put(MANIFEST, damaged)
    store, warnings = reopen(files)

    assert list(store.done) == list(range(11))
    # An empty manifest and two shards that it does not list are also what a crash leaves.
    assert any(str(MANIFEST) in w for w in warnings) == (damage != "empty")
    assert audit.manifest(files) == {entry["seq"]: entry for entry in audit.whole_lines(data)}
    quiet_after(files)


GOOD = [b"%d\n" % n for n in range(11)]


@pytest.mark.parametrize(
    ("damaged", "what"),
    [
        (None, "11 records without a line"),
        (b"", "11 records without a line"),
        (b"\0" * 4096, "11 records without a line, 1 lines that are no number"),
        (b"".join(GOOD[:-1]), "1 records without a line"),
        (b"".join(GOOD)[:-1], "1 records without a line, 1 lines that are no number"),
        (b"".join(GOOD)[:-2], "1 records without a line, 1 lines that are no number"),
        (
            b"".join([*GOOD, b"99999\n", b"-1\n", b"3\n"]),
            "1 lines without .*, 1 repeated lines, 1 lines that are",
        ),
        (b"".join([*GOOD[:5], b"what?\n", *GOOD[5:]]), "had 1 lines that are no number"),
        (b"".join([*GOOD, b"\n"]), "had 1 lines that are no number"),
        (b"".join([*GOOD, b"9" * 5000 + b"\n"]), "had 1 lines that are no number"),
        (b"".join([*GOOD, b"999999999999999999\n"]), "had 1 lines without a record"),
        (b"1_0\n" + b"".join(GOOD), "had 1 lines that are no number"),
    ],
)
def test_done_indices_are_held_against_the_shards_and_put_right(files, damaged, what):
    if damaged is None:
        files.remove(DONE_INDICES)
    else:
        files.put(DONE_INDICES, damaged)
    store, warnings = reopen(files)

    assert list(store.done) == list(range(11))
    assert len(warnings) == 1
    assert re.search(what, warnings[0])
    assert files.read(DONE_INDICES) == b"".join(GOOD)
    quiet_after(files)


def test_the_order_in_done_indices_does_not_matter(files):
    files.put(DONE_INDICES, b"".join(reversed(GOOD)))

    assert reopen(files)[1] == []


def test_a_lost_shard_is_named_and_its_prompts_run_again_under_a_new_number(files):
    files.remove(SEALED[1])
    store, warnings = reopen(files)

    assert list(store.done) == [0, 1, 2, 3, 8, 9, 10]
    assert any(str(SEALED[1]) in w and "4 records" in w for w in warnings)
    files.remove(OPEN)
    reopen(files)
    assert OPEN.name in files.sizes(SHARDS)


@pytest.mark.parametrize("how", ["folder", "contents"])
@pytest.mark.parametrize("left", [DONE_INDICES, MANIFEST])
def test_a_run_whose_shards_are_gone_does_not_begin_from_zero(files, how, left):
    if how == "folder":
        files.remove(SHARDS)
    else:
        for name in files.sizes(SHARDS):
            files.remove(SHARDS / name)
    files.remove(MANIFEST if left == DONE_INDICES else DONE_INDICES)
    begin = len(files.log)

    with pytest.raises(StoreError, match=str(SHARDS)):
        reopen(files)
    assert len(files.log) == begin


def test_leftovers_are_removed_and_foreign_files_are_not(files):
    files.put(FOLDER / "run.json.tmp", b"x")
    files.put(SHARDS / "part-000000.jsonl.tmp", b"x")
    files.put(SHARDS / "part-0000001.jsonl", b"x")
    files.put(SHARDS / "notes.txt", b"x")
    store, _ = reopen(files)

    assert "run.json.tmp" not in files.sizes(FOLDER)
    assert min(files.sizes(SHARDS)) == "notes.txt"
    assert len(files.sizes(SHARDS)) == 5
    assert list(store.done) == list(range(11))


def test_a_torn_failure_is_asked_again(files):
    files.put(FAILED, files.read(FAILED)[:-5])
    store, warnings = reopen(files)

    assert store.failed_for_good_count == 1
    assert [line["index"] for line in audit.whole_lines(files.read(FAILED))] == [20]
    assert any(str(FAILED) in w for w in warnings)
    quiet_after(files)


def test_a_success_beats_a_failure_and_the_last_failure_counts(files):
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=pytest.fail, retry_failed=True)
    store.commit(group(20, failures=[given_up(21, for_good=True)]))
    live = store.failed_for_good_count
    store.close()
    store, _ = reopen(files)

    assert live == store.failed_for_good_count == 1
    assert 20 in store.done
    assert list(store.skip) == [*range(11), 20, 21]


def test_what_was_found_is_synced_before_it_is_trusted():
    files = MemoryFiles([FOLDER])
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(0))
    files.lazy = {"sync"}
    store.commit(group(1))
    files.lazy = set()
    store.close()
    after = files.kill()
    store, _ = reopen(after)

    assert list(store.done) == [0, 1]
    audit.check(after.crash(), [0, 1])


def test_a_start_that_the_disk_refuses_at_any_step_damages_nothing(files):
    files.put(OPEN, files.read(OPEN)[:-5])
    part = files.read(SEALED[0]).split(b"\n")
    files.put(SEALED[0], b"\n".join([part[0], part[1][:-9], *part[2:]]))
    files.put(SHARDS / "part-000003.jsonl.open", b"")
    files.put(DONE_INDICES, b"1\n2")
    files.put(FOLDER / "run.json.tmp", b"")
    files.remove(MANIFEST)
    whole = files.kill()
    store, _ = reopen(whole)
    assert list(store.done) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len(whole.log) > 20

    for step in range(len(whole.log)):
        refused = files.kill()
        refused.refuse_step = (step, errno.ENOSPC)
        with pytest.raises(DiskFull):
            reopen(refused)
        assert refused.open_count == 0
        for after in (refused.crash(), refused.kill()):
            assert list(reopen(after)[0].done) == list(store.done)
            quiet_after(after)


def test_a_real_folder_recovers_like_the_model(tmp_path):
    files = OsFiles()
    store = Store.open(tmp_path, files, shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(*range(11)))
    store.close()
    torn = tmp_path / "shards" / OPEN.name
    torn.write_bytes(torn.read_bytes()[:-3])
    (tmp_path / ".done_indices").write_bytes(b"\0" * 100)
    (tmp_path / "manifest.jsonl").unlink()
    (tmp_path / "x.tmp").write_bytes(b"")
    store, warnings = reopen(files, tmp_path)

    assert list(store.done) == list(range(10))
    assert len(warnings) == 3
    audit.check_at_rest(files, tmp_path)
    assert reopen(files, tmp_path)[1] == []


# What the manifest lists is believed after a look at its ends, and mended by replacing it.


def recover(files, folder=FOLDER, *, deep=False) -> list[str]:
    """A recovery without a store around it; what it told."""
    warnings: list[str] = []
    state = Recovery(
        folder, files, shard_records=4, epoch=7, warn=warnings.append, guard=lambda: None, deep=deep
    ).run()
    for appender in (state.journal, state.manifest, state.failures, state.done_indices):
        appender.close()
    return warnings


def protected(files) -> None:
    """Sealed shards as the store leaves them."""
    for path in SEALED:
        files.make_read_only(path)


def is_read_only(files, path) -> bool:
    try:
        files.close(files.open_append(path, new=False))
    except PermissionError:
        return True
    return False


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"\0" * len(data),
        lambda data: b"\0" * 40 + data[40:],
        lambda data: data[:-40] + b"\0" * 40,
        lambda data: data[:-1] + b" ",
        lambda data: b" " + data[1:],
    ],
)
def test_a_sealed_shard_that_kept_its_length_and_lost_its_ends_is_read_and_mended(files, damage):
    data = files.read(SEALED[0])
    files.put(SEALED[0], damage(data))
    protected(files)
    store, warnings = reopen(files)

    assert set(range(4, 11)) <= set(store.done)
    assert len(store.done) < 11
    assert [w for w in warnings if str(SEALED[0]) in w and "begin and end" in w]
    assert is_read_only(files, SEALED[0])
    assert sum(files.sizes(FOLDER / "quarantine").values()) + files.sizes(SHARDS)[SEALED[0].name] == len(data)
    quiet_after(files)


def test_bytes_behind_those_that_were_sealed_are_cut_off_and_kept_aside(files):
    sealed = files.read(SEALED[0])
    doubled = files.read(SEALED[1])[:-9]
    before = files.read(MANIFEST)
    files.put(SEALED[0], sealed + doubled)
    protected(files)
    store, warnings = reopen(files)

    assert list(store.done) == list(range(11))
    assert len(warnings) == 1
    assert files.read(SEALED[0]) == sealed
    assert files.read(FOLDER / "quarantine" / f"{SEALED[0].name}@{len(sealed)}") == doubled
    assert files.read(MANIFEST) == before
    assert is_read_only(files, SEALED[0])
    audit.check(files.crash(), range(11))
    quiet_after(files)


def test_a_longer_shard_whose_first_bytes_are_others_is_read_and_mended(files):
    data = files.read(SEALED[0])
    files.put(SEALED[0], data.replace(b"answer to 1", b"answer to X") + data[:30])
    store, warnings = reopen(files)

    assert list(store.done) == [0, *range(2, 11)]
    assert any("DAMAGED" in w for w in warnings)
    quiet_after(files)


@pytest.mark.parametrize("damage", ["torn", "damaged", "unlisted"])
def test_a_sealed_shard_is_never_opened_for_writing(files, damage):
    data = files.read(SEALED[0])
    part = data.split(b"\n")
    damaged = {"torn": data[:-5], "damaged": b"\n".join([part[0], b"x", *part[2:]]), "unlisted": data}
    files.put(SEALED[0], damaged[damage])
    if damage == "unlisted":
        files.put(MANIFEST, files.read(MANIFEST).split(b"\n")[1] + b"\n")
    protected(files)
    begin = len(files.log)
    reopen(files)

    steps = [method for method, name in files.log[begin:] if name == SEALED[0].name]
    assert "sync" in steps or ("rename", f"{SEALED[0].name}.tmp") in files.log[begin:]
    assert "truncate" not in steps
    assert is_read_only(files, SEALED[0])
    quiet_after(files)


def test_a_shard_is_made_read_only_only_when_its_name_is_durable(files, monkeypatch):
    files.put(SHARDS / "part-000003.jsonl.open", b"")
    order = []
    make_read_only = files.make_read_only

    def noted(path):
        order.append(list(files.log))
        make_read_only(path)

    monkeypatch.setattr(files, "make_read_only", noted)
    reopen(files)

    assert is_read_only(files, SHARDS / "part-000002.jsonl")
    (steps,) = order
    assert steps.index(("rename", OPEN.name)) < len(steps) - 1 - steps[::-1].index(("sync_folder", "shards"))


AS_NOBODY = """
import os
from pathlib import Path
from genpipe.edges.files import OsFiles
from genpipe.edges.recovery import Recovery
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
Recovery(Path(), OsFiles(), shard_records=4, epoch=1, warn=print, guard=lambda: None).run()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to become somebody whom a read-only file stops")
@pytest.mark.parametrize(("cut", "lines_left"), [(-5, 3), (-500, 2)])
def test_a_read_only_shard_is_mended_by_somebody_who_is_not_root(tmp_path, cut, lines_left):
    store = Store.open(tmp_path, OsFiles(), shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(*range(9)))
    store.close()
    sealed = tmp_path / "shards" / "part-000000.jsonl"
    sealed.chmod(0o644)
    sealed.write_bytes(sealed.read_bytes()[:cut])
    sealed.chmod(0o444)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 65534, 65534)
    # From within, because the folders above are root's alone.
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert done.returncode == 0, done.stderr
    assert "manifest says" in done.stdout
    assert sealed.stat().st_mode & 0o777 == 0o444
    assert [record["index"] for record in audit.whole_lines(sealed.read_bytes())] == [0, 1, 2][:lines_left]


# A deep recovery believes nothing.


def sound_after(files) -> None:
    """Nothing is left to be done, each index stands once on disk, and a deep look finds no more."""
    assert max(audit.counts(files).values(), default=1) == 1
    audit.check_at_rest(files)
    assert recover(files, deep=True) == []
    assert recover(files) == []


def test_a_deep_recovery_of_a_sound_folder_changes_nothing_and_says_nothing(files):
    protected(files)
    before = {path: files.read(path) for path in (*SEALED, OPEN, MANIFEST, DONE_INDICES, FAILED)}

    assert recover(files, deep=True) == []
    assert {path: files.read(path) for path in before} == before
    assert {path.name for path in SEALED} <= set(files.reads)


def test_a_deep_recovery_finds_a_changed_byte_in_a_shard_of_the_right_length(files):
    data = files.read(SEALED[1])
    files.put(SEALED[1], data.replace(b"answer to 5", b"answer to 6"))
    assert recover(files) == []
    warnings = recover(files, deep=True)

    assert 5 not in audit.counts(files)
    assert any("DAMAGED" in w and str(SEALED[1]) in w for w in warnings)
    assert any("listed again, with 3 records where there were 4" in w for w in warnings)
    sound_after(files)


def test_a_deep_recovery_lists_sound_lines_again_that_are_not_those_that_were_sealed(files):
    part = files.read(SEALED[1]).splitlines(keepends=True)
    members = lines.body_of(part[1])[:-1].replace(b"answer to 5", b"Answer to 5")
    files.put(SEALED[1], b"".join([part[0], lines.encode(members), *part[2:]]))
    warnings = recover(files, deep=True)

    assert len(warnings) == 1
    assert "listed again, with 4 records where there were 4" in warnings[0]
    sound_after(files)


def test_a_deep_recovery_corrects_sums_and_indices_that_only_the_manifest_has_wrong(files):
    entry = json.loads(files.read(MANIFEST).split(b"\n")[0])
    del entry["_c"]
    entry["sums"]["output_tokens"] += 1
    files.put(MANIFEST, files.read(MANIFEST) + lines.encode(json.dumps(entry).encode()[:-1]))
    warnings = recover(files, deep=True)

    assert any("listed again" in w for w in warnings)
    assert audit.manifest(files)[0]["sums"]["output_tokens"] == 10 + 11 + 12 + 13
    sound_after(files)


def test_a_deep_recovery_leaves_each_index_once_on_disk(files):
    first, second = files.read(SEALED[0]), files.read(SEALED[1])
    part = second.splitlines(keepends=True)
    files.put(SEALED[1], part[0] + first[: first.index(b"\n") + 1] + part[1] + part[1] + part[2] + part[3])
    files.put(OPEN, first + files.read(OPEN))
    warnings = recover(files, deep=True)

    assert audit.counts(files) == dict.fromkeys(range(11), 1)
    assert files.read(SEALED[0]) == first
    assert files.read(SEALED[1]) == second
    assert sum("stand before them" in w for w in warnings) == 2
    quarantine = FOLDER / "quarantine"
    kept = b"".join(files.read(quarantine / name) for name in sorted(files.sizes(quarantine)))
    assert sorted(record["index"] for record in audit.whole_lines(kept)) == [0, 0, 1, 2, 3, 5]
    sound_after(files)


def test_a_deep_recovery_cuts_a_longer_shard_back_and_still_reads_it(files):
    data = files.read(SEALED[0])
    files.put(SEALED[0], data + b"more")
    warnings = recover(files, deep=True)

    assert len(warnings) == 1
    assert "behind" in warnings[0]
    assert files.read(SEALED[0]) == data
    sound_after(files)


def test_a_deep_recovery_forgets_a_shard_that_is_gone_and_keeps_the_manifest_as_it_was(files):
    before = files.read(MANIFEST)
    files.remove(SEALED[1])
    warnings = recover(files, deep=True)

    assert any("is gone" in w for w in warnings)
    assert any(str(MANIFEST) in w and "no longer" in w for w in warnings)
    assert files.read(FOLDER / "quarantine" / "manifest.jsonl@0") == before
    assert list(audit.manifest(files)) == [0]
    sound_after(files)


def test_the_number_of_a_lost_shard_is_not_given_again_by_a_deep_recovery(files):
    files.remove(OPEN)
    files.remove(SEALED[1])
    recover(files, deep=True)

    assert sorted(files.sizes(SHARDS)) == [SEALED[0].name, OPEN.name]
    sound_after(files)


def test_a_deep_recovery_mends_the_history_of_segments(files):
    segments = FOLDER / "segments.jsonl"
    good = [lines.encode(b'{"segment":%d' % n) for n in (1, 2)]
    files.put(segments, good[0] + b"what?\n" + good[1] + b'{"segm')
    warnings = recover(files, deep=True)

    assert any(str(segments) in w and "DAMAGED" in w for w in warnings)
    assert files.read(segments) == b"".join(good)
    sound_after(files)


def test_a_deep_recovery_that_loses_power_at_any_step_loses_no_record(files):
    first = files.read(SEALED[0])
    files.put(SEALED[1], files.read(SEALED[1]) + first)
    files.put(OPEN, files.read(OPEN)[:-5])
    part = first.splitlines(keepends=True)
    files.put(SEALED[0], b"".join([part[0], b"x" * 9 + b"\n", *part[1:]]))
    whole = files.kill()
    recover(whole, deep=True)
    steps = len(whole.log)
    sound_after(whole)
    assert steps > 20

    for step in range(steps):
        cut = files.kill()
        cut.stop_before = step
        with pytest.raises(PowerLoss):
            recover(cut, deep=True)
        for after in (cut.crash(), cut.kill()):
            recover(after, deep=True)
            assert set(audit.counts(after)) == set(range(10))
            sound_after(after)


# Shards that are in S3, by what uploads.jsonl says of them.

UPLOADS = FOLDER / "uploads.jsonl"
RESTORED = FOLDER / "restored.jsonl"


def line(index) -> bytes:
    return encode_finished(finished(index), WALL, None)


def entry_of(seq, *rows) -> Entry:
    return Tally.of(map(line, rows)).entry(seq, 1)


def commits(*entries) -> bytes:
    return encode_all(
        Commit(
            number=number,
            run_id="r" * 32,
            entry=entry,
            key=f"w00/shards/{entry.seq}",
            object_bytes=1,
            epoch=1,
            nonce="ab",
        )
        for number, entry in enumerate(entries)
    )


def start(files, **options) -> tuple[Store, list[str]]:
    """Start and close; whatever was there before, all is as it must be after a start."""
    warnings: list[str] = []
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=warnings.append, **options)
    store.close()
    away = [
        commit.entry
        for commit in map(Commit.decode, files.read(UPLOADS).splitlines(keepends=True))
        if commit is not None and f"part-{commit.entry.seq:06d}.jsonl" not in files.sizes(SHARDS)
    ]
    here = audit.counts(files)
    there = [index for entry in away for index in entry.indices()]
    assert max(here.values(), default=1) == 1
    assert not set(here) & set(there)
    assert sorted(audit.listed(files)) == list(store.done) == sorted([*here, *there])
    assert store.sums.records == len(store.done)
    assert store.sums.output_tokens == sum(10 + index for index in store.done)
    sealed = {name for name in audit.records(files) if not name.endswith(".open")}
    entries = audit.manifest(files)
    assert {entry["file"] for entry in entries.values()} == sealed | {
        f"part-{entry.seq:06d}.jsonl" for entry in away
    }
    for entry in entries.values():
        assert entry["sums"]["output_tokens"] == sum(
            10 + index for first, last in entry["indices"] for index in range(first, last + 1)
        )
    assert not files.exists(RESTORED)
    assert len(audit.records(files)) - len(sealed) <= 1
    return store, warnings


def silent(files) -> Store:
    """A start that has nothing left to say."""
    store, warnings = start(files)
    assert warnings == []
    return store


@pytest.fixture
def away() -> MemoryFiles:
    """A folder that knows of two shards in S3 and has nothing else."""
    files = MemoryFiles([FOLDER])
    files.put(UPLOADS, commits(entry_of(0, 0, 1, 2, 3), entry_of(1, 9, 5, 6, 7)))
    return files


def test_shards_that_are_elsewhere_are_done_listed_and_missed_by_nobody(away):
    store = silent(away)

    assert list(store.done) == [0, 1, 2, 3, 5, 6, 7, 9]
    assert store.unsent == []
    assert list(away.sizes(SHARDS)) == ["part-000002.jsonl.open"]
    assert silent(away).done == store.done


def test_a_folder_that_needs_no_shards_of_its_own_is_not_taken_for_one_that_lost_them(away):
    store = Store.open(FOLDER, away, shard_records=4, wall=WALL, warn=pytest.fail)
    store.seal_last()
    store.close()
    assert away.sizes(SHARDS) == {}
    silent(away)
    away.remove(SHARDS)
    away.put(FOLDER / "segments.jsonl", lines.encode(b'{"segment":1'))

    assert len(silent(away).done) == 8


@pytest.mark.parametrize("what", ["manifest", "done_indices"])
def test_a_folder_whose_own_shards_are_gone_is_still_refused(away, what):
    store = Store.open(FOLDER, away, shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(*range(20, 26) if what == "manifest" else [20, 21]))
    store.close()
    away.remove(SHARDS)
    away.remove(FOLDER / (".done_indices" if what == "manifest" else "manifest.jsonl"))

    with pytest.raises(StoreError, match="is gone"):
        start(away)


def test_the_next_number_is_beyond_all_that_was_listed_found_or_committed(away):
    away.put(UPLOADS, commits(entry_of(0, 0), entry_of(7, 1)))
    silent(away)
    assert list(away.sizes(SHARDS)) == ["part-000008.jsonl.open"]
    away.put(MANIFEST, away.read(MANIFEST) + entry_of(11, 30).encode())
    store, warnings = start_with_lost(away)

    assert ["part-000011.jsonl is gone" in warning for warning in warnings] == [True]
    assert list(away.sizes(SHARDS)) == ["part-000012.jsonl.open"]
    assert list(store.done) == [0, 1]


def start_with_lost(files) -> tuple[Store, list[str]]:
    warnings: list[str] = []
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=warnings.append)
    store.close()
    return store, warnings


def test_a_shard_of_the_folder_that_is_gone_is_no_loss_where_s3_has_it(files):
    files.put(UPLOADS, commits(entry_of(0, 0, 1, 2, 3)))
    files.remove(SEALED[0])
    store = silent(files)

    assert list(store.done) == list(range(11))
    assert [entry.seq for entry in store.unsent] == [1]


def test_without_any_uploads_all_sealed_shards_are_unsent_and_empty_ones_are_not_worth_it(files):
    files.put(SHARDS / "part-000000.jsonl", b"")
    store, _ = reopen(files)

    assert [entry.seq for entry in store.unsent] == [1]


def test_a_damaged_list_of_uploads_is_told_of_and_half_a_line_is_not(files):
    whole = commits(entry_of(0, 0, 1, 2, 3), entry_of(1, 4, 5, 6, 7))
    files.put(UPLOADS, whole[:-9])
    assert [entry.seq for entry in silent(files).unsent] == [1]
    files.put(UPLOADS, whole.replace(b'"number":0', b'"number":7'))
    store, warnings = start(files)

    assert [str(UPLOADS) in warning for warning in warnings] == [True]
    assert [entry.seq for entry in store.unsent] == [0]


def test_two_commits_that_overlap_count_each_prompt_once(away):
    whole = commits(entry_of(0, 0, 1), entry_of(1, 1, 2), entry_of(0, 0, 1), entry_of(0, 5, 6))
    away.put(UPLOADS, whole)
    warnings: list[str] = []
    store = Store.open(FOLDER, away, shard_records=4, wall=WALL, warn=warnings.append)
    store.close()

    assert list(store.done) == [0, 1, 2, 5, 6]
    assert (store.sums.records, store.sums.usage_unknown) == (5, 1)
    assert audit.manifest(away)[0]["indices"] == [[0, 1]]
    assert warnings == []


def test_a_sealed_shard_that_s3_has_under_another_number_is_behind(files):
    files.put(UPLOADS, commits(entry_of(5, 0, 1, 2, 3)))

    with pytest.raises(Fenced, match=r"part-000000\.jsonl are not.*4 of their 4"):
        start(files)


def test_a_refused_start_has_changed_nothing_and_opened_nothing(files):
    files.put(UPLOADS, commits(entry_of(1, 20, 21)))
    files.put(OPEN, files.read(OPEN)[:-5])
    files.put(FOLDER / "x.tmp", b"")
    files.put(RESTORED, line(30))
    files.remove(MANIFEST)
    begin = len(files.log)

    with pytest.raises(Fenced) as caught:
        start(files)
    assert str(FOLDER) in str(caught.value)
    assert "S3 has 0 of their 4 records" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (files.log[begin:], files.open_count) == ([], 0)


def test_many_shards_that_fell_behind_are_told_of_in_one_line(away):
    silent(away)
    for seq in range(20, 40):
        away.put(SHARDS / f"part-{seq:06d}.jsonl", line(seq) + line(9) + line(seq + 100))
    away.put(MANIFEST, away.read(MANIFEST))

    with pytest.raises(Fenced, match=r"and 15 more are not.* 20 of their 60 records"):
        start(away)


@pytest.mark.parametrize("damage", [lambda data: data + b"more", lambda data: data + data[:40]])
def test_bytes_behind_a_shard_that_was_sent_are_cut_off_as_ever(files, damage):
    files.put(UPLOADS, commits(entry_of(0, 0, 1, 2, 3)))
    files.put(SEALED[0], damage(files.read(SEALED[0])))
    store, warnings = start(files)

    assert len(warnings) == 1
    assert "behind" in warnings[0]
    assert [entry.seq for entry in store.unsent] == [1]


def test_an_open_twin_of_a_shard_that_was_sent_gets_a_number_of_its_own_as_ever(files):
    files.put(UPLOADS, commits(entry_of(0, 0, 1, 2, 3), entry_of(1, 4, 5, 6, 7)))
    files.put(SHARDS / "part-000001.jsonl.open", line(30))
    store, warnings = start(files)

    assert "sealed twin" in warnings[0]
    assert 30 in store.done
    assert "part-000003.jsonl.open" in files.sizes(SHARDS)


def test_an_open_shard_that_s3_has_as_it_is_is_sealed(files):
    files.put(UPLOADS, commits(entry_of(2, 8, 9, 10)))
    store = silent(files)

    assert OPEN.name.removesuffix(".open") in files.sizes(SHARDS)
    assert [entry.seq for entry in store.unsent] == [0, 1]


# Records that were brought from the tail of another machine.


def test_restored_records_go_on_with_the_shard_that_grows_and_fill_the_next(files):
    files.put(UPLOADS, commits(entry_of(7, 20, 21, 22, 23)))
    files.put(RESTORED, b"".join(map(line, [9, 30, 21, 31, 30, 32, 33, 34, 35, 36, 37])))
    store = silent(files)

    assert list(store.done) == [*range(11), 20, 21, 22, 23, *range(30, 38)]
    assert [entry.seq for entry in store.unsent] == [0, 1, 2, 8]
    assert {name: len(part) for name, part in audit.records(files).items()} == {
        "part-000000.jsonl": 4,
        "part-000001.jsonl": 4,
        "part-000002.jsonl": 3,
        "part-000008.jsonl": 4,
        "part-000009.jsonl.open": 4,
    }


def test_restored_records_that_fit_are_appended_and_the_shard_goes_on_growing(files):
    files.put(UPLOADS, b"")
    files.put(RESTORED, line(30))
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=pytest.fail)
    store.commit(group(31))
    store.seal_last()
    store.close()

    assert [record["index"] for record in audit.records(files)["part-000002.jsonl"]] == [8, 9, 10, 30]
    assert [record["index"] for record in audit.records(files)["part-000003.jsonl"]] == [31]
    assert silent(files).sums.output_tokens == sum(10 + index for index in (*range(11), 30, 31))


def test_restored_lines_that_do_not_count_are_told_of_and_left_out(away):
    away.put(RESTORED, line(30)[:-9] + b"\n" + line(31))
    store, warnings = start(away)

    assert 31 in store.done
    assert 30 not in store.done
    assert [str(RESTORED) in warning for warning in warnings] == [True]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("step", ["write", "sync"])
def test_restored_records_that_the_disk_refuses_wait_for_the_next_start(away, step, error):
    away.put(RESTORED, line(30) + line(31))
    away.refuse[step, "part-000002.jsonl.open"] = error
    with pytest.raises(StoreError):
        start(away)
    assert away.open_count == 0
    assert away.exists(RESTORED)
    away.refuse.clear()
    for after in (away.kill(), away.crash()):
        assert {30, 31} <= set(silent(after).done)


def killed_at_each_step(files, act, *, acts_again=None) -> int:
    """Let the power go, and a kill come, before each step; a start after that finds every record once."""
    whole = files.kill()
    act(whole)
    expected = silent(whole).done
    steps = len(whole.log)
    tried = 0
    for step in range(steps):
        cut = files.kill()
        cut.stop_before = step
        try:
            act(cut)
        except PowerLoss:
            tried += 1
        for after in (cut.kill(), cut.crash(), *(cut.crash(Random(seed)) for seed in range(4))):
            (acts_again or act)(after)
            assert silent(after).done == expected
            assert silent(after).done == expected
    return tried


@pytest.mark.slow
def test_a_kill_at_any_step_of_a_start_takes_each_restored_record_in_once(files):
    files.put(UPLOADS, commits(entry_of(7, 20, 21, 22, 23), entry_of(0, 0, 1, 2, 3)))
    files.remove(SEALED[0])
    files.put(OPEN, files.read(OPEN)[:-9])
    files.put(RESTORED, b"".join(map(line, [9, 30, 21, 31, 10, 32, 33, 34, 35, 36, 37, 38])))
    files.put(DONE_INDICES, b"1\n2")

    def act(disk):
        disk.write_max = 700
        start(disk)

    assert killed_at_each_step(files, act) > 40


def test_a_kill_at_any_step_of_a_new_machines_first_start_costs_nothing(away):
    away.put(RESTORED, b"".join(map(line, range(30, 36))))

    assert killed_at_each_step(away, start) > 15


@pytest.mark.slow
def test_a_kill_at_any_step_of_a_repair_of_an_overtaken_folder_costs_nothing(files):
    files.put(
        UPLOADS,
        commits(entry_of(0, 3, 2, 1, 40), entry_of(1, 41, 42), entry_of(3, 9, 43, 44), entry_of(4, 4)),
    )
    files.put(RESTORED, line(50) + line(40) + line(8))

    def act(disk):
        recover(disk, deep=True)

    def start_or_repair(disk):
        try:
            start(disk)
        except Fenced:
            act(disk)

    assert killed_at_each_step(files, act, acts_again=act) > 40
    assert killed_at_each_step(files, act, acts_again=start_or_repair) > 40
    act(files)
    store = silent(files)
    assert list(store.done) == [*range(11), *range(40, 45), 50]
    assert max(audit.manifest(files)) > 4
    quarantine = FOLDER / "quarantine"
    kept = b"".join(files.read(quarantine / name) for name in files.sizes(quarantine) if "part" in name)
    assert sorted(record["index"] for record in audit.whole_lines(kept)) == [1, 2, 3, 4, 9]


def test_a_deep_recovery_of_a_folder_that_s3_knows_changes_nothing_and_says_nothing(files):
    files.put(UPLOADS, commits(entry_of(0, 0, 1, 2, 3), entry_of(1, 4, 5, 6, 7), entry_of(9, 30)))
    silent(files)
    paths = [MANIFEST, DONE_INDICES, *(SHARDS / name for name in files.sizes(SHARDS))]
    before = [files.read(path) for path in paths]

    assert recover(files, deep=True) == []
    assert [files.read(path) for path in paths] == before


def test_a_deep_recovery_keeps_what_is_elsewhere_in_the_manifest_and_forgets_what_is_gone(files):
    files.put(UPLOADS, commits(entry_of(0, 0, 1, 2, 3)))
    files.remove(SEALED[0])
    files.remove(SEALED[1])
    recover(files, deep=True)

    assert list(audit.manifest(files)) == [0]
    assert list(silent(files).done) == [0, 1, 2, 3, 8, 9, 10]
