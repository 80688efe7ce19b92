"""Exports as Parquet: the rows of the JSON Lines form, in columns with types."""

import builtins
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from genpipe.core.errors import ConfigError
from genpipe.edges import strict_json
from genpipe.edges.export import parquet as export_parquet
from genpipe.edges.export.columns import Columns
from genpipe.edges.export.parquet import ParquetRows
from tests.edges.export_runs import (
    asked,
    assert_same_rows,
    export,
    is_json,
    make_run,
    parquet_rows,
    record,
    response,
)

FORMATS = ["raw", "openai", "sharegpt", "prompt"]
CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
ODD = "\u2028 \u2029 \x85 \x00 é 😀 \U0010ffff \r\n \x1f"


@pytest.mark.parametrize("format_name", FORMATS)
def test_rows_are_those_of_the_lines(tmp_path, format_name):
    two = {"responses": [response("a"), response("b", "hm", CALLS)]}
    talk = {"steps": [{"response": response("x", "y")}, {"response": response("z")}]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}], "odd": 1.50},
        {"role": "assistant", "content": "x"},
        {"role": "tool", "tool_call_id": "c", "content": "b", "odd": "text"},
    ]
    given = [
        record(5, ODD, user=ODD, id_json='"q"', kept='"a":"x"'),
        record(3, id_json='"r"', flags=["cut"], response=response(None, "hm", CALLS), usage=None),
        record(4, id_json='"\\ud800"', messages=messages, response=response("z"), **talk),
        record(1, id_json='""', kept='"a":null,"b":[1,2]', token_ids={"prompt": [1, 2], "output": [3]}),
        record(0, id_json='"t"', kept='"b":[]', body={"tools": CALLS}, **two),
    ]
    assert_same_rows(make_run(tmp_path / "run", *given), format=format_name)


@pytest.mark.parametrize("member", ["prompt", "text", "input_ids"])
@pytest.mark.parametrize("format_name", ["raw", "prompt"])
def test_prompts_that_are_no_messages_have_their_types(tmp_path, member, format_name):
    payload = [1, 2, 151_643] if member == "input_ids" else ODD
    schema = assert_same_rows(make_run(tmp_path / "run", asked(member, payload)), format=format_name)
    kind = schema.field("prompt" if format_name == "prompt" else member).type

    assert kind == (pa.list_(pa.int64()) if member == "input_ids" else pa.string())


def test_prompts_of_two_kinds_are_json(tmp_path):
    given = [asked("prompt", "a", 0), record(1)]

    assert is_json(assert_same_rows(make_run(tmp_path / "run", *given), format="prompt").field("prompt"))


def test_token_ids_are_lists_of_whole_numbers(tmp_path):
    given = record(0, token_ids={"prompt": [1, 0], "output": [2]})
    folder = make_run(tmp_path / "run", given, record(1))
    schema = assert_same_rows(folder, format="openai", token_ids=True)
    integers = pa.list_(pa.int64())
    assert schema.field("input_ids").type == schema.field("loss_mask").type == integers
    raw = assert_same_rows(folder).field("token_ids").type
    assert {raw.field(place).name: raw.field(place).type for place in range(2)} == {
        "prompt": integers,
        "output": integers,
    }


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (['"a"', '""', "null"], pa.string()),
        (["true", "false"], pa.bool_()),
        (["1", "-9223372036854775808", "9223372036854775807"], pa.int64()),
        (["1", "0.5", "-0", "1e3", "9007199254740992"], pa.float64()),
        (["[1]", "[]", "null", "[2,3]"], pa.list_(pa.int64())),
        (["[0.5]", "[1]"], pa.list_(pa.float64())),
        (['["a",null]'], pa.list_(pa.string())),
        (["null"], pa.string()),
        (['"1"', "1"], None),
        (["true", "1"], None),
        (["1", "9223372036854775808"], None),
        (["12345678901234567890123"], None),
        (["0.5", "9007199254740993"], None),
        (["1e300"], None),
        (['{"a":1.0}', "{}"], None),
        (['[{"a":1}]'], None),
        (['[1,"a"]', "[2]"], None),
        (["[1]", "1"], None),
        (["[12345678901234567890123]"], None),
        (["[[0.5],[1]]"], pa.list_(pa.list_(pa.float64()))),
        (["[[[1]],[]]"], pa.list_(pa.list_(pa.list_(pa.int64())))),
        (["[[[[1]]]]"], None),
    ],
)
def test_a_column_has_the_type_that_all_of_its_values_have(tmp_path, values, kind):
    given = [record(place, id_json=text, kept=f'"x":{text}') for place, text in enumerate(values)]
    for format_name in ("raw", "openai"):
        folder = make_run(tmp_path / format_name, *given)
        schema = assert_same_rows(folder, format=format_name)
        for name in ("id", "x"):
            assert is_json(schema.field(name)) == (kind is None)
            assert schema.field(name).type == (kind or pa.string())


def test_texts_of_json_have_every_digit(tmp_path):
    digits = ["1e3", "12345678901234567890123", '{"a":[0.10]}', "null"]
    given = [record(place, kept=f'"x":{text}') for place, text in enumerate(digits)]
    out = export(make_run(tmp_path / "run", *given), "out.parquet", format="openai")[1]

    assert pq.read_table(out)["x"].to_pylist() == [*digits[:3], None]


