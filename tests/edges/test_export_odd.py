"""Exports of what servers and inputs seldom hold, and exports that end early."""

import gc
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from genpipe import folder_commands
from genpipe.core.errors import ConfigError
from genpipe.edges.export.making import Making
from tests.edges.export_runs import (
    asked,
    assert_same_rows,
    export,
    is_json,
    json_rows,
    make_run,
    record,
    response,
    rows_of,
)

USER = {"role": "user", "content": "2 + 2?"}
PARTS = [{"type": "text", "text": "Four."}]
LOOP = "and so on and on, " * 40


def ids(prompt, output):
    return {"prompt": prompt, "output": output}


# Token ids.


@pytest.mark.parametrize(
    "given",
    [
        record(0, token_ids=ids(None, [3]), kept='"input_ids":[8,9]'),
        asked("prompt", "2 + 2 =", token_ids=ids(None, [3]), kept='"input_ids":[8,9]'),
    ],
)
def test_a_kept_field_is_never_taken_for_the_ids_of_the_prompt(tmp_path, given):
    exported, out = export(make_run(tmp_path / "run", given), format="prompt", token_ids=True)

    assert (exported.records, out.read_bytes()) == (0, b"")
    assert exported.left_out == {"no token ids": 1}


@pytest.mark.parametrize("name", ["o.jsonl", "o.parquet"])
def test_a_run_that_has_no_token_ids_is_refused_and_says_how_to_get_some(tmp_path, name):
    kept = '"theirs":"\\"token_ids\\": are none"'
    folder = make_run(tmp_path / "run", record(0, '"token_ids":', kept=kept), token_ids=False)

    with pytest.raises(
        ConfigError, match=r"did not begin with request\.token_ids=true, and has no token ids"
    ):
        export(folder, name, format="prompt", token_ids=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_where_the_settings_were_changed_those_that_have_ids_are_taken_with_a_warning(tmp_path):
    later = record(1, token_ids=ids([1], [2]), kept='"settings":"0123456789abcdef"')
    warnings: list[str] = []
    folder = make_run(tmp_path / "run", record(0), later, token_ids=False)
    exported, _ = export(folder, warnings=warnings, format="openai", token_ids=True)

    assert exported.as_text() == "1 records exported, 1 left out (no token ids)"
    assert exported.is_whole
    assert len(warnings) == 1
    assert "did not begin with request.token_ids=true" in warnings[0]


# Answers of shapes that no server should send.


@pytest.mark.parametrize(
    ("content", "thought"),
    [(PARTS, "hm"), ("Four.", {"a": 1}), ("Four.", ["hm"]), ("Four.", 7), (None, ["hm"]), ({"a": 1}, "hm")],
)
@pytest.mark.parametrize("format_name", ["openai", "prompt", "sharegpt"])
def test_content_and_thoughts_that_are_no_texts_stay_as_they_are(tmp_path, format_name, content, thought):
    folder = make_run(tmp_path / "run", record(0, response=response(content, thought)))
    key = {"openai": "messages", "prompt": "completion", "sharegpt": "conversations"}[format_name]
    for reasoning in ("field", "think", "drop"):
        exported, out = export(folder, f"{reasoning}.jsonl", format=format_name, reasoning=reasoning)
        said = json_rows(out)[0][key][-1]
        shown = content
        if format_name == "sharegpt":
            shown = "Four." if content == PARTS else content or ""
        assert exported.is_whole
        assert said["content"] == shown
        assert said.get("reasoning_content") == (None if reasoning == "drop" else thought)
        assert_same_rows(folder, format=format_name, reasoning=reasoning)


@pytest.mark.parametrize("content", [[5], [None], [{"type": "text", "text": 5}]])
def test_content_of_odd_parts_goes_out_as_it_is(tmp_path, content):
    given = record(0, messages=[{"role": "user", "content": content}])

    assert rows_of(tmp_path, given, format="sharegpt")[0]["conversations"][0]["content"] == content


@pytest.mark.parametrize("name", ["o.jsonl", "o.parquet"])
def test_a_record_that_has_not_the_form_does_not_end_the_export_of_the_others(tmp_path, name):
    no_payload = record(3).replace(b'"messages":', b'"other":')
    odd = [record(1, messages=[{"content": "x"}]), record(2, response=7), no_payload]
    warnings: list[str] = []
    folder = make_run(tmp_path / "run", record(0), *odd, record(4))
    exported, _ = export(
        folder, name, warnings=warnings, card=tmp_path / "card.md", format="sharegpt", reasoning="field"
    )

    assert (exported.records, exported.is_whole) == (2, False)
    assert len(warnings) == 1
    assert "3 records cannot be parsed or put into this form (the first is prompt 1's)" in warnings[0]
    assert "| not readable | 3 |" in (tmp_path / "card.md").read_text()


# Filters where there are several samples.


def samples(index, *contents, **changes):
    return record(index, responses=[response(content) for content in contents], **changes)


def test_each_sample_is_judged_for_itself(tmp_path):
    given = [
        samples(0, "a", "", LOOP, flags=["looping"]),
        samples(1, "b", "c"),
        samples(2, "", LOOP, flags=["looping"]),
        samples(3, "d", "<think>e", flags=["cut", "unclosed_think"], finish_reason="length"),
        samples(4, "", "f", token_ids=ids([1], [[2], [3]])),
    ]
    folder = make_run(tmp_path / "run", *given)
    unwished = frozenset({"empty", "looping", "unclosed_think"})
    exported, out = export(folder, card=tmp_path / "card.md", format="prompt", without=unwished)

    assert [(row["index"], row["sample"], row["completion"][0]["content"]) for row in json_rows(out)] == [
        (0, 0, "a"),
        (1, 0, "b"),
        (1, 1, "c"),
        (3, 0, "d"),
        (4, 1, "f"),
    ]
    assert exported.as_text() == (
        "4 records exported as 5 rows, 1 left out (flagged empty or flagged looping), 2 of their samples "
        "left out (flagged empty), 1 of their samples left out (flagged looping), 1 of their samples left "
        "out (flagged unclosed_think)"
    )
    assert exported.is_whole
    card = (tmp_path / "card.md").read_text()
    assert "| samples of exported records, left out: flagged empty | 2 |" in card
    assert "| left out: flagged empty or flagged looping | 1 |" in card
    # The rows have none of the flags for which others were left out.
    flags = card.split("## Flags")[1].split("##")[0]
    assert "`cut`" in flags
    assert "looping" not in flags
    assert "unclosed_think" not in flags
    only, out = export(folder, "only.jsonl", format="prompt", only=frozenset({"looping"}))
    assert [(row["index"], row["sample"]) for row in json_rows(out)] == [(0, 2), (2, 1)]
    assert only.samples_left_out == {"not flagged looping": 3}
    assert_same_rows(folder, format="openai", without=unwished)


def test_what_is_known_of_a_record_only_goes_for_all_of_its_samples(tmp_path):
    given = [samples(0, "a", "b", flags=["cut"], finish_reason="length"), samples(1, "c", "d")]
    exported, out = export(
        make_run(tmp_path / "run", *given), format="prompt", without=frozenset({"cut", "short"})
    )

    assert exported.as_text() == "1 records exported as 2 rows, 1 left out (flagged cut)"
    assert [row["index"] for row in json_rows(out)] == [1, 1]


def test_raw_records_have_all_of_their_samples(tmp_path):
    given = samples(0, "a", "")
    folder = make_run(tmp_path / "run", given)

    assert export(folder, without=frozenset({"empty"}))[1].read_bytes() == given + b"}\n"


def test_samples_without_token_ids_are_counted(tmp_path):
    folder = make_run(tmp_path / "run", samples(0, "a", "b", "c", token_ids=ids([1], [[2], None, [3]])))
    exported, _ = export(folder, format="prompt", token_ids=True)

    assert exported.as_text() == ("1 records exported as 2 rows, 1 of their samples left out (no token ids)")


# Names and numbers.


def test_no_kept_field_is_lost_where_names_meet(tmp_path):
    kept = '"input_prompt":1,"prompt":2,"input_input_prompt":3,"tools":4,"input_tools":5'
    (row,) = rows_of(tmp_path, record(0, kept=kept), format="openai")

    assert row == {
        "index": 0,
        "messages": [USER, {"role": "assistant", "content": "Four."}],
        "input_prompt": 1,
        "input_input_input_prompt": 2,
        "input_input_prompt": 3,
        "input_input_tools": 4,
        "input_tools": 5,
    }


@pytest.mark.parametrize(
    ("digits", "kind"),
    [
        ("0.1", pa.float64()),
        ("0.10", pa.float64()),
        ("1E-7", pa.float64()),
        ("0.30000001192092896", pa.float64()),
        ("[0.5,1.50]", pa.list_(pa.float64())),
        ("0.1000000000000000055511151231257827", None),
        ("1e-400", None),
        ("1e-99999999999999999999999", None),
        ("[0.5,3.14159265358979323846]", None),
    ],
)
def test_a_column_is_numbers_only_where_doubles_hold_all_that_was_written(tmp_path, digits, kind):
    given = [record(0, kept='"x":null'), record(1, kept=f'"x":{digits}')]
    _, out = export(make_run(tmp_path / "run", *given), "o.parquet", format="openai")
    field = pq.read_schema(out).field("x")

    assert is_json(field) == (kind is None)
    assert field.type == (kind or pa.string())
    if kind is None:
        assert pq.read_table(out).column("x").to_pylist() == [None, digits]


# Files.


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.gz", "o.jsonl.zst", "o.parquet"])
def test_an_export_that_is_stopped_lets_go_of_its_file(tmp_path, name, monkeypatch):
    real = Making.rows

    def rows(making, line):
        if line.startswith(b'{"index":3'):
            raise KeyboardInterrupt
        return real(making, line)

    monkeypatch.setattr(Making, "rows", rows)
    folder = make_run(tmp_path / "run", *map(record, range(5)))
    with pytest.raises(KeyboardInterrupt):
        export(folder, name, format="openai")
    # What is closed too late complains when it is collected, and that fails a test here.
    gc.collect()

    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_endings_may_be_written_in_capitals(tmp_path):
    folder = make_run(tmp_path / "run", record(0))
    packed, columns = export(folder, "o.jsonl.GZ")[1], export(folder, "o.PARQUET")[1]

    assert json.loads(gzip.decompress(packed.read_bytes()))["index"] == 0
    assert pq.read_table(columns).num_rows == 1


def test_a_card_does_not_go_to_stdout():
    with pytest.raises(ConfigError, match="--card -: the card goes to a file"):
        folder_commands.card_path("o.jsonl", Path("-"), no_card=False)
