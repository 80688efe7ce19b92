"""Reading prompts from files."""

import asyncio
import hashlib
import json
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import ConfigError, ResumeMismatch
from genpipe.core.values import Chunk
from genpipe.edges.prompts.checking import check_files, has_records
from genpipe.edges.prompts.chunks import LINE_BYTES_MAX
from genpipe.edges.prompts.dialects import Dialect
from genpipe.edges.prompts.formats import FOREIGN, MAGIC, WIDE
from genpipe.edges.prompts.source import READ_BYTES_MAX, FileSource

INPUTS = Path(__file__).parents[1] / "cases" / "inputs"
MANIFEST = {entry["file"]: entry for entry in json.loads((INPUTS / "expected_shared.json").read_text())}
NO_TEMPERATURE = ("prompts_nan.jsonl", 2)
"""Its value is only a danger to readers that take sampling values from the input."""
ENDS_IN_ANSWER = {"messages_odd.jsonl": (4,)}
"""The first record that does; a run says so once."""


def never(text):
    raise AssertionError(text)


class Opened:
    """A source over some files, closed at the end."""

    def __init__(self, *files, done=(), index_path=None, dialect=None, warn=never, on_mismatch=None):
        self.source = FileSource(
            files=files,
            dialect=dialect or Dialect(),
            index_path=index_path,
            done=Bitmap(done),
            warn=warn,
            on_mismatch=on_mismatch,
        )

    def __enter__(self):
        return self.source

    def __exit__(self, *_):
        self.source.close()


async def all_chunks(source, count=1_000):
    """Reads until exhausted."""
    chunks = [await source.read(count)]
    while not chunks[-1].exhausted:
        chunks.append(await source.read(count))
    return chunks


def read_all(*files, count=1_000, **options):
    """All prompts and bad lines, and the total, as seen by a run."""
    with Opened(*files, **options) as source:
        chunks = asyncio.run(all_chunks(source, count))
        wait_for_total(source)
        prompts = [prompt for chunk in chunks for prompt in chunk.prompts]
        return prompts, [line for chunk in chunks for line in chunk.bad], source.total


def wait_for_total(source):
    until_s = time.monotonic() + 10
    while source.total is None and time.monotonic() < until_s:
        time.sleep(0.001)


def write(path, count, *, first=0):
    path.write_bytes(b"".join(b'{"prompt": "%d"}\n' % (first + i) for i in range(count)))
    return path


def text_of(prompt):
    return json.loads(prompt.payload)[-1]["content"]


@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_a_shared_case_is_read_as_its_manifest_says(name):
    """Every row is a prompt with the right text, or a bad line with its number; none is lost."""
    path, manifest = INPUTS / name, MANIFEST[name]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == manifest["sha256"]
    told: list[str] = []
    prompts, bad, total = read_all(path, warn=told.append)
    by_index = {prompt.index: prompt for prompt in prompts}
    assert [text.split(" ends in an answer")[0] for text in told] == [
        f"{path}:{line}" for line in ENDS_IN_ANSWER.get(name, ())
    ]
    bad_lines = {line.index: line.line for line in bad}

    rows = [row for row in manifest["rows"] if row["verdict"] != "none"]
    assert sorted([*by_index, *bad_lines]) == [row["ordinal"] for row in rows]
    assert total == len(rows)
    for row in rows:
        if row["verdict"] == "reject" and (name, row["ordinal"]) != NO_TEMPERATURE:
            assert bad_lines[row["ordinal"]] == row["line"], row
        elif row["verdict"] == "run":
            assert row["ordinal"] in by_index, row
        sha = row.get("expect_user_sha256_16")
        if sha is not None and row["ordinal"] in by_index:
            user = [m for m in json.loads(by_index[row["ordinal"]].payload) if m["role"] == "user"][-1]
            assert hashlib.sha256(user["content"].encode()).hexdigest()[:16] == sha, row
    for prompt in prompts:
        json.loads(prompt.payload.decode(), parse_constant=never)


