"""Rows of Parquet files as records of the input."""

import asyncio
import datetime as dt
import json
import sys
import tempfile
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import ConfigError, ResumeMismatch
from genpipe.edges.prompts import parquet_json
from genpipe.edges.prompts.checking import check_files
from genpipe.edges.prompts.chunks import CHUNK_BYTES_MAX
from genpipe.edges.prompts.dialects import Dialect
from genpipe.edges.prompts.formats import Handles
from genpipe.edges.prompts.input_index import InputIndex
from genpipe.edges.prompts.parquet_json import texts_of, values_of
from genpipe.edges.prompts.parquet_rows import ParquetRows
from genpipe.edges.prompts.source import FileSource


def write(path, count, *, group=700, first=0, change=None):
    texts = [f"number {number}" for number in range(first, first + count)]
    if change is not None:
        texts[change - first] = "another"
    parquet.write_table(pa.table({"prompt": texts}), path, row_group_size=group)
    return path


def lines_of(path):
    """All rows as JSON, however they are cut."""
    rows = ParquetRows(path)
    cut = rows.cut(file=0, first=0, lines_before=0, start=0, end=rows.count)
    rows.close()
    assert cut is not None
    return cut.texts


def scan(files, index_path=None, *, resumed=False):
    index, handles = (
        InputIndex(files=files, path=index_path, resumed=resumed, warn=pytest.fail),
        Handles(files),
    )
    try:
        for number in range(len(index)):
            index.verify(number, handles)
        while index.extend(len(index), handles, keep=False) is not None:
            pass
        return [index.entry(number) for number in range(len(index))]
    finally:
        handles.close()
        index.close()


def source_of(path, *, index_path=None, done=()):
    return FileSource(
        files=[path], dialect=Dialect(), index_path=index_path, done=Bitmap(done), warn=pytest.fail
    )


async def read_all(source):
    chunks = [await source.read(900)]
    while not chunks[-1].exhausted:
        chunks.append(await source.read(900))
    await source.verify_rest()
    return chunks


