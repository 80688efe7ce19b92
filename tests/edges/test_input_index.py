"""``input.idx``: is the input still what the run began with?"""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genpipe.core.errors import ConfigError, ResumeMismatch
from genpipe.edges.prompts import chunks
from genpipe.edges.prompts.chunks import CHUNK_BYTES_MAX, CHUNK_RECORDS_MAX, LINE_BYTES_MAX
from genpipe.edges.prompts.formats import Handles
from genpipe.edges.prompts.input_index import InputIndex, decode_entry, encode_entry


def record(number, width=0):
    return b'{"prompt": "%d%b"}' % (number, b" " * width)


def write(path, count, *, first=0, end=b"\n"):
    path.write_bytes(b"\n".join(record(first + i) for i in range(count)) + end)
    return path


class Bench:
    """An index over some files, with what it warned of."""

    def __init__(self, folder, *files, resumed=False, path=True):
        self.warnings: list[str] = []
        self.files = list(files)
        self.path = folder / "input.idx"
        self.index = InputIndex(
            files=self.files, path=self.path if path else None, resumed=resumed, warn=self.warnings.append
        )
        self.handles = Handles(self.files)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handles.close()
        self.index.close()

    def scan(self):
        """Verify what is known, read the rest; the entries."""
        for number in range(len(self.index)):
            self.index.verify(number, self.handles)
        while self.index.extend(len(self.index), self.handles, keep=False) is not None:
            pass
        return [self.index.entry(number) for number in range(len(self.index))]


def scanned(folder, *files, resumed=False):
    with Bench(folder, *files, resumed=resumed) as bench:
        entries = bench.scan()
        assert bench.warnings == []
        return entries


def test_a_chunk_has_1000_records_of_one_file(tmp_path):
    one = write(tmp_path / "a", 2_500)
    two = write(tmp_path / "b", 10, first=2_500, end=b"\n\n \n")

    entries = scanned(tmp_path, one, two)

    assert [(e.file, e.first, e.records, e.lines) for e in entries] == [
        (0, 0, 1_000, 1_000),
        (0, 1_000, 1_000, 2_000),
        (0, 2_000, 500, 2_500),
        (1, 2_500, 10, 12),
    ]
    data = one.read_bytes()
    assert [e.start for e in entries[1:3]] == [e.end for e in entries[:2]]
    assert entries[2].end == len(data)
    sha = hashlib.sha256(data[entries[1].start : entries[1].end]).digest()
    assert entries[1].digest == int.from_bytes(sha[:8], "big")


def test_blank_lines_do_not_count_towards_a_chunk(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"".join(record(i) + b"\n\r\n" for i in range(1_500)))

    assert [(e.records, e.lines) for e in scanned(tmp_path, path)] == [(1_000, 1_999), (500, 3_000)]


def test_a_chunk_ends_after_4_mib(tmp_path):
    path = tmp_path / "a"
    path.write_bytes((record(1, width=1 << 20) + b"\n") * 9)

    assert [e.records for e in scanned(tmp_path, path)] == [4, 4, 1]


def test_the_index_file_holds_checksummed_json_lines(tmp_path):
    entries = scanned(tmp_path, write(tmp_path / "a", 1_500))

    rows = (tmp_path / "input.idx").read_bytes().splitlines(keepends=True)
    assert [decode_entry(row) for row in rows] == entries
    fields = json.loads(rows[1])
    assert fields.pop("_c") == rows[1][-11:-3].decode()
    assert list(fields) == ["file", "first", "records", "lines", "start", "end", "hash"]
    assert fields["hash"] == f"{entries[1].digest:016x}"


def test_an_unchanged_input_is_counted_from_the_start_of_a_resume(tmp_path):
    path = write(tmp_path / "a", 2_500, end=b"")
    entries = scanned(tmp_path, path)

    with Bench(tmp_path, path, resumed=True) as bench:
        assert bench.index.total == 2_500
        assert bench.scan() == entries
        assert bench.warnings == []
    assert len((tmp_path / "input.idx").read_bytes().splitlines()) == 3


@pytest.mark.parametrize("how", ["verify", "read"])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_changed_byte_is_found_and_named(tmp_path, chunk, how):
    path = write(tmp_path / "a", 2_500)
    entry = scanned(tmp_path, path)[chunk]
    data = bytearray(path.read_bytes())
    data[entry.start + 12] ^= 1
    path.write_bytes(data)
    last = entry.first + entry.records - 1

    with Bench(tmp_path, path, resumed=True) as bench:
        for number in range(3):
            if number != chunk:
                getattr(bench.index, how)(number, bench.handles)
        with pytest.raises(ResumeMismatch) as caught:
            getattr(bench.index, how)(chunk, bench.handles)

    assert str(caught.value) == (
        f"{path} differs from what this run began with, in records {entry.first}-{last} "
        f"(bytes {entry.start}-{entry.end}): restore the file, or start a new run in another folder"
    )


