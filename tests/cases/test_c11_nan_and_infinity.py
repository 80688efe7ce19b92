"""NaN and Infinity are no JSON: never sent, never written, and no answer is lost of them."""

import json
import shutil

from tests.cases.scripted import answer, scripted, verdicts
from tests.e2e.harness import INPUTS, audit, failures, genpipe, row_of, saved, servers

NAME = "prompts_nan.jsonl"
KEEP = "output.keep=['score', 'lo', 'hi']"


def refuse(word):
    raise AssertionError(f"{word} is no JSON")


def test_what_is_no_number_is_null_where_it_is_kept_and_refused_where_it_would_be_sent(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    shutil.copy(INPUTS / NAME, source)
    wanted = verdicts(json.loads((INPUTS / "expected_shared.json").read_text()), NAME)
    texts = [json.loads(line)["prompt"] for line in source.read_text().splitlines()]

    with scripted(lambda body: (200, answer(b'{"content":"fine"}'))) as server:
        ended = genpipe(
            *("run", "--prompts", source, "--servers", server.url, "--out", out, "--set", KEEP),
            *("--set", "input.body_fields=['temperature']"),
        )
    records, failed = saved(out), failures(out)

    assert ended.code == 1, ended.err
    assert sorted(failed) == [index for index, row in wanted.items() if row["verdict"] == "reject"] == [2]
    assert f"{source}:3: 'temperature' holds NaN" in failed[2]["message"]
    for index, record in records.items():
        assert row_of(record["messages"][0]["content"]) == wanted[index]["expect_user_sha256_16"]
    assert [records[index]["score"] for index in (0, 3, 4)] == [None] * 3
    assert (records[1]["lo"], records[1]["hi"]) == (None, None)
    assert len(server.bodies) == len(texts) - 1
    for body in server.bodies:
        json.loads(body, parse_constant=refuse)


def test_without_sampling_of_their_own_all_rows_run(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    shutil.copy(INPUTS / NAME, source)
    texts = [json.loads(line)["prompt"] for line in source.read_text().splitlines()]
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        ended = genpipe(*command, "--set", KEEP)

    assert ended.code == 0, ended.err
    audit(out, texts)


def test_an_answer_with_such_a_word_in_its_log_probabilities_is_kept(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    words = ["NaN", "-Infinity", "1e999"]
    source.write_text("".join(f'{{"prompt": "{word}"}}\n' for word in words))

    def act(body):
        word = body["messages"][0]["content"].encode()
        more = b',"logprobs":{"content":[{"token":"NaN","logprob":%s}]}' % word
        return 200, answer(b'{"content":"NaN is %s"}' % word, more)

    with scripted(act) as server:
        ended = genpipe("run", "--prompts", source, "--servers", server.url, "--out", out)
    records = saved(out)

    assert ended.code == 0, ended.err
    assert [records[index]["response"]["content"] for index in range(3)] == [f"NaN is {w}" for w in words]
    assert len(server.bodies) == len(words)


def test_a_server_that_fails_of_it_each_time_ends_the_prompt_and_not_the_run(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text('{"prompt": "log probabilities"}\n{"prompt": "plain"}\n{"prompt": "plain too"}\n')

    def act(body):
        if body["messages"][0]["content"] == "log probabilities":
            return 500, b"Out of range float values are not JSON compliant"
        return 200, answer(b'{"content":"fine"}')

    with scripted(act) as server:
        ended = genpipe(
            *("run", "--prompts", source, "--servers", server.url, "--out", out),
            *("--set", "retry.backoff_s=0.01", "--set", "retry.bench_pause_s=0.05"),
        )

    assert ended.code == 1, ended.err
    assert sorted(saved(out)) == [1, 2]
    assert "not JSON compliant" in failures(out)[0]["message"]
    assert len(server.bodies) < 20
