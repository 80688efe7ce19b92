"""Neither a prompt's text nor the user's own id is its identity: twins are all answered, across a kill."""

import json
import re
import shutil

from tests.e2e.harness import INPUTS, Ended, audit, genpipe, row_of, running, saved, servers, wait_for

NAMES = re.compile(
    r"run\.json|\.lock|segments\.jsonl|shards|shards/part-\d{6}\.jsonl|failed\.jsonl|manifest\.jsonl"
    r"|\.done_indices|input\.idx|progress\.json"
)


def test_twins_are_all_answered_across_a_kill_and_ids_come_back_with_their_types(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    shutil.copy(INPUTS / "prompts_dups.jsonl", source)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    texts = [row["prompt"] for row in rows]
    with servers(tmp_path, 1, "--tokens-per-s", 100) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 1, "--out", out]
        with running(*command, err=tmp_path / "1.err") as first:
            wait_for(lambda: len(saved(out)) >= 5, "five rows on disk")
            first.kill()
        before = saved(out)
        second: Ended = genpipe(*command)
        fleet.stop()
        visits = fleet.visits()

    assert second.code == 0, second.err
    assert 5 <= len(before) < len(rows)
    records = audit(out, texts)
    for index, row in enumerate(rows):
        assert ("id" in records[index]) == ("id" in row), index
        assert json.dumps(records[index].get("id")) == json.dumps(row.get("id")), index
    assert {index: records[index] for index in before} == before
    answered = [visit["row"] for visit in visits if visit["status"] == 200 and not visit["client_gone"]]
    assert set(answered) == {row_of(text) for text in texts}
    assert len(rows) <= len(answered) <= len(rows) + 1
    names = [str(path.relative_to(out)) for path in out.rglob("*")]
    assert [name for name in names if not NAMES.fullmatch(name)] == []
