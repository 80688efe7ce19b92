"""Half of a surrogate pair, in a prompt or in an answer, becomes U+FFFD and costs nobody anything."""

import json
import shutil

import orjson

from tests.cases.scripted import answer, scripted, verdicts
from tests.e2e.harness import INPUTS, failures, genpipe, row_of, saved, servers, shard_paths

NAME = "prompts_surrogate.jsonl"
ROWS = 40


def test_cut_pairs_in_the_input_are_mended_and_neighbours_stay_as_they_are(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    shutil.copy(INPUTS / NAME, source)
    wanted = verdicts(json.loads((INPUTS / "expected_shared.json").read_text()), NAME)
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        ended = genpipe(*command, "--set", "output.keep=['meta', 'bad\ufffd']")
        fleet.stop()
        rows = [visit["row"] for visit in fleet.visits()]
    records, texts = saved(out), {}
    for index, record in records.items():
        (message,) = record["messages"]
        texts[index] = message["content"]

    assert ended.code == 0, ended.err
    assert failures(out) == {}
    assert sorted(records) == sorted(wanted)
    for index, row in wanted.items():
        if "expect_user_sha256_16" in row:
            assert row_of(texts[index]) == row["expect_user_sha256_16"]
    assert [texts[index] for index in range(5)] == [
        "smile \U0001f600 pair",
        "cut emoji \ufffd",
        "raw byte \ufffd from surrogateescape",
        "reversed \ufffd\ufffd",
        "nul \0 inside",
    ]
    assert records[5]["meta"] == {"title": "bad \ufffd title"}
    assert records[6]["bad\ufffd"] == 1
    assert set(rows) == {row_of(text) for text in texts.values()}
    for path in shard_paths(out):
        for line in path.read_bytes().split(b"\n")[:-1]:
            orjson.loads(line)


ODD = {
    0: rb'{"role":"assistant","content":"cut \ud83d"}',
    10: rb'{"role":"assistant","content":"x","reasoning_content":"\ude00 low"}',
    20: rb'{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":'
    rb'{"name":"f","arguments":"{\"emoji\": \"\ud83d\"}"}}]}',
    30: r'{"role":"assistant","content":"real 😀, escaped \ud83d\ude00, genuine � and \u0000"}'.encode(),
}


def test_cut_pairs_in_answers_cost_neither_them_nor_those_beside_them(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(f'{{"prompt": "{place}"}}\n' for place in range(ROWS)))

    def act(body):
        place = int(body["messages"][0]["content"])
        return 200, answer(ODD.get(place, b'{"role":"assistant","content":"plain"}'))

    with scripted(act) as server:
        command = ["run", "--prompts", source, "--servers", server.url, "--out", out]
        ended, again = genpipe(*command), genpipe(*command)
    records = saved(out)

    assert (ended.code, again.code) == (0, 0), ended.err
    assert sorted(records) == list(range(ROWS))
    assert records[0]["response"]["content"] == "cut \ufffd"
    assert records[10]["response"]["reasoning_content"] == "\ufffd low"
    (call,) = records[20]["response"]["tool_calls"]
    assert call["function"]["arguments"] == '{"emoji": "\ufffd"}'
    assert records[30]["response"]["content"] == "real 😀, escaped 😀, genuine � and \0"
    assert records[31]["response"]["content"] == "plain"
    assert len(server.bodies) == ROWS
    for path in shard_paths(out):
        for line in path.read_bytes().split(b"\n")[:-1]:
            orjson.loads(line)