def test_files_are_read_in_order_under_one_numbering(tmp_path):
    one, two = write(tmp_path / "b", 3), write(tmp_path / "a", 2, first=3)
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf")

    prompts, bad, total = read_all(one, tmp_path / "empty", tmp_path / "bom", two)

    assert [(p.index, text_of(p)) for p in prompts] == [(i, str(i)) for i in range(5)]
    assert bad == []
    assert total == 5


def test_empty_input_is_exhausted_at_once(tmp_path):
    (tmp_path / "a").write_bytes(b"\n \r\n\xef\xbb\xbf\n")

    assert read_all(tmp_path / "a") == ([], [], 0)


def test_a_bad_line_names_its_file_and_physical_line(tmp_path):
    first = write(tmp_path / "a", 1)
    second = tmp_path / "b"
    second.write_bytes(b'\n\n{"prompt": "1"}\n\nbad\n')

    _, (bad,), _ = read_all(first, second)

    assert (bad.index, bad.file, bad.line) == (2, str(second), 5)
    assert "not JSON" in bad.reason


@pytest.mark.parametrize("line", [b"\x0b", b"\x0c", b"\x00", b"\xc2\xa0", b"\xe2\x80\xa8", b"\xef\xbb"])
def test_only_blanks_tabs_returns_and_byte_order_marks_make_a_line_blank(tmp_path, line):
    (tmp_path / "a").write_bytes(b'{"prompt": "0"}\n' + line + b'\n{"prompt": "2"}')

    prompts, bad, _ = read_all(tmp_path / "a")

    assert [p.index for p in prompts] == [0, 2]
    assert [b.index for b in bad] == [1]


BLANK = st.lists(st.sampled_from([b" ", b"\t", b"\r", b"\xef\xbb\xbf"]), max_size=3).map(b"".join)
LINE = st.one_of(
    BLANK,
    st.binary(max_size=12),
    st.text(max_size=6).map(lambda text: json.dumps({"prompt": "p" + text}, ensure_ascii=False).encode()),
    st.tuples(BLANK, st.just(b'{"prompt": "x"}'), BLANK).map(b"".join),
)


def naive(blobs):
    """What the records are, by a plain split: texts by index, bad ones as None, with file and line."""
    rows = []
    for file, blob in enumerate(blobs):
        for number, line in enumerate(blob.split(b"\n"), 1):
            text = line.strip(b" \t\r")
            while text.startswith(b"\xef\xbb\xbf"):
                text = text[3:].strip(b" \t\r")
            if not text:
                continue
            try:
                content = json.loads(text.decode())["prompt"]
            except (ValueError, TypeError, KeyError, RecursionError):
                content = None
            rows.append((content, file, number))
    return rows


@settings(max_examples=80, deadline=None)
@given(data=st.data(), blobs=st.lists(st.lists(LINE, max_size=30).map(b"\n".join), min_size=1, max_size=3))
def test_any_bytes_are_numbered_and_read_as_a_plain_split_does(tmp_path_factory, data, blobs):
    """Whatever is done, however much is read at once, and from what is left of an earlier process's index."""
    assume(not any(blob.startswith((*MAGIC, *FOREIGN, *WIDE)) for blob in blobs))
    folder = tmp_path_factory.mktemp("soup")
    files = [folder / f"in-{place}" for place in range(len(blobs))]
    for file, blob in zip(files, blobs, strict=True):
        file.write_bytes(blob)
    rows = naive(blobs)
    index_path = folder / "input.idx"
    for options in ({}, {"index_path": index_path}, {"index_path": index_path}):
        if index_path.exists():
            kept_bytes = data.draw(st.integers(0, index_path.stat().st_size))
            os.truncate(index_path, kept_bytes)
        done = data.draw(st.sets(st.integers(0, len(rows) - 1))) if rows else set()
        count = data.draw(st.integers(1, 7))
        prompts, bad, total = read_all(*files, count=count, done=done, warn=lambda _: None, **options)

        assert total == len(rows)
        assert {p.index: text_of(p) for p in prompts} == {
            i: row[0] for i, row in enumerate(rows) if row[0] is not None and i not in done
        }
        assert [p.index for p in prompts] == sorted(p.index for p in prompts)
        assert [(line.index, line.file, line.line) for line in bad] == [
            (i, str(files[row[1]]), row[2]) for i, row in enumerate(rows) if row[0] is None and i not in done
        ]


