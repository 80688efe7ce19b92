"""What still grows stands in S3 too, as it was a moment ago."""

from pathlib import Path

import pytest

from genpipe.core.errors import ObjectStoreError, TroubleKind
from genpipe.edges import lines
from genpipe.edges.s3.layout import snapshot_key
from genpipe.edges.s3.packing import pack, unpack
from genpipe.edges.s3.snapshots import Snapshots
from genpipe.edges.shards import shard_name
from tests.edges.memory_files import MemoryFiles
from tests.edges.s3.memory_objects import MemoryObjects

OUT = Path("/out")
SHARDS = OUT / "shards"
KINDS = ["failed", "input", "segments", "tail"]


def line(index):
    return lines.encode(b'{"index":%d' % index)


class Folder:
    """A run folder, its prefix, and the snapshots of one claim."""

    def __init__(self, epoch=2, objects=None):
        self.files = MemoryFiles([OUT, SHARDS])
        self.objects = objects or MemoryObjects()
        self.committed = set()
        self.now_s = 50.0
        self.snapshots = Snapshots(OUT, self.files, self.objects, epoch=epoch, now_s=lambda: self.now_s)

    def open_shard(self, seq, data):
        self.files.put(SHARDS / shard_name(seq, is_open=True), data)

    def seal(self, seq):
        data = self.files.read(SHARDS / shard_name(seq, is_open=True))
        self.files.remove(SHARDS / shard_name(seq, is_open=True))
        self.files.put(SHARDS / shard_name(seq, is_open=False), data)

    def take(self):
        return self.snapshots.take(self.committed.__contains__)

    def keys(self, kind="tail"):
        return self.objects.keys(f"w00/{kind}/")

    def held(self, kind="tail"):
        return [unpack(self.objects.get(key).data) for key in self.keys(kind)]

    def puts(self):
        return [key for step, key in self.objects.calls if step == "put"]


@pytest.fixture
def folder():
    return Folder()


def test_each_kind_is_put_under_its_own_name_with_whole_lines_only(folder):
    folder.open_shard(3, line(1) + line(2) + b'{"index":3,"half')
    folder.files.put(OUT / "failed.jsonl", b"f1\nf2")
    folder.files.put(OUT / "input.idx", b"i1\n")
    folder.files.put(OUT / "segments.jsonl", b"s1\n")

    assert folder.take() == []
    assert folder.objects.keys() == [snapshot_key(kind, 2, 0) for kind in KINDS]
    assert [folder.held(kind) for kind in KINDS] == [[b"f1\n"], [b"i1\n"], [b"s1\n"], [line(1) + line(2)]]


def test_files_that_are_missing_or_hold_no_whole_line_are_left_out(folder):
    folder.files.put(OUT / "failed.jsonl", b"")
    folder.files.put(OUT / "input.idx", b"half a line")
    folder.open_shard(0, b"half")

    assert folder.take() == []
    assert folder.objects.keys() == []


def test_nothing_is_put_that_has_not_changed(folder):
    folder.open_shard(0, line(1))
    folder.files.put(OUT / "input.idx", b"i1\n")
    folder.take()
    steps = len(folder.objects.calls)
    folder.take()

    assert folder.objects.calls[steps:] == []


def test_a_newer_snapshot_takes_the_place_of_the_older_one(folder):
    for count in (1, 2, 3):
        folder.open_shard(0, b"".join(map(line, range(count))))
        folder.files.put(OUT / "failed.jsonl", b"f\n" * count)
        assert folder.take() == []

    assert folder.keys() == [snapshot_key("tail", 2, 2)]
    assert folder.held() == [line(0) + line(1) + line(2)]
    assert folder.held("failed") == [b"f\n" * 3]


def test_the_newer_one_is_there_before_the_older_one_is_removed(folder):
    for count in (1, 2):
        folder.open_shard(0, b"".join(map(line, range(count))))
        folder.take()
    order = [call for call in folder.objects.calls if "tail/e" in call[1]]

    first, second = (snapshot_key("tail", 2, number) for number in (0, 1))
    assert order == [("put", first), ("put", second), ("delete", first)]