@pytest.mark.parametrize("old_end", [b"\n", b"", b"\n\n"])
@pytest.mark.parametrize("glue", [b"\n", b"\r\n"])
def test_input_that_grew_at_its_end_is_accepted(tmp_path, old_end, glue):
    path = write(tmp_path / "a", 1_500, end=old_end)
    before = scanned(tmp_path, path)
    grown = path.read_bytes() + (glue if not old_end else b"") + record(1_500) + b"\n" + record(1_501)
    path.write_bytes(grown)

    with Bench(tmp_path, path, resumed=True) as bench:
        total_at_first = bench.index.total
        entries = bench.scan()
        total = bench.index.total
        cut = bench.index.read(2, bench.handles)

    assert (total_at_first, total) == (None, 1_502)
    assert entries[:2] == before
    assert [text.strip() for text in cut.texts] == [record(1_500), record(1_501)]
    lines = grown.split(b"\n")
    assert [lines[number - 1] for number in cut.numbers] == [record(1_500), record(1_501)]
    assert scanned(tmp_path, path, resumed=True) == entries


@pytest.mark.parametrize("more", [b" ", b"x\n", b"\r", b"\r\r\n"])
def test_a_last_line_that_goes_on_is_refused(tmp_path, more):
    path = write(tmp_path / "a", 1_500, end=b"")
    scanned(tmp_path, path)
    path.write_bytes(path.read_bytes() + more)

    with pytest.raises(ResumeMismatch, match=r"records 1000-1499 .* its last line goes on"):
        Bench(tmp_path, path, resumed=True)


def test_shrunk_input_is_refused(tmp_path):
    path = write(tmp_path / "a", 1_500)
    scanned(tmp_path, path)
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(ResumeMismatch, match=r"records 1000-1499 .* it ends at byte"):
        Bench(tmp_path, path, resumed=True)


def test_growth_of_an_earlier_file_is_refused_and_of_the_last_accepted(tmp_path):
    one, two, three = (write(tmp_path / name, 3) for name in "abc")
    two.write_bytes(b"")
    scanned(tmp_path, one, two, three)
    write(three, 4)
    assert sum(e.records for e in scanned(tmp_path, one, two, three, resumed=True)) == 7
    two.write_bytes(b"\n")

    with pytest.raises(ResumeMismatch, match=r"b has grown from 0 to 1 bytes"):
        Bench(tmp_path, one, two, three, resumed=True)
    two.write_bytes(b"")
    write(one, 4)
    with pytest.raises(ResumeMismatch, match=r"a has grown"):
        Bench(tmp_path, one, two, three, resumed=True)


def test_other_files_are_refused_and_more_files_accepted(tmp_path):
    one, two = (write(tmp_path / name, 3) for name in "ab")
    three = write(tmp_path / "c", 3, first=5)
    scanned(tmp_path, one, two)

    with pytest.raises(ResumeMismatch, match="began with 2 input files at least, now there are 1"):
        Bench(tmp_path, one, resumed=True)
    with (
        Bench(tmp_path, one, three, resumed=True) as bench,
        pytest.raises(ResumeMismatch, match="records 3-5"),
    ):
        bench.scan()
    assert [e.first for e in scanned(tmp_path, one, two, three, resumed=True)] == [0, 3, 6]


@pytest.mark.parametrize("cut", [1, 40, 100])
def test_a_torn_tail_is_cut_without_a_word(tmp_path, cut):
    path = write(tmp_path / "a", 2_500)
    entries = scanned(tmp_path, path)
    index = tmp_path / "input.idx"
    whole = index.read_bytes()
    index.write_bytes(whole[:-cut])

    assert scanned(tmp_path, path, resumed=True) == entries
    assert index.read_bytes() == whole


def test_a_damaged_line_is_reported_and_what_follows_is_indexed_again(tmp_path):
    path = write(tmp_path / "a", 3_500)
    entries = scanned(tmp_path, path)
    index = tmp_path / "input.idx"
    whole = index.read_bytes()
    rows = whole.splitlines(keepends=True)
    rows[1] = rows[1].replace(b'"first":1000', b'"first":1001')
    index.write_bytes(b"".join(rows))

    with Bench(tmp_path, path, resumed=True) as bench:
        assert len(bench.index) == 1
        assert bench.scan() == entries

    (warning,) = bench.warnings
    assert f"{index} is damaged after chunk 1" in warning
    assert index.read_bytes() == whole