def test_a_read_is_bounded_by_count_and_by_bytes(tmp_path):
    path = tmp_path / "a"
    path.write_bytes((b'{"prompt": "%b"}\n' % (b"x" * (3 << 20))) * 5 + b"bad\n" * 5)
    with Opened(path) as source:
        chunks = asyncio.run(all_chunks(source, 4))

    assert [len(chunk.prompts) for chunk in chunks][:2] == [2, 2]
    assert sum(len(chunk.prompts) for chunk in chunks) == 5
    assert sum(len(chunk.bad) for chunk in chunks) == 5
    for chunk in chunks:
        assert len(chunk.prompts) + len(chunk.bad) <= 4
        assert sum(len(prompt.payload) for prompt in chunk.prompts) <= READ_BYTES_MAX


def test_a_prompt_larger_than_a_read_is_given_alone(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b'{"prompt": "1"}\n{"prompt": "%b"}\n{"prompt": "3"}\n' % (b"x" * (READ_BYTES_MAX + 1)))
    with Opened(path) as source:
        chunks = asyncio.run(all_chunks(source))

    assert [[p.index for p in chunk.prompts] for chunk in chunks if chunk.prompts] == [[0], [1], [2]]


def test_a_line_over_the_limit_is_bad_and_the_next_is_read(tmp_path):
    path = tmp_path / "a"
    with path.open("wb") as out:
        out.write(b'{"prompt": "0"}\n{"prompt": "')
        out.write(b"x" * LINE_BYTES_MAX)
        out.write(b'"}\n{"prompt": "2"}\n')

    prompts, (bad,), total = read_all(path)

    assert [text_of(p) for p in prompts] == ["0", "2"]
    assert (bad.index, bad.line, bad.reason) == (1, 2, "longer than 64 MiB")
    assert total == 3


def test_done_records_are_neither_parsed_nor_given(tmp_path):
    """Lines that would be bad if anybody looked at them."""
    path = tmp_path / "a"
    path.write_bytes(b"bad\n" * 1_500 + b'{"prompt": "x"}\n' + b"bad\n" * 1_500)
    done = [i for i in range(3_001) if i != 1_500]

    prompts, bad, total = read_all(path, done=done)

    assert [p.index for p in prompts] == [1_500]
    assert bad == []
    assert total == 3_001


def test_a_resume_seeks_over_chunks_that_are_done(tmp_path):
    """Only the chunk that holds the first prompts is read; the others are left to the scan."""
    path = write(tmp_path / "a", 40_000)
    read_all(path, index_path=tmp_path / "input.idx")
    with Opened(path, index_path=tmp_path / "input.idx", done=range(39_990)) as source:
        assert source.total == 40_000
        chunk = source._reader.read(100)  # in this thread, so that no scan is started
        verified = list(source._index._verified)

    assert [p.index for p in chunk.prompts] == list(range(39_990, 40_000))
    assert verified == [0] * 39 + [1]


def test_a_chunk_is_verified_before_its_prompts_are_given(tmp_path):
    path = write(tmp_path / "a", 5_000)
    index_path = tmp_path / "input.idx"
    read_all(path, index_path=index_path)
    path.write_bytes(path.read_bytes().replace(b'"2500"', b'"2x00"'))

    with Opened(path, index_path=index_path, done=range(2_000)) as source:
        with pytest.raises(ResumeMismatch, match="records 2000-2999"):
            asyncio.run(source.read(10))
        assert source.mismatch is not None


