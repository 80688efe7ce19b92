"""U+2028, U+2029 and U+0085 are text, not ends of lines: in prompts, and in answers too."""

import json
import shutil

from tests.e2e.harness import INPUTS, audit, genpipe, row_of, servers, shard_paths

SEPARATORS = "\u2028\u2029\x85"


def test_separators_in_prompts_and_answers_shift_no_row_and_cut_no_text(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    shutil.copy(INPUTS / "prompts_u2028.jsonl", source)
    expected = json.loads((INPUTS / "expected_shared.json").read_text())
    rows = next(entry for entry in expected if entry["file"] == "prompts_u2028.jsonl")["rows"]
    texts = [json.loads(line)["prompt"] for line in source.read_bytes().split(b"\n")[:-1]]
    with servers(tmp_path) as fleet:
        ended = genpipe(
            "run",
            "--prompts",
            source,
            "--servers",
            fleet.address,
            "--out",
            out,
            "--set",
            "output.keep=['meta']",
        )

    assert ended.code == 0, ended.err
    records = audit(out, texts)
    assert [row_of(texts[row["ordinal"]]) for row in rows] == [row["expect_user_sha256_16"] for row in rows]
    data = b"".join(path.read_bytes() for path in shard_paths(out))
    assert data.count(b"\n") == len(rows)
    for index, record in records.items():
        asked_for = any(mark in texts[index] for mark in SEPARATORS)
        assert (SEPARATORS in record["response"]["content"]) == asked_for, index
    assert sum(SEPARATORS in record["response"]["content"] for record in records.values()) == 5
    assert SEPARATORS.encode() in data
    assert records[7]["meta"] == {"a\u2028b": "c\x85d"}