def test_lines_that_do_not_follow_each_other_are_damage(tmp_path):
    path = write(tmp_path / "a", 3_500)
    entries = scanned(tmp_path, path)
    index = tmp_path / "input.idx"
    wrong = [
        replace(entries[1], **change)
        for change in ({"first": 1_001}, {"start": 1}, {"file": 1}, {"lines": 1})
    ]
    for rows in (
        [entries[1], entries[0]],
        [entries[0], entries[0], entries[1]],
        [entries[0], entries[2]],
        *([entries[0], entry, entries[2]] for entry in wrong),
    ):
        index.write_bytes(b"".join(map(encode_entry, rows)))

        with Bench(tmp_path, path, resumed=True) as bench:
            assert bench.scan() == entries
        assert len(bench.warnings) == 1


@given(st.binary(max_size=400))
def test_no_content_of_the_index_is_a_crash(tmp_path_factory, junk):
    folder = tmp_path_factory.mktemp("junk")
    path = write(folder / "a", 3)
    (folder / "input.idx").write_bytes(junk)

    with Bench(folder, path, resumed=True) as bench:
        assert sum(e.records for e in bench.scan()) == 3
    assert len(bench.warnings) == 1


def test_a_missing_index_is_reported_on_a_resume_only(tmp_path):
    path = write(tmp_path / "a", 3)

    with Bench(tmp_path, path, resumed=True) as bench:
        bench.scan()
    (warning,) = bench.warnings
    assert "input.idx is missing or empty" in warning
    (tmp_path / "input.idx").unlink()
    scanned(tmp_path, path)


def test_an_index_that_cannot_be_opened_or_written_is_a_warning(tmp_path):
    path = write(tmp_path / "a", 2_500)
    (tmp_path / "input.idx").mkdir()

    with Bench(tmp_path, path) as bench:
        assert len(bench.scan()) == 3
    assert len(bench.warnings) == 1
    assert "cannot be used" in bench.warnings[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_under_the_index_is_one_warning(tmp_path):
    with Bench(tmp_path, write(tmp_path / "a", 2_500), path=False) as bench:
        bench.index._descriptor = os.open("/dev/full", os.O_WRONLY)
        bench.scan()

        assert bench.index.total == 2_500
        (warning,) = bench.warnings
        assert "cannot be written" in warning


def test_a_line_at_the_limit_is_kept_and_one_over_it_is_passed(tmp_path):
    path = tmp_path / "a"
    fits = b"{" + b" " * (LINE_BYTES_MAX - 1)
    with path.open("wb") as out:
        for line in (record(0), fits, fits + b" ", record(3)):
            out.write(line + b"\n")

    handles = Handles([path])
    with handles.reading(0) as file:
        first = file.cut(file=0, first=0, lines_before=0, start=0)
        assert first is not None
        rest = file.cut(file=0, first=2, lines_before=2, start=first.entry.end)
        assert rest is not None
        tail = file.cut(file=0, first=3, lines_before=3, start=rest.entry.end)
    handles.close()

    assert tail is not None
    assert [len(text or b"") for text in first.texts] == [len(record(0)) + 1, LINE_BYTES_MAX + 1]
    assert rest.texts == ["longer than 64 MiB"]
    assert rest.entry.end - rest.entry.start == LINE_BYTES_MAX + 2
    assert tail.texts == [record(3) + b"\n"]
    with Bench(tmp_path, path) as bench:
        bench.scan()
        assert bench.index.read(1, bench.handles).entry == rest.entry


def test_bounds_hold_together():
    assert chunks._LINES_HELD_MAX > CHUNK_RECORDS_MAX
    assert CHUNK_BYTES_MAX < LINE_BYTES_MAX


@pytest.mark.parametrize(
    ("head", "what"),
    [(b"BZh91AY", "bzip2"), (b"\xfd7zXZ\x00", "xz"), (b"PK\x03\x04", "zip"), (b"PARE", "encrypted")],
)
def test_input_in_a_foreign_form_is_refused_by_name(tmp_path, head, what):
    path = tmp_path / "a"
    path.write_bytes(head)

    with pytest.raises(ConfigError, match=f"a is {what}"):
        Bench(tmp_path, path)
