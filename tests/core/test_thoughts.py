"""Thoughts that stand in the text of an answer."""

import time

import pytest

from genpipe.core.thoughts import Split, ends_within, split


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", Split(None, "", False)),
        ("four", Split(None, "four", False)),
        ("<think>\nhm\n</think>\n\nfour ", Split("hm", "four ", True)),
        (" \n<think>hm</think>four", Split("hm", "four", True)),
        ("hm\n</think>\n\nfour", Split("hm", "four", False)),
        ("</think>four", Split("", "four", False)),
        ("hm</think>\r\n\r\nfour", Split("hm", "four", False)),
        ("hm\n \t</think> four", Split("hm", "four", False)),
        ("hm</think>", Split("hm", "", False)),
        (
            "I end it with </think> later.\n</think>\n\nfour",
            Split("I end it with </think> later.", "four", False),
        ),
        ("<think>a</think>b</think>c", Split("a", "b</think>c", True)),
        ("<think>on and on", Split("on and on", "", True)),
        ("the mark `</think>` ends it", Split(None, "the mark `</think>` ends it", False)),
        ("use <think> and </think>", Split(None, "use <think> and </think>", False)),
    ],
)
def test_a_thought_is_what_stands_before_the_rest(text, found):
    assert split(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "Templates add </think> before the answer.",
        "A thought ends with </think>, and **</think>** is a token (</think>).\nThen comes the rest.",
        "Output looks so:\n```\nthe thought\n</think>\nthe answer\n```\nand no other way.",
        "It is `</think>`\nin the vocabulary.",
        "</think </think",
        "a <think>\n</think>\nb",
        "x</think>y</think> z",
    ],
)
def test_a_mark_that_is_only_spoken_of_cuts_nothing_off(text):
    assert split(text) == Split(None, text, False)


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("<think>", True),
        (" \n<think>on and on", True),
        ("I shall think first.\n  <think>\non", True),
        ("<think>a</think> <think>b", True),
        ("a\n</think>\n\nb\n\n<think>c", True),
        ("Begin with the <think> token.", False),
        ("A mark (<think>) or **<think>** or\n**<think>**.", False),
        ("Write:\n```\n<think>\nhm\n```\nand go on.", False),
        ("Write:\n```\n<think>\nhm\n```\n<think>so", True),
        ("<think>a</think> b, the <think> c", False),
    ],
)
def test_a_text_ends_within_a_thought_that_begins_it_or_a_line(text, is_open):
    assert ends_within(text) is is_open


def test_texts_of_many_marks_take_linear_time():
    for unit in (
        "</think>x",
        " </think>x",
        "x <think>",
        "`</think>`\n",
        "```\n</think>\n``` ```\n",
        "```<think>\n",
    ):
        times_s = []
        for chars in (200_000, 2_000_000):
            text = "x" + unit * (chars // len(unit)) + "x"
            began_s = time.process_time()
            split(text)
            ends_within(text)
            times_s.append(time.process_time() - began_s)
        assert times_s[1] < 40 * times_s[0] + 0.05, unit
