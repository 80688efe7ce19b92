"""ShareGPT in the spellings that it comes in: run as they should be, or refused with a reason."""

import json
import shutil

from tests.cases.scripted import answer, scripted, verdicts
from tests.e2e.harness import INPUTS, failures, genpipe, row_of, saved

NAME = "sharegpt_variants.jsonl"


def test_each_variant_is_sent_as_its_last_question_or_refused_with_a_reason(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    shutil.copy(INPUTS / NAME, source)
    wanted = verdicts(json.loads((INPUTS / "expected_shared.json").read_text()), NAME)
    with scripted(lambda body: (200, answer(b'{"content":"fine"}'))) as server:
        ended = genpipe("run", "--prompts", source, "--servers", server.url, "--out", out)
    records, failed = saved(out), failures(out)
    sent = [json.loads(body)["messages"] for body in server.bodies]

    assert ended.code == 1, ended.err
    assert "Traceback" not in ended.err
    assert sorted([*records, *failed]) == sorted(wanted)
    assert sorted(failed) == [index for index, row in wanted.items() if row["verdict"] == "reject"]
    for index, failure in failed.items():
        assert failure["message"].startswith(f"{source}:{index + 1}: "), failure
        assert "conversations" in failure["message"]
    for index, record in records.items():
        assert record["messages"] in sent
        assert record["id"] == f"sg-{index}"
        if "expect_user_sha256_16" in wanted[index]:
            last = [message["content"] for message in record["messages"] if message["role"] == "user"][-1]
            assert row_of(last) == wanted[index]["expect_user_sha256_16"], index
        # Neither the old answer nor anything beside speaker and text.
        assert record["messages"][-1]["role"] in ("user", "tool")
        assert all(set(message) == {"role", "content"} for message in record["messages"])
    assert records[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert records[5]["messages"][0] == {"role": "assistant", "content": "Hello!"}
    assert [message["content"] for message in records[6]["messages"]] == ["Part one,", "part two?"]
    assert [message["role"] for message in records[9]["messages"]] == ["user", "assistant", "tool"]
    assert records[11]["messages"] == [{"role": "user", "content": "This one?"}]
