"""What a model thought is kept in every case; an answer without text is marked and counted, not hidden."""

import asyncio

import pytest

from tests.e2e.harness import failures, genpipe, report, row_of, run_command, saved, servers, write_prompts
from tests.edges.raw_server import RawServer, always, http

KINDS = {
    "reason=300 content=empty finish=length": (300, "", "length"),
    "reason=300 content=null finish=stop": (300, None, "stop"),
    "reason=50 tokens=20": (50, "text", "stop"),
    "tokens=20": (0, "text", "stop"),
}
"""Orders to a server, and what its answers hold then: tokens of thinking, content, finish_reason."""

EACH = 10
TEXTS = [f"Thought {place}. <<{order}>>" for place in range(EACH) for order in KINDS]
EMPTY = [place for place, text in enumerate(TEXTS) if "content=" in text]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run over answers of each kind: how it ended, its folder, and what ``status`` says."""
    folder = tmp_path_factory.mktemp("c21")
    source, out = write_prompts(folder / "in.jsonl", TEXTS), folder / "out"
    with servers(folder) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 8))
        shown = genpipe("status", out).out
    return ended, out, shown


def test_the_text_of_the_thinking_is_saved_whatever_the_answer_is(played):
    ended, out, _ = played
    records = saved(out)

    assert ended.code == 0, ended.err
    assert sorted(records) == list(range(len(TEXTS)))
    assert failures(out) == {}
    for place, text in enumerate(TEXTS):
        (kind,) = [kind for order, kind in KINDS.items() if text.endswith(f"<<{order}>>")]
        tokens, content, finish = kind
        response, record = records[place]["response"], records[place]
        assert record["finish_reason"] == finish, text
        if tokens:
            # About four characters a token.
            assert len(response["reasoning_content"]) > 3 * tokens, text
        else:
            assert response.get("reasoning_content") is None, text
        if content == "text":
            assert response["content"].startswith(f"echo {row_of(text)} "), text
        else:
            assert response["content"] == content, text


def test_answers_without_text_are_marked_and_counted_apart(played):
    _, out, shown = played
    records, state = saved(out), report(out)
    marked = [place for place, record in sorted(records.items()) if "empty" in record["flags"]]
    cut = [place for place, record in sorted(records.items()) if "cut" in record["flags"]]

    assert marked == EMPTY
    assert cut == [place for place in EMPTY if "finish=length" in TEXTS[place]]
    assert state["completed"] == len(TEXTS)
    assert state["quality"]["empty"] == len(EMPTY)
    assert state["quality"]["cut"] == len(cut)
    assert (len(EMPTY), len(cut), len(TEXTS)) == (20, 10, 40)
    assert "20 empty (50 %), 10 cut off at the length limit (25 %), 10 within their reasoning (25 %)" in shown


def test_the_end_says_how_many_are_odd_and_the_shares_are_told(played):
    ended, out, _ = played
    quality = report(out)["quality"]

    assert ended.err.splitlines()[-1].startswith("genpipe: done: 40 of 40 prompts answered, in ")
    assert "; of the answers 20 empty (50 %), 10 cut off" in ended.err
    assert {flag: quality[flag] for flag in ("looping", "unclosed_think", "short")} == {
        "looping": 0,
        "unclosed_think": 10,
        "short": 0,
    }
    shares = {"empty": 0.5, "cut": 0.25, "looping": 0.0, "unclosed_think": 0.25, "short": 0.0}
    assert quality["shares"] == {"whole": shares, "recent": shares}


def test_a_thought_that_was_cut_off_is_marked_so_and_one_that_ate_the_answer_is_only_empty(played):
    _, out, _ = played
    found = {tuple(record["flags"]) for record in saved(out).values()}

    assert found == {(), ("empty",), ("empty", "cut", "unclosed_think")}
    for place, record in saved(out).items():
        assert ("unclosed_think" in record["flags"]) == ("finish=length" in TEXTS[place])


def test_averages_count_the_tokens_of_the_thinking_as_the_server_does(played):
    _, out, _ = played
    state = report(out)
    usage = [record["usage"]["completion_tokens"] for _, record in sorted(saved(out).items())]

    assert usage == [300, 300, 70, 20] * EACH
    assert state["total_output_tokens"] == sum(usage)
    assert state["avg_output_tokens"] == pytest.approx(sum(usage) / len(usage), abs=0.1)


def test_a_server_that_leaves_the_thought_in_the_content_is_understood_too(tmp_path):
    """Without a reasoning parser the marks stand in the text, and the thought is all that there is of it."""
    texts = [f"Thought {place}. <<reason=300 content=empty finish=length>>" for place in range(6)]
    texts += [f"Thought {place}. <<reason=50 tokens=20>>" for place in range(6, 12)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        whole = "request.extra_body.separate_reasoning=false"
        ended = genpipe(*run_command(fleet, source, out, 8, "--set", whole))
    records = saved(out)

    assert ended.code == 0, ended.err
    for place in range(6):
        assert records[place]["response"]["content"].startswith("<think>\nthinking ")
        assert records[place]["flags"] == ["cut", "unclosed_think"]
    for place in range(6, 12):
        assert "</think>" in records[place]["response"]["content"]
        assert records[place]["flags"] == []


@pytest.mark.parametrize("content", ["", None])
def test_replies_that_know_no_reasoning_content_are_saved_and_marked_as_well(tmp_path, content):
    reply = {
        "model": "m",
        "data": [{"id": "m", "max_model_len": 4096}],
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 40},
    }
    source, out = write_prompts(tmp_path / "in.jsonl", ["a", "b", "c"]), tmp_path / "out"

    async def main():
        async with RawServer(always(http(reply))) as server:
            command = ("run", "--prompts", source, "--servers", server.url, "--out", out)
            return await asyncio.to_thread(genpipe, *command, "--set", "request.model=m")

    ended = asyncio.run(main())

    assert ended.code == 0, ended.err
    assert [record["response"].get("content", "no key") for record in saved(out).values()] == [content] * 3
    assert all(record["flags"] == ["empty"] for record in saved(out).values())
    assert report(out)["avg_output_tokens"] == 40.0


def test_a_run_whose_thoughts_eat_the_answers_is_warned_of_with_what_to_look_at(tmp_path):
    texts = [f"Thought {place}. <<reason=30 content=empty finish=length>>" for place in range(240)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path, 2) as fleet:
        ended = genpipe(*run_command(fleet, source, out, 32))
    warnings = report(out)["warnings"]

    assert ended.code == 0, ended.err
    assert len(saved(out)) == len(texts)
    assert [text.partition(":")[0] for text in warnings] == [
        "guards.empty_share",
        "guards.cut_share",
        "guards.unclosed_think_share",
    ]
    assert "enable_thinking = false" in warnings[-1]
    assert ended.err.splitlines()[-1].startswith(f"genpipe: warning: {warnings[0]}; warning: {warnings[1]}; ")
