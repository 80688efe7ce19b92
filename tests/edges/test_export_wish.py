"""What the options of an export mean."""

import pytest

from genpipe.core.errors import ConfigError
from genpipe.core.quality import FLAGS
from genpipe.edges.export.wish import Wish, wish


def test_nothing_said_is_every_record_as_it_is():
    assert wish() == Wish()
    assert wish().takes_all
    assert wish(format_name="openai").reasoning == "field"


def test_flags_may_stand_together_or_apart():
    assert wish(without=["cut, empty", "looping"]).without == {"cut", "empty", "looping"}
    assert wish(only=FLAGS).only == set(FLAGS)
    assert not wish(only=["cut"]).takes_all
    assert not wish(without=["cut"]).takes_all


@pytest.mark.parametrize(
    ("options", "flags", "why"),
    [
        ({"without": ["cut,empty"]}, [], ""),
        ({"without": ["cut,empty"]}, ["looping"], ""),
        ({"without": ["empty,cut"]}, ["empty", "cut"], "flagged cut"),
        ({"only": ["looping"]}, ["looping", "cut"], ""),
        ({"only": ["looping"]}, [], "not flagged looping"),
        ({"only": ["looping,cut"]}, ["empty"], "not flagged cut or looping"),
        ({"only": ["looping"], "without": ["cut"]}, ["looping", "cut"], "flagged cut"),
    ],
)
def test_records_are_chosen_by_their_flags(options, flags, why):
    assert wish(**options).left_out(flags) == why


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format_name": "alpaca"}, "--format alpaca: unknown; write one of raw, openai, sharegpt, prompt"),
        ({"without": ["cut,cuts"]}, "--without cuts: unknown; write one of empty, cut, looping"),
        ({"only": [""]}, "--only '': a flag is missing; write one of empty, cut"),
        ({"without": ["cut,"]}, "--without 'cut,': a flag is missing"),
        ({"format_name": ""}, "--format '': unknown; write one of raw"),
        ({"only": ["cut"], "without": ["cut"]}, "both name cut"),
        (
            {"format_name": "openai", "reasoning": "keep"},
            "--reasoning keep: unknown; write one of field, think",
        ),
        ({"reasoning": "drop"}, "--reasoning is for other formats than raw"),
        ({"token_ids": True}, "--token-ids is for other formats than raw"),
    ],
)
def test_what_cannot_be_meant_is_named(options, said):
    with pytest.raises(ConfigError) as caught:
        wish(**options)

    assert said in str(caught.value)


@pytest.mark.parametrize("format_name", ["openai", "sharegpt"])
def test_messages_of_a_run_that_has_none_are_refused_before_it_is_read(format_name):
    run = {"settings": {"request": {"api": "completions"}}}
    with pytest.raises(ConfigError, match="asked completions: use --format prompt"):
        wish(format_name=format_name).check_against(run)
    wish(format_name="prompt").check_against(run)
    wish(format_name=format_name).check_against({"settings": {}})
