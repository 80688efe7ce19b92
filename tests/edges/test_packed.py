"""Input that is packed with gzip or zstd is read as its text would be."""

import asyncio
import gzip
import io
import os
from collections.abc import Callable
from contextlib import closing

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import ConfigError, ResumeMismatch
from genpipe.edges.prompts import formats, packed
from genpipe.edges.prompts.checking import check_files
from genpipe.edges.prompts.dialects import Dialect
from genpipe.edges.prompts.formats import Handles, check_readable
from genpipe.edges.prompts.input_index import InputIndex
from genpipe.edges.prompts.source import FileSource

PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstandard.compress}
OPEN = {"gzip": packed.open_gzip, "zstd": packed.open_zstd}
SKIPPED_FRAME = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"
kinds = pytest.mark.parametrize("kind", ["gzip", "zstd"])


def rows(count, *, first=0):
    return b"".join(b'{"prompt": "number %d"}\n' % number for number in range(first, first + count))


def index_of(path, index_path=None, *, others=(), resumed=False):
    return InputIndex(files=[path, *others], path=index_path, resumed=resumed, warn=pytest.fail)


def scan(path, index_path=None, *, others=(), resumed=False):
    """Verify what is known and read the rest; the entries."""
    index, handles = index_of(path, index_path, others=others, resumed=resumed), Handles([path, *others])
    try:
        for number in range(len(index)):
            index.verify(number, handles)
        while index.extend(len(index), handles, keep=False) is not None:
            pass
        return [index.entry(number) for number in range(len(index))]
    finally:
        handles.close()
        index.close()


@kinds
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_text_in_any_number_of_members_has_the_chunks_of_the_plain_file(kind, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("soup")
    lines = data.draw(st.lists(st.binary(max_size=20), max_size=200))
    text = b"\n".join(lines) * data.draw(st.integers(1, 40))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    glue = SKIPPED_FRAME if kind == "zstd" else b""
    (folder / "plain").write_bytes(b"{" + text)
    (folder / "packed").write_bytes(glue + PACK[kind](b"{") + glue.join(map(PACK[kind], parts)) + glue)

    assert scan(folder / "packed") == scan(folder / "plain")


@kinds
def test_a_view_can_be_read_from_any_place(kind, tmp_path):
    text = os.urandom(3 << 20)
    (tmp_path / "a").write_bytes(PACK[kind](text[: 1 << 20]) + PACK[kind](text[1 << 20 :]))

    with OPEN[kind](tmp_path / "a") as view:
        for place in (0, 5, 2 << 20, 1, (1 << 20) - 3, len(text) - 1, 700_000):
            view.seek(place)
            assert (view.tell(), view.read(9)) == (place, text[place : place + 9])
        view.seek(len(text) + 5)
        assert view.read(1) == b""


@kinds
def test_reading_in_order_never_begins_again(kind, tmp_path, monkeypatch):
    """Neither cutting new chunks, nor reading or verifying known ones; each begins where one ended."""
    begun = []
    begin = packed._Unpacked._begin

    def counted(self):
        begun.append(1)
        begin(self)

    monkeypatch.setattr(packed._Unpacked, "_begin", counted)
    monkeypatch.setattr(packed, "_BUFFER_BYTES", 64)
    # The look at the first bytes, once a start, is another matter.
    monkeypatch.setattr(formats, "_check_inside", lambda path, form: None)
    path = tmp_path / "a"
    path.write_bytes(PACK[kind](rows(5_000)))

    entries = scan(path, tmp_path / "idx")
    assert (len(entries), len(begun)) == (5, 1)
    assert scan(path, tmp_path / "idx", resumed=True) == entries
    # Once to look whether the last line goes on.
    assert len(begun) <= 3
    index, handles = index_of(path, tmp_path / "idx", resumed=True), Handles([path])
    for number in range(5):
        index.read(number, handles)
    assert len(begun) <= 4
    handles.close()
    index.close()


@kinds
@pytest.mark.parametrize("lost", [1, 4, 9, 0.5, 0.9])
def test_a_file_that_is_cut_off_is_named_in_one_line(kind, tmp_path, lost):
    whole = PACK[kind](os.urandom(200_000))
    (tmp_path / "a").write_bytes(whole[: -lost if lost >= 1 else int(len(whole) * lost)])

    for attempt in (lambda: scan(tmp_path / "a"), lambda: check_files([tmp_path / "a"], Dialect())):
        with pytest.raises(ConfigError, match=rf"/a is cut off in the middle of its {kind} data") as caught:
            attempt()
        assert "\n" not in str(caught.value)


@kinds
@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (gzip.compress(b"{}", mtime=0), "is gzip within {kind}, which is not read: unpack it once"),
        (zstandard.compress(b"{}"), "is zstd within {kind}, which is not read: unpack it once"),
        (b"PAR1" + bytes(20), "is Parquet within {kind}, which is not read: unpack it once"),
        ("{}".encode("utf-16"), "is UTF-16, which is not read: make it UTF-8, with iconv -f UTF-16"),
        (b"PK\x03\x04" + bytes(20), "is zip, which is not read"),
    ],
)
def test_what_is_no_text_once_unpacked_is_refused_before_anything_is_read(kind, inside, words, tmp_path):
    (tmp_path / "a").write_bytes(PACK[kind](inside))

    with pytest.raises(ConfigError) as caught:
        check_readable(tmp_path / "a")

    assert f"/a {words.format(kind=kind)}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gzip", "zstd", "junk behind gzip", "junk behind zstd"])
