"""A bad line costs itself and nothing else: its neighbours run, keep their index, and it is named."""

import json

import pytest

from tests.e2e.harness import INPUTS, failures, genpipe, row_of, saved, servers, shard_paths

LAST = b'{"id": "bad-last", "prompt": "cut at the end of the fi'


@pytest.fixture
def source(tmp_path):
    """The bad lines of the case, with one more before the first and after the last."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"not JSON at all\n" + (INPUTS / "prompts_badlines.jsonl").read_bytes() + LAST)
    return path


def verdicts():
    expected = json.loads((INPUTS / "expected_shared.json").read_text())
    rows = next(entry for entry in expected if entry["file"] == "prompts_badlines.jsonl")["rows"]
    return {row["line"]: row for row in rows}


def test_bad_lines_are_skipped_listed_and_make_the_exit_code_1(tmp_path, source):
    out = tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        ended = genpipe(*command)
        again = genpipe(*command)
        fleet.stop()
        visits = fleet.visits()
    records, failed = saved(out), failures(out)

    assert (ended.code, again.code) == (1, 1), ended.err
    assert sorted([*records, *failed]) == list(range(22))
    assert {0, 21} <= set(failed)
    # In the joined file, line n of the case is record n, counted from 0: there is one line before it.
    for line, row in verdicts().items():
        if row["verdict"] == "run":
            assert row_of(records[line]["messages"][0]["content"]) == row["expect_user_sha256_16"]
        if row["verdict"] == "reject":
            assert line in failed, row
    for index, failure in failed.items():
        assert failure["message"].startswith(f"{source}:{index + 1}: "), failure
        assert failure["for_good"] is True
    assert "failed.jsonl" in ended.err
    assert len(visits) == len(records)
    # What may go either way here: of a key given twice the last counts, and depth is no fault.
    assert records[14]["messages"][0]["content"] == "second"
    assert records[18]["messages"][0]["content"] == "deep"


def test_a_field_three_thousand_levels_deep_is_kept_in_a_record_that_counts(tmp_path, source):
    out = tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        ended = genpipe(*command, "--set", "output.keep=['meta']")
        verified = genpipe("verify", out)
    lines = [line for path in shard_paths(out) for line in path.read_bytes().split(b"\n")]
    given = source.read_bytes().split(b"\n")[18].partition(b'"meta": ')[2].removesuffix(b"}")

    assert ended.code == 1, ended.err
    assert verified.code == 0, verified.err
    assert given.count(b"[") == 3000
    assert [line.startswith(b'{"index":18,') for line in lines if b'"meta":' + given in line] == [True]


def test_on_bad_line_fail_names_every_one_of_them_before_anything_is_asked(tmp_path, source):
    out = tmp_path / "out"
    with servers(tmp_path) as fleet:
        ended = genpipe(
            *("run", "--prompts", source, "--servers", fleet.address, "--out", out),
            *("--set", "input.on_bad_line=fail"),
        )
        fleet.stop()
        visits = fleet.visits()
    lines = ended.err.splitlines()
    errors = [line for line in lines if line.startswith("genpipe: error: ")]

    assert ended.code == 2
    assert len(errors) == 1
    for line, row in verdicts().items():
        if row["verdict"] == "reject":
            assert any(f"{source}:{line + 1}: " in told for told in lines), row
    assert any(f"{source}:22: " in told for told in lines)
    assert "Traceback" not in ended.err
    assert visits == []
    assert not out.exists()


def test_check_finds_the_same_bad_lines_without_any_server(tmp_path, source):
    ended = genpipe("check", source)

    assert ended.code == 1, ended.err
    assert "22 records" in ended.out
    assert f"{source}:1: " in ended.out
    assert f"{source}:22: " in ended.out
    assert ended.err == ""