@pytest.mark.parametrize("kind", KINDS)
def test_trouble_with_one_kind_does_not_keep_the_others_from_being_put(folder, kind):
    folder.open_shard(0, line(1))
    for name in ("failed.jsonl", "input.idx", "segments.jsonl"):
        folder.files.put(OUT / name, b"x\n")

    def trouble(step, key):
        if step == "put" and f"/{kind}/" in key:
            raise ObjectStoreError("no", kind=TroubleKind.UNREACHABLE)

    folder.objects.trouble = trouble
    (error,) = folder.take()
    assert str(error) == "no"
    assert {key.split("/")[1] for key in folder.objects.keys("w00/")} == set(KINDS) - {kind}
    folder.objects.trouble = lambda step, key: None

    assert folder.take() == []
    assert len(folder.held(kind)) == 1


def test_a_file_that_cannot_be_read_does_not_keep_the_others_from_being_put(folder, monkeypatch):
    folder.files.put(OUT / "segments.jsonl", b"x\n")
    folder.files.remove(SHARDS)
    (error,) = folder.take()

    assert "/out/shards" in str(error)
    assert folder.held("segments") == [b"x\n"]


def test_a_put_that_failed_and_landed_is_never_overwritten_and_is_removed(folder):
    folder.open_shard(0, line(1))

    def lost(step, key):
        if step == "put":
            raise ObjectStoreError("no reply", kind=TroubleKind.TIMEOUT)

    folder.objects.after = lost
    assert len(folder.take()) == 1
    folder.objects.after = lambda step, key: None
    folder.open_shard(0, line(1) + line(2))
    folder.take()

    puts = folder.puts()
    assert len(puts) == len(set(puts)) == 2
    assert folder.keys() == [puts[1]]
    assert folder.held() == [line(1) + line(2)]


def test_a_put_that_failed_comes_again_although_the_file_has_not_changed(folder):
    folder.open_shard(0, line(1))
    folder.objects.trouble = _refuse("put")
    folder.take()
    folder.objects.trouble = lambda step, key: None
    folder.take()

    assert folder.held() == [line(1)]


def test_a_removal_that_failed_comes_again(folder):
    folder.open_shard(0, line(1))
    folder.take()
    folder.open_shard(0, line(1) + line(2))
    folder.objects.trouble = _refuse("delete")
    assert len(folder.take()) == 1
    assert len(folder.keys()) == 2
    folder.objects.trouble = lambda step, key: None

    assert folder.take() == []
    assert folder.keys() == [snapshot_key("tail", 2, 1)]


def test_what_earlier_claims_left_is_removed_and_what_later_ones_made_is_not(folder):
    for kind in KINDS:
        for epoch, number in ((1, 5), (1, 6), (3, 0)):
            folder.objects.put(snapshot_key(kind, epoch, number), pack(b"x\n"))
    folder.objects.put("w00/tail/notes.txt", b"somebody's own")
    folder.open_shard(0, line(1))
    for name in ("failed.jsonl", "input.idx", "segments.jsonl"):
        folder.files.put(OUT / name, b"x\n")
    folder.take()

    for kind in KINDS:
        kept = [snapshot_key(kind, 2, 0), snapshot_key(kind, 3, 0)]
        assert folder.keys(kind) == kept + (["w00/tail/notes.txt"] if kind == "tail" else [])


def test_each_kind_is_listed_once(folder):
    for count in (1, 2, 3):
        folder.open_shard(0, line(1) * count)
        folder.files.put(OUT / "failed.jsonl", b"f\n" * count)
        folder.take()

    assert sorted(key for step, key in folder.objects.calls if step == "list") == ["w00/failed/", "w00/tail/"]


