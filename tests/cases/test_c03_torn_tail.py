"""A tail torn by a crash costs its own record and nothing else, wherever in the line it is torn."""

import signal

import pytest

from tests.e2e.half_done import Again, begin
from tests.e2e.harness import listed, saved, servers, shard_paths

ROWS = 206


def text_of(place):
    delay = 60 if place % 4 in (1, 3) else 0
    return f"Basic question {place:03d}: wie groß ist 🙂 in <<tokens={20 + place % 30} delay={delay}>>?"


TEXTS = [text_of(place) for place in range(ROWS)]


@pytest.fixture(scope="module", params=[signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def begun(request, tmp_path_factory):
    """Half of the rows are done; the newest shard holds the last few."""
    folder = tmp_path_factory.mktemp("begun")
    begin(folder, TEXTS[:10], records=5)
    begin(folder, TEXTS, records=103, stop=request.param)
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with servers(tmp_path_factory.mktemp("fleet"), orders=False) as fleet:
        yield fleet


@pytest.fixture
def again(begun, fleet, tmp_path):
    return Again(begun, tmp_path / "out", fleet, TEXTS)


CUTS = {
    "seven bytes short": lambda data: data[:-7],
    "inside a character": lambda data: data[: data.rfind("🙂".encode()) + 2],
    "without the last line feed": lambda data: data[:-1],
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_torn_tail_of_the_newest_shard_costs_one_record(again, cut):
    before, path = saved(again.out), shard_paths(again.out)[-1]
    path.write_bytes(CUTS[cut](path.read_bytes()))
    there = saved(again.out)

    again.run()

    assert len(there) == len(before) - 1
    again.assert_completed(there)
    assert again.warned_of(path), again.ended.err
    torn = [file.read_bytes() for file in (again.out / "quarantine").iterdir()]
    assert len(torn) == 1
    assert torn[0].startswith(b'{"index":')


def test_a_tail_of_garbage_behind_whole_lines_costs_no_record(again):
    there, path = saved(again.out), shard_paths(again.out)[-1]
    path.write_bytes(path.read_bytes() + '{"index":7,"id":"🙂'.encode()[:-1])

    again.run()

    again.assert_completed(there)
    assert again.warned_of(path), again.ended.err


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_a_torn_tail_of_the_list_costs_nothing(again, cut):
    there, path = saved(again.out), again.out / ".done_indices"
    path.write_bytes(path.read_bytes()[:-cut])

    again.run()

    again.assert_completed(there)
    assert again.warned_of(path), again.ended.err


def test_half_a_number_in_the_list_is_not_taken_for_another_one(again):
    there, path = saved(again.out), again.out / ".done_indices"
    assert 19 not in there
    # What was left of 190 and 192 would name 19, a prompt that has no record.
    kept = [index for index in listed(again.out) if index not in (190, 192)]
    path.write_bytes(b"".join(b"%d\n" % index for index in kept) + b"19")

    again.run()

    again.assert_completed(there)
    assert again.warned_of(path), again.ended.err


def test_a_torn_tail_of_everything_at_once_is_mended_in_one_start(again):
    paths = [shard_paths(again.out)[-1], again.out / ".done_indices", again.out / "manifest.jsonl"]
    for path in [*paths, again.out / "segments.jsonl", again.out / "input.idx"]:
        path.write_bytes(path.read_bytes()[:-7])
    there = saved(again.out)

    again.run()

    again.assert_completed(there)
    assert [path for path in paths if not again.warned_of(path)] == []