def test_a_change_among_done_chunks_is_found_in_the_background(tmp_path):
    path = write(tmp_path / "a", 150_000)
    index_path = tmp_path / "input.idx"
    with Opened(path, index_path=index_path) as source:
        asyncio.run(source.read(1))
        wait_for_total(source)
    path.write_bytes(path.read_bytes().replace(b'"140500"', b'"1405x0"'))
    told = threading.Event()
    seen: list[object] = []

    def on_mismatch(error):
        seen.append((threading.current_thread().name, error))
        told.set()

    async def read_until_told(source):
        """One prompt of the end is given at once; the next read after the discovery is refused."""
        first = await source.read(1)
        assert told.wait(10)
        with pytest.raises(ResumeMismatch, match="records 140000-140999"):
            await source.read(1)
        return first

    with Opened(path, index_path=index_path, done=range(149_000), on_mismatch=on_mismatch) as source:
        first = asyncio.run(read_until_told(source))

        assert [p.index for p in first.prompts] == [149_000]
        assert seen == [("input-scan", source.mismatch)]


def test_a_file_that_vanishes_ends_the_scan_with_a_config_error(tmp_path):
    one, two = write(tmp_path / "a", 150_000), write(tmp_path / "b", 10)
    told = threading.Event()
    with Opened(one, two, on_mismatch=lambda _: told.set()) as source:
        two.unlink()
        asyncio.run(source.read(1))
        assert told.wait(10)

        with pytest.raises(ConfigError, match=r"b cannot be read: No such file"):
            asyncio.run(source.read(1))
        assert source.mismatch is None


def test_input_that_grew_is_read_on(tmp_path):
    path = write(tmp_path / "a", 1_500)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    index_path = tmp_path / "input.idx"
    read_all(path, index_path=index_path)
    path.write_bytes(path.read_bytes() + b'\n{"prompt": "1500"}\nbad\n')

    prompts, (bad,), total = read_all(path, index_path=index_path, done=range(1_400))

    assert [text_of(p) for p in prompts] == [str(i) for i in range(1_400, 1_501)]
    assert (bad.index, bad.line) == (1_501, 1_502)
    assert total == 1_502


def test_closing_is_quick_at_any_moment_and_may_be_repeated(tmp_path):
    path = write(tmp_path / "a", 200_000)
    for reads in (0, 1, 20):
        source = FileSource(
            files=[path], dialect=Dialect(), index_path=tmp_path / "i", done=Bitmap(), warn=never
        )

        async def some(source=source, reads=reads):
            for _ in range(reads):
                await source.read(100)

        asyncio.run(some())
        began_s = time.perf_counter()
        source.close()
        source.close()

        assert time.perf_counter() - began_s < 0.2
        assert not [t for t in threading.enumerate() if t.name.startswith("input-")]


def test_a_read_that_is_cancelled_does_not_hinder_the_close(tmp_path):
    path = write(tmp_path / "a", 20_000)

    async def cancelled(source):
        task = asyncio.ensure_future(source.read(20_000))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Opened(path) as source:
        asyncio.run(cancelled(source))


@pytest.mark.parametrize("what", ["missing", "folder", "pipe", "none"])
def test_input_that_is_no_file_is_refused_at_once(tmp_path, what):
    path = tmp_path / what
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    files = [] if what == "none" else [path]

    for attempt in (lambda: Opened(*files), lambda: check_files(files, Dialect())):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert what == "none" or str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_input_without_permission_is_refused_at_once(tmp_path):
    path = write(tmp_path / "a", 1)
    path.chmod(0)

    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        Opened(path)


def test_the_options_of_the_dialect_reach_the_prompts(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b'{"q": "a", "key": 1e3, "meta": 2.0}\n')

    (prompt,), _, _ = read_all(path, dialect=Dialect(field="q", id_field="key", keep=("meta",)))

    assert (prompt.id_json, prompt.keep_json) == (b"1e3", b'"meta":2.0')