def test_the_last_tail_of_a_sealed_shard_stays_until_the_shard_is_committed(folder):
    folder.open_shard(0, line(1))
    folder.take()
    folder.open_shard(0, line(1) + line(2))
    folder.take()
    folder.seal(0)
    folder.open_shard(1, line(3))
    folder.take()
    folder.open_shard(1, line(3) + line(4))
    folder.take()

    assert folder.held() == [line(1) + line(2), line(3) + line(4)]
    folder.committed.add(0)
    folder.take()
    assert folder.held() == [line(3) + line(4)]


def test_a_tail_that_became_empty_leaves_the_older_one_until_its_shard_is_committed(folder):
    folder.open_shard(0, line(1))
    folder.take()
    folder.seal(0)
    folder.open_shard(1, b"")
    assert folder.take() == []
    assert folder.held() == [line(1)]
    folder.committed.add(0)
    folder.take()

    assert folder.keys() == []


def test_a_tail_of_an_earlier_claim_stays_while_a_shard_of_this_folder_is_not_committed(folder):
    folder.objects.put(snapshot_key("tail", 1, 9), pack(line(7)))
    folder.open_shard(0, line(7))
    folder.seal(0)
    folder.open_shard(1, line(8))
    folder.take()
    assert folder.held() == [line(7), line(8)]
    folder.committed.add(0)
    folder.take()

    assert folder.held() == [line(8)]


def test_a_shard_that_is_sealed_between_two_looks_is_left_to_the_next_time(folder):
    folder.open_shard(0, line(1))
    folder.take()
    folder.open_shard(0, line(1) + line(2))
    sizes = folder.files.sizes

    def seal_after(path):
        found = sizes(path)
        if path == SHARDS:
            folder.files.sizes = sizes
            folder.seal(0)
        return found

    folder.files.sizes = seal_after

    assert folder.take() == []
    assert folder.held() == [line(1)]


def test_a_file_that_grew_while_it_was_read_is_known_as_it_was_read(folder):
    folder.open_shard(0, line(1))
    read = folder.files.read

    def grow(path):
        folder.files.read = read
        folder.open_shard(0, line(1) + line(2))
        return read(path)

    folder.files.read = grow
    folder.take()
    folder.take()

    assert folder.held() == [line(1) + line(2)]
    assert len(folder.puts()) == 1


def test_the_time_of_the_last_tail_is_kept(folder):
    folder.open_shard(0, line(1))
    folder.objects.trouble = _refuse("put")
    times = [folder.snapshots.tail_at_s]
    folder.take()
    times.append(folder.snapshots.tail_at_s)
    folder.objects.trouble = lambda step, key: None
    folder.take()
    times.append(folder.snapshots.tail_at_s)
    folder.now_s = 60.0
    folder.open_shard(0, line(1) + line(2))
    folder.objects.trouble = _refuse("put")
    folder.take()
    times.append(folder.snapshots.tail_at_s)
    folder.objects.trouble = lambda step, key: None
    folder.take()

    assert [*times, folder.snapshots.tail_at_s] == [None, None, 50.0, 50.0, 60.0]


def _refuse(refused):
    def trouble(step, key):
        if step == refused:
            raise ObjectStoreError("no", kind=TroubleKind.UNREACHABLE)

    return trouble


@pytest.mark.parametrize("data", [b"", b"a", b"abc\n" * 5000])
def test_what_is_packed_comes_back_and_is_the_same_each_time(data):
    packed = pack(data)

    assert unpack(packed) == data
    assert pack(data) == packed


def test_what_is_not_whole_is_not_unpacked():
    packed = pack(b"abcdefgh" * 1000 + b"x")

    for stop in range(len(packed)):
        assert unpack(packed[:stop]) is None
    for place in range(len(packed)):
        damaged = bytearray(packed)
        damaged[place] ^= 0x55
        assert unpack(bytes(damaged)) is None
    assert unpack(packed + b"more") is None


def test_what_claims_to_be_too_long_is_not_unpacked():
    packed = pack(bytes(1 << 20))

    assert unpack(packed, size_max=(1 << 20) - 1) is None
    assert unpack(packed, size_max=1 << 20) == bytes(1 << 20)
