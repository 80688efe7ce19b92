"""What a start makes of a damaged, half-written or meddled-with run folder."""

import errno
import json
import re

import pytest

from genpipe.core.errors import DiskFull, StoreError
from genpipe.edges import lines
from genpipe.edges.files import OsFiles
from genpipe.edges.store import Store
from tests.edges import audit
from tests.edges.audit import FOLDER
from tests.edges.memory_files import MemoryFiles
from tests.edges.samples import WALL, given_up, group

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
    assert store.next_seq == 2
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
    store, warnings = reopen(files)

    assert warnings == []
    assert store.next_seq == 2
    assert files.sizes(SHARDS)[OPEN.name] == 0


def test_a_full_shard_that_was_not_renamed_is_sealed(files):
    files.put(SHARDS / "part-000001.jsonl.open", files.read(SEALED[1]))
    files.remove(SEALED[1])
    files.remove(OPEN)
    files.put(MANIFEST, files.read(MANIFEST).split(b"\n")[0] + b"\n")
    files.put(DONE_INDICES, b"".join(b"%d\n" % n for n in range(8)))
    store, warnings = reopen(files)

    assert warnings == []
    assert store.next_seq == 2
    quiet_after(files)


def test_of_two_open_shards_the_older_is_sealed(files):
    files.put(SHARDS / "part-000003.jsonl.open", b"")
    store, warnings = reopen(files)

    assert warnings == []
    assert store.next_seq == 3
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


def test_of_two_records_of_a_prompt_the_earlier_shards_counts(files):
    files.put(SHARDS / "part-000003.jsonl", files.read(SEALED[0]) + files.read(OPEN))
    store, warnings = reopen(files)

    assert list(store.done) == list(range(11))
    assert sum("an earlier shard has" in w for w in warnings) == 1
    assert reopen(files)[0].sums.output_tokens == sum(range(10, 21))


def test_of_two_records_of_a_prompt_in_one_shard_the_first_counts(files):
    files.put(OPEN, files.read(OPEN) + files.read(OPEN).split(b"\n")[0] + b"\n")
    warnings: list[str] = []
    store = Store.open(FOLDER, files, shard_records=9, wall=WALL, warn=warnings.append)

    assert store.sums.records == 11
    assert any("more lines than prompts" in w for w in warnings)
    store.commit(group(*range(30, 35)))
    store.close()
    assert audit.manifest(files)[2]["count"] == 8
    assert reopen(files, shard_records=9)[0].sums.records == 16


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
    assert any(str(MANIFEST) in w for w in warnings)
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
    assert reopen(files)[0].next_seq == 2


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

    assert (store.failed_now_count, store.failed_for_good_count) == (1, 1)
    assert any(str(FAILED) in w for w in warnings)
    quiet_after(files)


def test_a_success_beats_a_failure_and_the_last_failure_counts(files):
    store = Store.open(FOLDER, files, shard_records=4, wall=WALL, warn=pytest.fail, retry_failed=True)
    store.commit(group(20, failures=[given_up(21, for_good=True)]))
    live = (store.failed_now_count, store.failed_for_good_count)
    store.close()
    store, _ = reopen(files)

    assert live == (store.failed_now_count, store.failed_for_good_count) == (1, 1)
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
