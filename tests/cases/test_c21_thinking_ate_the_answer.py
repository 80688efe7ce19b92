"""What a model thought is kept in every case; an answer without text is marked and counted, not hidden."""

import pytest

from tests.e2e.harness import failures, genpipe, report, row_of, run_command, saved, servers, write_prompts

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
    assert "empty" in shown


def test_averages_count_the_tokens_of_the_thinking_as_the_server_does(played):
    _, out, _ = played
    state = report(out)
    usage = [record["usage"]["completion_tokens"] for _, record in sorted(saved(out).items())]

    assert usage == [300, 300, 70, 20] * EACH
    assert state["total_output_tokens"] == sum(usage)
    assert state["avg_output_tokens"] == pytest.approx(sum(usage) / len(usage), abs=0.1)