@pytest.mark.parametrize("name", ["out.parquet", "out.jsonl"])
def test_values_that_are_nested_deeply_are_kept(tmp_path, name):
    deep = "[" * 3000 + "1.0" + "]" * 3000
    given = record(0, id_json=deep, kept=f'"x":{deep},"y":{{"a":{deep}}}')
    out = export(make_run(tmp_path / "run", given), name, format="openai")[1]
    wanted = {"id": deep, "x": deep, "y": f'{{"a":{deep}}}'}

    if name == "out.jsonl":
        line = out.read_text()
        assert all(f'"{key}":{text}' in line for key, text in wanted.items())
    else:
        (row,) = pq.read_table(out).to_pylist()
        assert {key: row[key] for key in wanted} == wanted


@pytest.mark.parametrize("text", ['{"a":12345678901234567890123}', '[{"a":1e3}]', '[{"a":"b"}]', '{"a":1}'])
def test_kept_fields_with_names_of_ours_keep_their_digits_too(tmp_path, text):
    folder = make_run(tmp_path / "run", record(0, kept=f'"completion":{text}'))
    schema = assert_same_rows(folder)
    found = pq.read_table(tmp_path / "same.parquet")["completion"].to_pylist()

    assert found == ([text] if is_json(schema.field("completion")) else [json.loads(text)])


def test_columns_that_only_left_out_records_have_are_not_there(tmp_path):
    given = [record(0, id_json="1"), record(1, id_json='"a"', kept='"x":1', flags=["cut"])]
    schema = assert_same_rows(make_run(tmp_path / "run", *given), without=frozenset({"cut"}))

    assert "x" not in schema.names
    assert schema.field("id").type == pa.int64()


def test_columns_stand_in_one_order_whatever_comes_first(tmp_path):
    a, b = record(0, kept='"z":1,"a":1'), record(1, id_json="1", response=response("x", "y"))
    found = [
        assert_same_rows(make_run(tmp_path / f"run{place}", *order), format="openai").names
        for place, order in enumerate([(a, b), (b, a)])
    ]

    assert found == [["id", "index", "messages", "a", "z"]] * 2


def test_no_rows_are_a_file_without_rows(tmp_path):
    out = export(make_run(tmp_path / "run", record(0)), "out.parquet", only=frozenset({"cut"}))[1]

    assert pq.read_table(out).num_rows == 0


@pytest.mark.parametrize(
    ("bounds", "groups"),
    [
        ({"GROUP_ROWS": 5}, [6, 6, 6, 2]),
        ({"GROUP_BYTES": 1}, [2] * 10),
        ({"BATCH_BYTES": 1, "GROUP_BYTES": 1}, [1] * 20),
        ({}, [20]),
    ],
)
def test_row_groups_are_bounded_by_rows_and_by_bytes(tmp_path, monkeypatch, bounds, groups):
    for name, value in {"BATCH_ROWS": 2, **bounds}.items():
        monkeypatch.setattr(export_parquet, name, value)
    out = export(make_run(tmp_path / "run", *map(record, range(20))), "out.parquet")[1]
    metadata = pq.ParquetFile(out).metadata

    assert [metadata.row_group(place).num_rows for place in range(metadata.num_row_groups)] == groups
    assert [row["index"] for row in parquet_rows(out)] == list(range(20))


def test_little_is_held_as_objects_and_as_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(export_parquet, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(export_parquet, "GROUP_BYTES", 50_000)
    columns = Columns()
    row = {"text": "x" * 1000}
    columns.see(row)
    held = []
    with open(tmp_path / "out.parquet", "wb") as file:
        sink = ParquetRows(file, columns)
        for _ in range(300):
            sink.put([row], 1000)
            held.append((len(sink._rows), sink._batches_bytes))
        sink.close()

    assert max(rows for rows, _ in held) < 10
    assert 30_000 < max(size_bytes for _, size_bytes in held) <= 50_000
    assert len(parquet_rows(tmp_path / "out.parquet")) == 300


def test_without_pyarrow_the_package_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    folder = make_run(tmp_path / "run", record(0))
    with pytest.raises(ConfigError, match=r"pip install 'genpipe-llm\[parquet\]'"):
        export(folder, "out.parquet")
    export(folder, "out.jsonl")
    monkeypatch.undo()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "run"]


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.tuples(VALUES, VALUES, TEXTS), min_size=1, max_size=4), name=st.sampled_from(FORMATS)
)
def test_any_values_come_back_equal(tmp_path_factory, values, name):
    made = [
        record(
            place,
            answer,
            id_json=strict_json.dumps(id_value).decode(),
            kept=f'"x":{strict_json.dumps(kept).decode()}',
        )
        for place, (id_value, kept, answer) in enumerate(values)
    ]
    folder = make_run(tmp_path_factory.mktemp("any") / "run", *made)
    assert_same_rows(folder, format=name)
    found = [json.loads(line) for line in (folder.parent / "same.jsonl").read_bytes().split(b"\n")[:-1]]
    if name != "sharegpt":
        assert [(row["id"], row["x"]) for row in found] == [(a, b) for a, b, _ in values]
