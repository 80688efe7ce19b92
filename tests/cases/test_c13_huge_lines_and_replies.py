"""Long lines and long answers come through whole; a line over the documented limit costs itself alone."""

import hashlib
import http.client
import json

from tests.e2e.harness import CHAT, INPUTS, audit, failures, genpipe, run_command, saved, servers, shard_paths

LINE_BYTES = [65_535, 65_536, 65_537, 131_073, 524_289, 1_048_577]
"""Around the limits at which line readers are known to break."""


def line_of(size_bytes, ident):
    """A record that is a line of just so many bytes, its newline not counted."""
    bare = json.dumps({"id": ident, "prompt": f"{ident} "})
    return bare[:-2] + "y" * (size_bytes - len(bare)) + bare[-2:]


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def told_directly(fleet, record):
    """What a server says, asked without genpipe by the same names, which count in the size of a reply."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.ports[0], timeout=30)
    try:
        body = json.dumps({"model": record["model"], "rid": record["rid"], "messages": record["messages"]})
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]
    finally:
        connection.close()


def test_lines_around_the_usual_limits_of_readers_are_sent_whole(tmp_path):
    lines = [line_of(size, f"l-{place}") for place, size in enumerate(LINE_BYTES)]
    assert [len(line) for line in lines] == LINE_BYTES
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(f"{line}\n" for line in [*lines, '{"prompt": "after them"}']))
    with servers(tmp_path, 1, "--context-tokens", 1 << 20) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 8))

    assert ended.code == 0, ended.err
    # The echo in each answer is the hash of the text as the server got it.
    audit(out, [*(json.loads(line)["prompt"] for line in lines), "after them"])


def test_replies_of_megabytes_and_characters_cut_in_transit_are_kept_whole(tmp_path):
    source, out = INPUTS / "prompts_bigreply.jsonl", tmp_path / "out"
    texts = [json.loads(line)["prompt"] for line in source.read_bytes().splitlines()]
    with servers(tmp_path) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 8))
        assert ended.code == 0, ended.err
        records = audit(out, texts)
        direct = [told_directly(fleet, records[index]) for index in range(len(texts))]

    answers = [records[index]["response"]["content"] for index in range(len(texts))]
    assert len(answers[4]) > 4_900_000
    assert list(map(sha, answers)) == list(map(sha, direct))
    # The one replacement character is the one that the server sent.
    assert ["\ufffd" in answer for answer in answers] == ["\ufffd" in text for text in direct]
    assert ["\ufffd" in answer for answer in answers] == [False] * 6 + [True]
    assert b"".join(path.read_bytes() for path in shard_paths(out)).count(b"\n") == len(texts)


def test_a_line_of_110_mb_is_refused_by_the_documented_limit_and_its_neighbours_run(tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    with source.open("wb") as file:
        file.write(b'{"id": "h-0", "prompt": "before"}\n{"id": "h-1", "prompt": "')
        for _ in range(110):
            file.write(b"y" * 1_000_000)
        file.write(b'"}\n{"id": "h-2", "prompt": "after"}\n')
    with servers(tmp_path) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 8))

    assert ended.code == 1, ended.err
    assert {index: record["id"] for index, record in saved(out).items()} == {0: "h-0", 2: "h-2"}
    (failure,) = failures(out).values()
    assert failure["index"] == 1
    assert failure["message"] == f"{source}:2: longer than 64 MiB"
    assert failure["for_good"] is True
