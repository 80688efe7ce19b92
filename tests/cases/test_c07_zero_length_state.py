"""Files of state that are empty, full of NULs, or wrong: the shards are the truth; nothing begins anew."""

import pytest

from tests.e2e.half_done import Again, begin
from tests.e2e.harness import listed, saved, servers

ROWS = 200
TEXTS = [
    f"Basic question {place:03d}. <<tokens={20 + place % 30} delay={60 if place % 2 else 0}>>"
    for place in range(ROWS)
]
NULS = bytes(4096)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Half of the rows are done, in ten shards."""
    folder = tmp_path_factory.mktemp("begun")
    begin(folder, TEXTS[:190], records=95)
    begin(folder, TEXTS, records=100)
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with servers(tmp_path_factory.mktemp("fleet"), orders=False) as fleet:
        yield fleet


@pytest.fixture
def again(begun, fleet, tmp_path):
    return Again(begun, tmp_path / "out", fleet, TEXTS)


def in_the_middle(data, more):
    middle = data.index(b"\n", len(data) // 2) + 1
    return data[:middle] + more + data[middle:]


LISTS = {
    "empty": lambda data: b"",
    "all nuls": lambda data: NULS,
    "nuls at the end": lambda data: data + NULS,
    "a garbage line": lambda data: in_the_middle(data, b"twelve\n"),
    "no number of a prompt": lambda data: in_the_middle(data, b"99999\n"),
    "a number below zero": lambda data: in_the_middle(data, b"-1\n"),
    "a number without a record": lambda data: in_the_middle(data, b"101\n"),
    "a number twice": lambda data: in_the_middle(data, b"100\n"),
    "a number of 400 digits": lambda data: in_the_middle(data, b"1" * 400 + b"\n"),
    "all of it at once": lambda data: in_the_middle(data, b"99999\n-1\n101\n100\n+7\n 8\n1_0\n\n") + NULS,
}


@pytest.mark.parametrize("what", LISTS)
def test_a_wrong_list_is_made_again_from_the_shards(again, what):
    there, path = saved(again.out), again.out / ".done_indices"
    path.write_bytes(LISTS[what](path.read_bytes()))

    again.run()

    again.assert_completed(there)
    assert sorted(listed(again.out)) == list(range(ROWS))
    assert again.warned_of(path), again.ended.err
    assert len(again.warnings) == 1


REPORTS = {
    "empty": b"",
    "all nuls": NULS,
    "half": b'{"state": "run',
    "no object": b"null\n",
    "somebody else's": b'{"state": "done"}\n',
    "gone": None,
}


@pytest.mark.parametrize("what", REPORTS)
def test_a_broken_report_never_matters(again, what):
    there, path, data = saved(again.out), again.out / "progress.json", REPORTS[what]
    path.unlink()
    if data is not None:
        path.write_bytes(data)

    again.run()

    again.assert_completed(there)
    assert again.warnings == []


@pytest.mark.parametrize("name", [".done_indices", "manifest.jsonl", "input.idx"])
@pytest.mark.parametrize("how", ["gone", "empty", "all nuls"])
def test_each_file_that_can_be_made_again_is(again, name, how):
    there, path = saved(again.out), again.out / name
    path.unlink()
    if how != "gone":
        path.write_bytes(b"" if how == "empty" else NULS)

    again.run()

    again.assert_completed(there)
    assert again.warned_of(path), again.ended.err


@pytest.mark.parametrize("how", ["gone", "empty", "all nuls"])
def test_a_run_that_lost_its_name_does_not_begin_anew(again, how):
    path = again.out / "run.json"
    path.unlink()
    if how != "gone":
        path.write_bytes(b"" if how == "empty" else NULS)

    again.run()

    again.assert_refused(2, "run.json")


def test_files_that_were_being_replaced_are_removed_and_not_taken_for_the_real_ones(again):
    there = saved(again.out)
    for name in (".done_indices", "manifest.jsonl", "run.json", "progress.json", "failed.jsonl"):
        (again.out / f"{name}.tmp").write_bytes(b"101\n" if name == ".done_indices" else NULS)
    (again.out / "shards" / "part-000003.jsonl.tmp").write_bytes(NULS)

    again.run()

    again.assert_completed(there)
    assert again.warnings == []


def test_all_state_lost_at_once_costs_no_record(again):
    there = saved(again.out)
    for name in (".done_indices", "manifest.jsonl", "input.idx", "progress.json"):
        (again.out / name).write_bytes(NULS)

    again.run()

    again.assert_completed(there)