def test_damage_is_named_in_one_line(kind, tmp_path):
    name = kind.split()[-1]
    pack = gzip.compress if name == "gzip" else zstandard.ZstdCompressor(write_checksum=True).compress
    data = bytearray(pack(rows(20_000)))
    if "junk" in kind:
        data += b"no such thing"
    else:
        data[len(data) // 2] ^= 0x55
    (tmp_path / "a").write_bytes(data)

    with pytest.raises(ConfigError, match=rf"/a cannot be unpacked, its {name} data is damaged") as caught:
        scan(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_a_file_that_unpacks_to_a_thousand_times_its_size_is_not_held(tmp_path):
    packer = zstandard.ZstdCompressor()
    data = packer.compress(bytes(256 << 20))
    assert len(data) < 20_000

    sizes = [len(piece) for piece in packed._zstd_pieces(io.BytesIO(data), tmp_path / "a")]

    assert sum(sizes) == 256 << 20
    assert max(sizes) <= 64 << 20


@kinds
def test_a_run_reads_and_resumes_a_packed_file(kind, tmp_path):
    path = tmp_path / "a"
    path.write_bytes(PACK[kind](rows(2_500) + b"bad\n") + PACK[kind](rows(2_000, first=2_501)))

    def read(done):
        source = FileSource(
            files=[path], dialect=Dialect(), index_path=tmp_path / "idx", done=Bitmap(done), warn=pytest.fail
        )

        async def all_of_it():
            chunks = [await source.read(700)]
            while not chunks[-1].exhausted:
                chunks.append(await source.read(700))
            await source.verify_rest()
            return chunks

        try:
            chunks = asyncio.run(all_of_it())
            return (
                [prompt.index for chunk in chunks for prompt in chunk.prompts],
                [(line.index, line.line) for chunk in chunks for line in chunk.bad],
                source.total,
            )
        finally:
            source.close()

    assert read([]) == ([*range(2_500), *range(2_501, 4_501)], [(2_500, 2_501)], 4_501)
    assert read(range(3_700)) == (list(range(3_700, 4_501)), [], 4_501)
    assert read(range(4_501)) == ([], [], 4_501)


@kinds
def test_packing_anew_or_unpacking_is_no_change(kind, tmp_path):
    path, text = tmp_path / "a", rows(2_500)
    path.write_bytes(PACK[kind](text))
    entries = scan(path, tmp_path / "idx")
    for again in (text, PACK[kind](text[:99]) + PACK[kind](text[99:]), gzip.compress(text, 1)):
        path.write_bytes(again)

        assert scan(path, tmp_path / "idx", resumed=True) == entries


@kinds
@pytest.mark.parametrize("old_end", [b"\n", b""])
def test_text_that_grew_at_its_end_is_accepted(kind, tmp_path, old_end):
    path, text = tmp_path / "a", rows(1_500).rstrip(b"\n") + old_end
    path.write_bytes(PACK[kind](text))
    before = scan(path, tmp_path / "idx")
    path.write_bytes(path.read_bytes() + PACK[kind](b"\n" * (not old_end) + rows(2, first=1_500)))

    entries = scan(path, tmp_path / "idx", resumed=True)

    assert entries[:2] == before
    assert sum(entry.records for entry in entries) == 1_502


@kinds
def test_a_last_line_that_goes_on_is_refused(kind, tmp_path):
    path, text = tmp_path / "a", rows(1_500).rstrip(b"\n")
    path.write_bytes(PACK[kind](text))
    scan(path, tmp_path / "idx")
    path.write_bytes(PACK[kind](text + b" \n"))

    with pytest.raises(ResumeMismatch, match=r"records 1000-1499 .* its last line goes on"):
        scan(path, tmp_path / "idx", resumed=True)


@kinds
@pytest.mark.parametrize("how", ["changed", "shrunk"])
def test_other_text_is_refused_with_file_and_chunk(kind, tmp_path, how):
    path, text = tmp_path / "a", rows(2_500)
    path.write_bytes(PACK[kind](text))
    scan(path, tmp_path / "idx")
    path.write_bytes(PACK[kind](text[:-5] if how == "shrunk" else text.replace(b"2300", b"23oo")))

    with pytest.raises(
        ResumeMismatch, match=r"/a differs from what this run began with, in records 2000-2499"
    ):
        scan(path, tmp_path / "idx", resumed=True)


@kinds
@pytest.mark.parametrize("before", [0, 1_500])
@pytest.mark.parametrize("how", ["verify", "read"])
def test_growth_in_front_of_another_file_is_refused(kind, tmp_path, before, how):
    one, two = tmp_path / "a", tmp_path / "b"
    one.write_bytes(PACK[kind](rows(before)))
    two.write_bytes(rows(3, first=before))
    scan(one, tmp_path / "idx", others=[two])
    assert scan(one, tmp_path / "idx", others=[two], resumed=True)[-1].first == before
    one.write_bytes(one.read_bytes() + PACK[kind](b"\n"))

    def look():
        with closing(Handles([one, two])) as handles:
            index = index_of(one, tmp_path / "idx", others=[two], resumed=True)
            for number in range(len(index)):
                getattr(index, how)(number, handles)

    with pytest.raises(ResumeMismatch, match=r"/a has grown"):
        look()
