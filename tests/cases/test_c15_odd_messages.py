"""Messages that are legal but rare are sent as given, and what no server takes costs its own row alone."""

import json
import shutil

from tests.cases.scripted import answer, scripted, verdicts
from tests.e2e.harness import INPUTS, failures, genpipe, row_of, saved

NAME = "messages_odd.jsonl"
NOT_JINJA = b'{"object":"error","message":"No user query found in messages.","code":500}'
KNOWN = {"user", "system", "developer", "assistant", "tool"}


def act(body):
    """As a server with a strict template does."""
    roles = {message["role"] for message in body["messages"]}
    if not roles <= KNOWN:
        return 400, b'{"object":"error","message":"unknown role","code":400}'
    if "user" not in roles:
        return 500, NOT_JINJA
    return 200, answer(b'{"content":"fine"}')


def given(line):
    """What stands in a row as messages, however it stands there."""
    row = json.loads(line)
    messages = row["messages"] if "messages" in row else row["prompt"]
    return json.loads(messages) if isinstance(messages, str) else messages


def test_odd_messages_are_sent_as_given_and_permanent_errors_end_only_their_row(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    shutil.copy(INPUTS / NAME, source)
    wanted = verdicts(json.loads((INPUTS / "expected_shared.json").read_text()), NAME)
    rows = source.read_text().splitlines()
    with scripted(act) as server:
        ended = genpipe(
            *("run", "--prompts", source, "--servers", server.url, "--out", out),
            *("--set", "retry.backoff_s=0.01", "--set", "retry.bench_pause_s=0.05"),
            *("--set", "guards.failed_share=1.0"),
        )
    records, failed = saved(out), failures(out)
    sent = [json.loads(body)["messages"] for body in server.bodies]

    assert ended.code == 1, ended.err
    assert sorted([*records, *failed]) == sorted(wanted)
    for index, row in wanted.items():
        if row["verdict"] == "run":
            assert index in records, failed[index]
        if row["verdict"] == "reject":
            assert failed[index]["message"].startswith(f"{source}:{index + 1}: ")
            assert given(rows[index]) not in sent
    # A server's own no is told in its words: at once where it is a 400, after a few tries where it is a 500.
    assert sorted(set(failed) - {1, 6, 7, 11}) == [2, 3, 12]
    assert "unknown role" in failed[12]["message"]
    assert sent.count(given(rows[12])) == 1
    for index in (2, 3):
        assert "No user query found" in failed[index]["message"]
        assert 1 <= sent.count(given(rows[index])) <= 12
    for index, record in records.items():
        assert record["messages"] == given(rows[index])
        assert record["messages"] in sent
        if "expect_user_sha256_16" in wanted[index]:
            last = [message["content"] for message in record["messages"] if message["role"] == "user"][-1]
            assert row_of(last) == wanted[index]["expect_user_sha256_16"], index
    assert records[8]["messages"][1]["content"] is None
    assert records[18]["index"] == 18
    assert records[18]["response"]["content"] == "fine"
    assert records[18]["usage"]["completion_tokens"] == 5
    assert "error" not in records[18]
