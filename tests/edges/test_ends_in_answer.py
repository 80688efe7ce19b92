"""Conversations that end in an answer are sent as given, and that is said."""

import asyncio
import json

import pytest

from genpipe import config
from genpipe.core.bitmap import Bitmap
from genpipe.edges.prompts.checking import check_files
from genpipe.edges.prompts.dialects import Dialect
from genpipe.edges.prompts.source import FileSource
from genpipe.wiring import dialect_of

ASKED = [{"role": "user", "content": "Which river?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "The"}]
TURNS = [{"from": "human", "value": "Which?"}, {"from": "gpt", "value": "The"}]


def ends(record, **options):
    return Dialect(**options).convert(0, json.dumps(record).encode()).ends_in_answer


@pytest.mark.parametrize(
    "record", [{"messages": ANSWERED}, {"messages": json.dumps(ANSWERED)}, {"prompt": ANSWERED}]
)
def test_messages_that_end_in_an_answer_are_told_and_sent_as_given(record):
    assert ends(record)
    assert json.loads(Dialect().prompt(0, json.dumps(record).encode()).payload) == ANSWERED


@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASKED},
        {"messages": TURNS},
        {"messages": [*ANSWERED, {"role": "user", "content": "And?"}]},
        {"conversations": TURNS},
        {"conversations": ANSWERED},
        {"turns": ["a"]},
        {"prompt": "a"},
    ],
)
def test_what_asks_for_an_answer_is_not(record):
    assert not ends(record)


def test_nothing_is_told_where_the_answer_is_made_anew_or_continued():
    own = {"messages": ANSWERED, "continue_final_message": True}

    assert not ends({"messages": ANSWERED}, multi_turn=True)
    assert not ends({"messages": ANSWERED}, continues=True)
    assert not ends(own, body_fields=("continue_final_message",))
    assert ends(own)
    assert ends({**own, "continue_final_message": False}, body_fields=("continue_final_message",))


@pytest.mark.parametrize(
    ("toml", "continues"),
    [
        ("", False),
        ("[request.extra_body]\ncontinue_final_message = true\n", True),
        ("[request.extra_body]\ncontinue_final_message = false\n", False),
        ("[request.sampling]\ncontinue_final_message = true\n", True),
    ],
)
def test_the_settings_tell_whether_answers_are_continued(tmp_path, toml, continues):
    (tmp_path / "run.toml").write_text(toml)

    assert dialect_of(config.load(tmp_path / "run.toml")).continues is continues


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


def test_a_check_counts_them(tmp_path):
    files = [write(tmp_path / "a", [ASKED, ANSWERED, ANSWERED]), write(tmp_path / "b", [ANSWERED])]

    assert check_files(files, Dialect()).ends_in_answer == 3
    assert check_files(files, Dialect(multi_turn=True)).ends_in_answer == 0


async def everything(source):
    while not (await source.read(2)).exhausted:
        pass
    await source.verify_rest()


@pytest.mark.parametrize("options", [{}, {"multi_turn": True}, {"continues": True}])
def test_a_run_says_it_once_at_the_first_with_its_place_and_both_remedies(tmp_path, options):
    told: list[str] = []
    path = write(tmp_path / "a", [ASKED, ASKED, ANSWERED, ASKED, ANSWERED, ANSWERED])
    source = FileSource(
        files=[path], dialect=Dialect(**options), index_path=None, done=Bitmap(()), warn=told.append
    )
    asyncio.run(everything(source))
    source.close()

    assert len(told) == (0 if options else 1)
    for text in told:
        assert text.startswith(f"{path}:3 ends in an answer, ")
        assert "request.multi_turn=true" in text
        assert "request.extra_body.continue_final_message=true" in text
        assert "\n" not in text