def test_a_check_counts_everything_and_lists_some_bad_lines(tmp_path):
    one, two = tmp_path / "a", tmp_path / "b"
    one.write_bytes(b'{"prompt": "x"}\n\nbad\n{"messages": [{"role": "user", "content": "long one"}]}\nbad\n')
    two.write_bytes(b'\r\n{"conversations": [{"from": "human", "value": "xy"}]}\nbad')

    report = check_files([one, two], Dialect(), bad_lines_max=2)

    assert report.records == 6
    assert report.blank_lines == 2
    assert report.input_bytes == one.stat().st_size + two.stat().st_size
    assert report.shapes == {"prompt": 1, "messages": 1, "sharegpt": 1}
    assert report.bad_count == 3
    assert [(line.index, line.file, line.line) for line in report.bad_lines] == [
        (1, str(one), 3),
        (3, str(one), 5),
    ]
    assert report.payload_bytes_min == len(b'[{"role":"user","content":"x"}]')
    assert report.payload_bytes_max == len(b'[{"role":"user","content":"long one"}]')


def test_a_check_agrees_with_a_run_on_a_large_file(tmp_path):
    path = tmp_path / "a"
    path.write_bytes((b'{"prompt": "x"}\n' * 7 + b"\n" + b"bad\n") * 500)

    prompts, bad, total = read_all(path)
    report = check_files([path], Dialect())

    assert (report.records, report.bad_count) == (total, len(bad))
    assert report.bad_lines == tuple(bad)
    assert report.shapes == {"prompt": len(prompts)}
    assert check_files([write(tmp_path / "e", 0)], Dialect()).payload_bytes_min is None


def test_blank_files_have_no_records(tmp_path):
    (tmp_path / "a").write_bytes(b"\n \r\n\xef\xbb\xbf\n")
    (tmp_path / "b").write_bytes(b"")
    (tmp_path / "c").write_bytes(b"\nbad")

    assert not has_records([tmp_path / "a", tmp_path / "b"])
    assert has_records([tmp_path / "a", tmp_path / "b", tmp_path / "c"])


def test_nothing_is_read_after_the_end(tmp_path):
    with Opened(write(tmp_path / "a", 2)) as source:
        chunk = asyncio.run(source.read(10))

    assert isinstance(chunk, Chunk)
    assert chunk.exhausted
    assert len(chunk.prompts) == 2


def test_verify_rest_finds_a_change_in_done_records_however_short_the_run(tmp_path):
    """A resume with little left to ask is not done before all of the input was looked at."""
    path, index_path = tmp_path / "in.jsonl", tmp_path / "input.idx"
    records = [b'{"prompt": "number %06d"}\n' % number for number in range(20_000)]
    path.write_bytes(b"".join(records))

    async def read_all(done):
        source = FileSource(
            files=[path], dialect=Dialect(), index_path=index_path, done=done, warn=warnings.append
        )
        try:
            while not (await source.read(5000)).exhausted:
                pass
            await source.verify_rest()
        finally:
            source.close()
        return source.total

    warnings: list[str] = []
    total = asyncio.run(read_all(Bitmap()))
    records[12_345] = b'{"prompt": "numbEr 012345"}\n'
    path.write_bytes(b"".join(records))

    assert total == 20_000
    with pytest.raises(ResumeMismatch, match="12000-12999"):
        asyncio.run(read_all(Bitmap(range(20_000))))


def test_a_run_that_went_further_than_its_input_is_refused_though_the_index_is_lost(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n' * 50)

    async def read():
        source = FileSource(
            files=[path],
            dialect=Dialect(),
            index_path=tmp_path / "input.idx",
            done=Bitmap(range(100)),
            warn=print,
        )
        try:
            await source.read(10)
            await source.verify_rest()
        finally:
            source.close()

    with pytest.raises(ResumeMismatch, match="holds 50 records"):
        asyncio.run(read())
