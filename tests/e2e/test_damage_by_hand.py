"""Whatever was done to the files of a half-done run: the next start mends it and says so, or refuses by name.

Never from zero without a word, no record doubled, and nothing asked again whose record is there and whole.
"""

import json
import shutil
import signal

import pytest

from tests.e2e.half_done import Again, begin, failed_for_good
from tests.e2e.harness import audit, contents, genpipe, progress, saved, servers
from tests.edges.audit import whole_lines

ROWS, ROWS_AT_FIRST = 60, 30
TOO_LONG, BROKEN = 3, 5


def text_of(place):
    if place == TOO_LONG:
        return f"Zeile {place}: größer 🙂? <<status=400 why=too_long>>"
    if place == BROKEN:
        return f"Zeile {place}: größer 🙂? <<status=500>>"
    return f"Zeile {place}: größer 🙂? <<tokens=5 delay={60 if place % 5 in (2, 4) else 0}>>"


TEXTS = [text_of(place) for place in range(ROWS)]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that was stopped in good order, and begun again with more prompts and killed."""
    folder = tmp_path_factory.mktemp("begun")
    begin(folder, TEXTS[:ROWS_AT_FIRST], records=16, failed=2, stop=signal.SIGTERM)
    begin(folder, TEXTS, records=34, failed=2)
    assert failed_for_good(folder / "out") == [TOO_LONG]
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with servers(tmp_path_factory.mktemp("fleet"), orders=False) as fleet:
        yield fleet


@pytest.fixture
def again(begun, fleet, tmp_path):
    """A copy to be damaged."""
    return Again(begun, tmp_path / "out", fleet, TEXTS)


def path_of(again, name):
    """A file of the run folder; ``sealed`` and ``open`` are a full shard and the one that grows."""
    if name == "sealed":
        return again.out / "shards" / "part-000000.jsonl"
    if name == "open":
        (path,) = (again.out / "shards").glob("*.open")
        return path
    return again.out / name


# ---- one file, damaged in one way ----


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def with_garbage(data):
    middle = data.find(b"\n", len(data) // 2) + 1
    return data[:middle] + b"no \xff line\n" + data[middle:]


DAMAGES = {
    "empty": lambda data: b"",
    # A little less than half: lines of one length could make half of them a whole number of lines.
    "half": lambda data: data[: len(data) // 2 - 7],
    "a byte short": lambda data: data[:-1],
    "zeroed": lambda data: bytes(len(data)),
    "nuls at the end": lambda data: data + bytes(4096),
    "a flipped byte": flipped,
    "a garbage line": with_garbage,
    "cut in a character": lambda data: data[: data.rfind("🙂".encode()) + 2],
    "missing": None,
}

RECORD_FILES = ("sealed", "open")
FILES = (".done_indices", "manifest.jsonl", "segments.jsonl", "failed.jsonl", "input.idx", *RECORD_FILES)

NOT_TOLD = {
    # What a young run leaves looks the same, and no record hangs on it.
    ("failed.jsonl", "empty"),
    ("segments.jsonl", "empty"),
    ("segments.jsonl", "missing"),
    # Half a line at the end of a file that is never synced, and that can be made again.
    ("input.idx", "nuls at the end"),
    ("input.idx", "a byte short"),
}
TOLD_BY_THE_LIST = {
    # A shard cannot tell that it was longer, but `.done_indices` is never ahead of the shards.
    ("open", "empty"),
    ("open", "missing"),
}


def mendable():
    for name in FILES:
        for damage in DAMAGES:
            if damage == "cut in a character" and name not in RECORD_FILES:
                continue
            # By its length it is what the manifest says: such a shard is left to `genpipe verify`.
            if (name, damage) == ("sealed", "a flipped byte"):
                continue
            yield name, damage


@pytest.mark.parametrize(("name", "damage"), list(mendable()))
def test_damage_is_mended_and_told_and_only_what_is_lost_is_asked_again(again, name, damage):
    path = path_of(again, name)
    damage_it(path, damage)
    bad = [line for line in lines_of(path) if line not in good_lines_of(path)]
    there, still_failed = saved(again.out), failed_for_good(again.out)

    again.run()

    is_gone = (name, damage) == ("sealed", "missing")
    again.assert_completed(there, still_failed, gone=[path.name] if is_gone else [])
    if (name, damage) in NOT_TOLD:
        assert again.warnings == []
    else:
        told_of = again.out / ".done_indices" if (name, damage) in TOLD_BY_THE_LIST else path
        assert again.warned_of(told_of), again.ended.err
    if name in {"failed.jsonl", *RECORD_FILES}:
        kept = [file.read_bytes() for file in (again.out / "quarantine").glob("*")]
        assert [line for line in bad if not any(line in file for file in kept)] == []


def damage_it(path, damage):
    change = DAMAGES[damage]
    if change is None:
        path.unlink()
        return
    data = path.read_bytes()
    damaged = change(data)
    assert damaged != data
    path.write_bytes(damaged)


def lines_of(path):
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def good_lines_of(path):
    """The lines that count, as they stand in the file."""
    return [line for line in lines_of(path) if whole_lines(line)]


@pytest.mark.parametrize("damage", [each for each in DAMAGES if each != "cut in a character"])
@pytest.mark.parametrize("name", ["progress.json", ".lock"])
def test_what_only_people_read_may_be_damaged_in_any_way(again, name, damage):
    there, still_failed = saved(again.out), failed_for_good(again.out)
    damage_it(again.out / name, damage)

    again.run()

    again.assert_completed(there, still_failed)
    assert again.warnings == []


# ---- run.json ----


@pytest.mark.parametrize(
    "damage", ["empty", "half", "zeroed", "nuls at the end", "a garbage line", "missing"]
)
def test_a_run_whose_name_is_lost_is_refused(again, damage):
    damage_it(again.out / "run.json", damage)

    again.run()

    again.assert_refused(2, "run.json")


@pytest.mark.parametrize("near", [b"tiny-model", b'"dialect"', b'"settings"', b'"digest"'])
def test_a_flipped_byte_in_the_runs_settings_is_refused(again, near):
    path = again.out / "run.json"
    data = path.read_bytes()
    place = data.index(near) + 2
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])

    again.run()

    again.assert_refused(2, "run.json")


def test_a_missing_line_feed_at_the_end_of_the_runs_name_is_no_damage(again):
    there, still_failed = saved(again.out), failed_for_good(again.out)
    damage_it(again.out / "run.json", "a byte short")

    again.run()

    again.assert_completed(there, still_failed)
    assert again.warnings == []


@pytest.mark.parametrize(
    "edit",
    [
        {"format": 2},
        {"format": None},
        {"run_id": None},
        {"inputs": None},
        {"shard_records": None},
        {"shard_records": 0},
        {"shard_records": -5},
        {"shard_records": "10"},
        {"shard_records": 1.5},
        {"settings": None},
        {"settings": {}},
        {"settings": {"request": None}},
        {"digest": "0" * 16},
    ],
    ids=str,
)
def test_a_run_whose_name_was_edited_is_refused(again, edit):
    path = again.out / "run.json"
    run = {**json.loads(path.read_text()), **edit}
    path.write_text(json.dumps({key: value for key, value in run.items() if value is not None}))

    again.run()

    again.assert_refused(2, "run.json")


# ---- folders, twins, strangers ----


def test_shards_that_are_gone_are_an_unmounted_disk_and_no_new_run(again):
    shutil.rmtree(again.out / "shards")

    again.run()

    again.assert_refused(74, str(again.out / "shards"), "gone", "not mounted")


def test_an_empty_folder_of_shards_is_an_unmounted_disk_and_no_new_run(again):
    for path in (again.out / "shards").iterdir():
        path.unlink()

    again.run()

    again.assert_refused(74, str(again.out / "shards"), "empty", "not mounted")


def test_shards_that_are_gone_with_all_that_is_derived_are_no_new_run_either(again):
    shutil.rmtree(again.out / "shards")
    for name in (".done_indices", "manifest.jsonl", "progress.json", "input.idx"):
        (again.out / name).unlink()

    again.run()

    again.assert_refused(74, str(again.out / "shards"), "gone")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("run.json", 74),
        (".lock", 74),
        (".done_indices", 74),
        ("manifest.jsonl", 74),
        ("failed.jsonl", 74),
        ("segments.jsonl", 74),
        ("open", 74),
    ],
)
def test_a_folder_in_the_place_of_a_file_is_named_and_nothing_is_touched(again, name, code):
    path = path_of(again, name)
    path.unlink()
    path.mkdir()

    again.run()

    again.assert_refused(code, str(path))


@pytest.mark.parametrize("name", ["progress.json", "input.idx"])
def test_a_folder_in_the_place_of_a_file_that_nothing_hangs_on_is_one_warning(again, name):
    there, still_failed = saved(again.out), failed_for_good(again.out)
    path = again.out / name
    path.unlink()
    path.mkdir()

    again.run()

    assert again.ended.code == 1, again.ended.err
    assert len(again.warnings) == 1
    assert str(path) in again.warnings[0]
    assert again.asked == again.rows_but(*there, *still_failed)
    # The one that could not take the file's place.
    (again.out / "progress.json.tmp").unlink(missing_ok=True)
    audit(again.out, TEXTS, but=still_failed)


@pytest.mark.parametrize("copy", ["part-000000.jsonl.open", "part-000077.jsonl"])
def test_a_copy_of_a_shard_doubles_nothing_and_is_told(again, copy):
    there, still_failed = saved(again.out), failed_for_good(again.out)
    shutil.copy(path_of(again, "sealed"), again.out / "shards" / copy)

    again.run()

    assert any(copy in line for line in again.warnings), again.ended.err
    again.assert_completed(there, still_failed)
    state = progress(again.out)
    assert state is not None
    assert state["total_output_tokens"] == 34 * 5 + 25 * 16


def test_leftovers_and_strangers_among_the_files_change_nothing(again):
    there, still_failed = saved(again.out), failed_for_good(again.out)
    for name in ("run.json.tmp", "progress.json.tmp", ".done_indices.tmp", "shards/part-000000.jsonl.tmp"):
        (again.out / name).write_text("half a fi")
    (again.out / "shards" / "notes.txt").write_text("the only copy")

    again.run()

    again.assert_completed(there, still_failed)
    assert again.warnings == []
    assert (again.out / "shards" / "notes.txt").read_text() == "the only copy"


def test_all_that_can_be_mended_is_mended_in_one_start_and_the_next_one_finds_nothing(again):
    paths = {name: path_of(again, name) for name in FILES}
    for path in paths.values():
        damage_it(path, "a garbage line")
        damage_it(path, "a byte short")
    there, still_failed = saved(again.out), failed_for_good(again.out)

    again.run()

    again.assert_completed(there, still_failed)
    for name in (".done_indices", "manifest.jsonl", "failed.jsonl", *RECORD_FILES):
        assert again.warned_of(paths[name]), name
    before = contents(again.out / "shards")
    again.run()
    assert again.warnings == []
    assert again.asked == set()
    assert contents(again.out / "shards") == before


# ---- what only a look at every byte finds ----


def test_an_edit_that_keeps_a_sealed_shards_length_is_found_and_mended_by_verify(again):
    path, still_failed = path_of(again, "sealed"), failed_for_good(again.out)
    damage_it(path, "a flipped byte")
    there = saved(again.out)
    before = contents(again.out)

    found = genpipe("verify", again.out)

    assert found.code == 1, found.err
    assert path.name in found.out
    assert contents(again.out) == before

    mended = genpipe("verify", again.out, "--repair")
    assert mended.code == 0, mended.out + mended.err
    assert path.name in mended.out
    again.run()
    again.assert_completed(there, still_failed)
    assert genpipe("verify", again.out).code == 0


def test_a_run_over_such_an_edit_loses_no_other_record_and_verify_still_finds_it(again):
    path, still_failed = path_of(again, "sealed"), failed_for_good(again.out)
    whole = saved(again.out)
    damage_it(path, "a flipped byte")
    (lost,) = whole.keys() - saved(again.out).keys()

    again.run()

    assert again.asked == again.rows_but(*whole, *still_failed)
    assert sorted(saved(again.out)) == [place for place in range(ROWS) if place not in {lost, *still_failed}]
    found = genpipe("verify", again.out)
    assert found.code == 1, found.err
    assert path.name in found.out
    mended = genpipe("verify", again.out, "--repair")
    assert mended.code == 0, mended.out + mended.err
    there = saved(again.out)
    again.run()
    again.assert_completed(there, still_failed)


def test_verify_has_nothing_to_say_of_a_half_done_run_or_of_one_that_was_mended(again):
    half = genpipe("verify", again.out)
    for name in ("sealed", "open", ".done_indices", "manifest.jsonl"):
        damage_it(path_of(again, name), "a byte short")
    damaged = genpipe("verify", again.out)
    again.run()
    mended = genpipe("verify", again.out)

    assert half.code == 0, half.out
    assert damaged.code == 1, damaged.out
    assert mended.code == 0, mended.out