def value(array, *, name="v"):
    """How each value of a column looks in JSON, as it stands there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.parquet"
        parquet.write_table(pa.table({name: array}), path)
        begin = len(json.dumps(name)) + 2
        return [text[begin:-1].decode() if isinstance(text, bytes) else text for text in lines_of(path)]


def not_utf_8():
    """Texts, the second of which is none."""
    return pa.Array.from_buffers(pa.string(), 3, pa.array([b"ok", b"\xff", b"ok"]).buffers())


NS = 1_700_000_000_123_456_789


@pytest.mark.parametrize(
    ("array", "looks"),
    [
        (pa.array([2**63 - 1, -(2**63), None]), ["9223372036854775807", "-9223372036854775808", "null"]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([0.1, float("nan"), float("inf"), 1.5e-9]), ["0.1", "null", "null", "1.5e-9"]),
        (pa.array([True, None]), ["true", "null"]),
        (pa.array(["a\u2028\0é", ""]), ['"a\u2028\\u0000é"', '""']),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ['"a"', '"b"', '"a"']),
        (pa.array([b"text", b"\xff\x00"]), ['"text"', '{"base64":"/wA="}']),
        (pa.array([Decimal("12.50"), Decimal("-0.05"), None]), ["12.50", "-0.05", "null"]),
        (
            pa.array([Decimal(10**37 + 1)], pa.decimal128(38, 0)),
            ["10000000000000000000000000000000000001"],
        ),
        (pa.array([dt.date(2026, 8, 1)]), ['"2026-08-01"']),
        (pa.array([NS, NS // 10**9 * 10**9], pa.timestamp("ns")), [
            '"2023-11-14T22:13:20.123456789"', '"2023-11-14T22:13:20"']),
        (pa.array([NS // 1000], pa.timestamp("us", "Europe/Zurich")), ['"2023-11-14T22:13:20.123456+00:00"']),
        (pa.array([-1], pa.timestamp("ms")), ['"1969-12-31T23:59:59.999"']),
        (pa.array([2**62], pa.timestamp("ms")), ["4611686018427387904"]),
        (pa.array([1, None], pa.time64("ns")), ['"00:00:00.000000001"', "null"]),
        (pa.array([3_661], pa.time32("s")), ['"01:01:01"']),
        (pa.array([-1_500, None], pa.duration("ms")), ["-1.500", "null"]),
        (pa.array([[("a", 1), ("b", None)], None], pa.map_(pa.string(), pa.int64())), [
            '{"a":1,"b":null}', "null"]),
        (pa.array([[(1, "x")]], pa.map_(pa.int64(), pa.string())), ['[[1,"x"]]']),
        (pa.array([[{"role": "user", "content": None}], [], None]), [
            '[{"role":"user","content":null}]', "[]", "null"]),
        (
            pa.array([{"at": [NS, None], "n": 2**60}, {"at": None, "n": None}, None],
                     pa.struct({"at": pa.list_(pa.timestamp("ns")), "n": pa.int64()})),
            ['{"at":["2023-11-14T22:13:20.123456789",null],"n":1152921504606846976}',
             '{"at":null,"n":null}', "null"],
        ),
        (pa.nulls(2), ["null", "null"]),
        (pa.array([[("k", NS)], None, [], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.timestamp("ns"))), [
            '{"k":"2023-11-14T22:13:20.123456789"}', "null", "{}",
            '[["k","1970-01-01T00:00:00.000000001"],["k","1970-01-01T00:00:00.000000002"]]']),
        (pa.array([10**7, 0, None, -719_163, 2**31 - 1], pa.date32()), [
            '"29349-01-26"', '"1970-01-01"', "null", '"0000-12-31"', "2147483647"]),
        (not_utf_8(), ['"ok"', '{"base64":"/w=="}', '"ok"']),
        (not_utf_8().cast(pa.string_view(), safe=False), ['"ok"', '{"base64":"/w=="}', '"ok"']),
        (pa.ListArray.from_arrays([0, 1, 3], not_utf_8()), ['["ok"]', '[{"base64":"/w=="},"ok"]']),
        (pa.StructArray.from_arrays([not_utf_8(), pa.array([1, 2, 3])], names=["a", "b"]), [
            '{"a":"ok","b":1}', '{"a":{"base64":"/w=="},"b":2}', '{"a":"ok","b":3}']),
    ],
    ids=lambda given: str(getattr(given, "type", "")) or "looks",
)  # fmt: skip
def test_how_values_look(array, looks):
    assert value(array) == looks
    # A column that is made into JSON in parts looks no different.
    many = pa.chunked_array([array] * 300).combine_chunks()
    assert value(many) == looks * 300


def test_a_column_that_nobody_asks_for_costs_no_row(tmp_path):
    """Each holds something that the library has no Python value for."""
    table = pa.table(
        {
            "prompt": ["a", "b", "c"],
            "text": not_utf_8(),
            "day": pa.array([10**7, 0, None], pa.date32()),
            "at": pa.array([[("k", NS)], None, []], pa.map_(pa.string(), pa.timestamp("ns"))),
        }
    )
    parquet.write_table(table, tmp_path / "a")

    report = check_files([tmp_path / "a"], Dialect())

    assert (report.records, report.bad_count, report.shapes) == (3, 0, {"prompt": 3})


def test_a_struct_that_has_a_name_twice_is_a_list_of_pairs():
    twice = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["a", "a"])
    batch = pa.record_batch({"v": twice, "w": pa.array(["x", "y"])})

    assert texts_of(batch) == [b'{"v":[["a",1],["a",3]],"w":"x"}', b'{"v":[["a",2],["a",4]],"w":"y"}']


def test_a_value_that_cannot_be_had_costs_its_row_alone_and_names_its_column(tmp_path, monkeypatch):
    """No Parquet column is known that holds such a value; what the library says of it is not for users."""

    def values(array):
        if array.type == pa.int32() and 2 in array.to_pylist():
            raise ValueError("Install pandas")
        return values_of(array)

    monkeypatch.setattr(parquet_json, "values_of", values)
    table = pa.table({"prompt": ["a", "b", "c"], "odd": pa.array([1, 2, 3], pa.int32())})
    parquet.write_table(table, tmp_path / "a")

    source = source_of(tmp_path / "a")
    (chunk, *_) = asyncio.run(read_all(source))
    source.close()

    assert [prompt.index for prompt in chunk.prompts] == [0, 2]
    (bad,) = chunk.bad
    assert (bad.index, bad.line) == (1, 2)
    assert bad.reason == "a row that is no JSON: column 'odd' holds a value of the type int32"


def test_a_value_without_json_names_its_column():
    span = pa.array([pa.MonthDayNano([1, 2, 3])])

    (text,) = texts_of(pa.record_batch({"prompt": ["a"], "span": span}))

    assert text == "a row that is no JSON: column 'span' holds a value of the type MonthDayNano"


def test_two_columns_of_one_name_are_refused_in_one_line(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array(["b"])], ["prompt", "n", "prompt"])
    parquet.write_table(table, tmp_path / "a")

    for attempt in (lambda: source_of(tmp_path / "a"), lambda: check_files([tmp_path / "a"], Dialect())):
        with pytest.raises(ConfigError, match="/a has several columns named 'prompt': rename") as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_chunks_are_thousands_of_rows_within_row_groups(tmp_path):
    entries = scan([write(tmp_path / "a", 4_000, group=1_500), write(tmp_path / "b", 10, first=4_000)])

    assert [(e.file, e.first, e.records, e.start, e.end, e.lines) for e in entries] == [
        (0, 0, 1_000, 0, 1_000, 1_000),
        (0, 1_000, 500, 1_000, 1_500, 1_500),
        (0, 1_500, 1_000, 1_500, 2_500, 2_500),
        (0, 2_500, 500, 2_500, 3_000, 3_000),
        (0, 3_000, 1_000, 3_000, 4_000, 4_000),
        (1, 4_000, 10, 0, 10, 10),
    ]


def test_long_rows_end_a_chunk_sooner(tmp_path):
    table = pa.table({"prompt": [f"{number} " + "x" * (1 << 20) for number in range(9)]})
    parquet.write_table(table, tmp_path / "a", row_group_size=9)

    assert [entry.records for entry in scan([tmp_path / "a"])] == [4, 4, 1]
    assert CHUNK_BYTES_MAX == 4 << 20


def test_empty_files_and_row_groups_are_passed(tmp_path):
    with parquet.ParquetWriter(tmp_path / "a", pa.schema({"prompt": pa.string()})) as writer:
        for texts in ([], ["0"], [], ["1", "2"], []):
            writer.write_table(pa.table({"prompt": pa.array(texts, pa.string())}))
    write(tmp_path / "none", 0)

    assert [(e.first, e.start, e.end) for e in scan([tmp_path / "none", tmp_path / "a"])] == [
        (0, 0, 1),
        (1, 1, 3),
    ]


def test_the_total_is_known_before_anything_is_read(tmp_path):
    source = source_of(write(tmp_path / "a", 2_500))
    total = source.total
    source.close()

    assert total == 2_500


def test_a_resume_reads_no_row_group_that_is_done(tmp_path):
    """They are damaged after the run has indexed them: whoever looked at them would fail."""
    path = write(tmp_path / "a", 5_000, group=1_000)
    scan([path], tmp_path / "idx")
    metadata = parquet.ParquetFile(path).metadata
    data = bytearray(path.read_bytes())
    for number in range(4):
        column = metadata.row_group(number).column(0)
        begin = column.dictionary_page_offset or column.data_page_offset
        data[begin : begin + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(data)

    source = source_of(path, index_path=tmp_path / "idx", done=range(4_700))
    try:
        chunk = source._reader.read(1_000)  # in this thread, so that no scan is started
        assert [prompt.index for prompt in chunk.prompts] == list(range(4_700, 5_000))
        with pytest.raises(ConfigError, match="/a cannot be read as Parquet") as caught:
            asyncio.run(read_all(source_of(path, index_path=tmp_path / "idx", done=range(500))))
        assert "\n" not in str(caught.value)
    finally:
        source.close()


@pytest.mark.parametrize("done", [range(0), range(1_234), [*range(700), *range(1_400, 2_499)]])
def test_what_is_not_done_is_read_wherever_it_stands(tmp_path, done):
    path = write(tmp_path / "a", 2_500)
    scan([path], tmp_path / "idx")
    source = source_of(path, index_path=tmp_path / "idx", done=done)
    chunks = asyncio.run(read_all(source))
    total = source.total
    source.close()
    prompts = {prompt.index: prompt for chunk in chunks for prompt in chunk.prompts}

    assert sorted(prompts) == sorted(set(range(2_500)) - set(done))
    assert all(f'"number {index}"'.encode() in prompt.payload for index, prompt in prompts.items())
    assert total == 2_500


@pytest.mark.parametrize("group", [700, 400, 2_501])
def test_more_rows_at_the_end_are_accepted_however_they_are_grouped(tmp_path, group):
    path = write(tmp_path / "a", 2_000)
    before = scan([path], tmp_path / "idx")
    write(path, 2_501, group=group)

    entries = scan([path], tmp_path / "idx", resumed=True)

    assert entries[: len(before)] == before
    assert sum(entry.records for entry in entries) == 2_501


def test_other_rows_are_refused_with_file_and_chunk(tmp_path):
    path = write(tmp_path / "a", 2_500)
    scan([path], tmp_path / "idx")
    write(path, 2_500, change=800)
    with pytest.raises(ResumeMismatch, match=r"/a differs .* in records 700-1399 \(rows 700-1400\)"):
        scan([path], tmp_path / "idx", resumed=True)

    write(path, 2_400)
    with pytest.raises(ResumeMismatch, match=r"/a differs .* in records 2100-2499 .* it ends at row 2400"):
        scan([path], tmp_path / "idx", resumed=True)


def test_growth_in_front_of_another_file_is_refused(tmp_path):
    files = [write(tmp_path / "a", 3), write(tmp_path / "b", 3, first=3)]
    scan(files, tmp_path / "idx")
    write(files[0], 4)

    with pytest.raises(ResumeMismatch, match="/a has grown from 3 to 4 rows"):
        scan(files, tmp_path / "idx", resumed=True)


@pytest.mark.parametrize("what", ["cut off", "no end", "nothing but its mark"])
def test_damage_is_one_line_that_names_the_file(tmp_path, what):
    path = write(tmp_path / "a", 5_000)
    data = path.read_bytes()
    path.write_bytes(
        {"cut off": data[:-100], "no end": data[:-4] + b"abcd", "nothing but its mark": data[:4]}[what]
    )

    for attempt in (lambda: source_of(path), lambda: check_files([path], Dialect())):
        with pytest.raises(ConfigError, match="/a cannot be read as Parquet: ") as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_without_pyarrow_it_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path / "a", 5)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("genpipe.edges.prompts.parquet_rows", "genpipe.edges.prompts.parquet_json"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    with pytest.raises(ConfigError, match=r"needs pyarrow.*pip install 'genpipe-llm\[parquet\]'"):
        source_of(path)
