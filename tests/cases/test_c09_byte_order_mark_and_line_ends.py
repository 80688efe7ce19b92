"""A byte order mark, CRLF, blank lines and a missing last newline are no fault; no prompts at all is."""

import json
import shutil

import pytest

from tests.e2e.harness import INPUTS, assert_one_error, genpipe, row_of, saved, servers, write_prompts

BOM = b"\xef\xbb\xbf"


def test_a_windows_file_reads_as_its_seven_rows(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    shutil.copy(INPUTS / "prompts_bom_crlf.jsonl", source)
    expected = json.loads((INPUTS / "expected_shared.json").read_text())
    rows = next(entry for entry in expected if entry["file"] == "prompts_bom_crlf.jsonl")["rows"]
    wanted = {row["ordinal"]: row["expect_user_sha256_16"] for row in rows if row["verdict"] == "run"}
    with servers(tmp_path) as fleet:
        ended = genpipe("run", "--prompts", source, "--servers", fleet.address, "--out", out)
    records = saved(out)

    assert ended.code == 0, ended.err
    assert {i: row_of(record["messages"][0]["content"]) for i, record in records.items()} == wanted
    assert [records[index]["id"] for index in range(7)] == [f"bom-{index}" for index in range(7)]


def test_a_file_without_a_last_newline_does_not_run_into_the_next_one(tmp_path):
    first, second, out = tmp_path / "1.jsonl", tmp_path / "2.jsonl", tmp_path / "out"
    first.write_bytes(b'{"prompt": "one"}\n{"prompt": "two"}')
    second.write_bytes(BOM + b'{"prompt": "three"}\r\n')
    with servers(tmp_path) as fleet:
        ended = genpipe(
            "run", "--prompts", first, "--prompts", second, "--servers", fleet.address, "--out", out
        )
    records = saved(out)

    assert ended.code == 0, ended.err
    assert [records[index]["messages"][0]["content"] for index in range(3)] == ["one", "two", "three"]


@pytest.mark.parametrize(
    "data", [b"", b"\n\r\n   \t \n", BOM, BOM + b"\r\n"], ids=["empty", "blank", "bom", "bom and blank"]
)
def test_an_input_without_any_prompt_is_refused_in_one_line(tmp_path, data):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_bytes(data)
    ended = genpipe("run", "--prompts", source, "--servers", "http://127.0.0.1:9", "--out", out)

    assert_one_error(ended, 2, str(source), "empty")
    assert not out.exists()


def test_an_empty_file_among_full_ones_is_no_fault(tmp_path):
    empty, out = tmp_path / "empty.jsonl", tmp_path / "out"
    empty.write_bytes(BOM)
    full = write_prompts(tmp_path / "full.jsonl", ["one", "two"])
    with servers(tmp_path) as fleet:
        ended = genpipe(
            "run", "--prompts", empty, "--prompts", full, "--servers", fleet.address, "--out", out
        )

    assert ended.code == 0, ended.err
    assert sorted(saved(out)) == [0, 1]
