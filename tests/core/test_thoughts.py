"""Thoughts that stand in the text of an answer."""

import pytest

from genpipe.core.thoughts import Split, split


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", Split(None, "", False)),
        ("four", Split(None, "four", False)),
        ("<think>\nhm\n</think>\n\nfour ", Split("hm", "four ", True)),
        (" \n<think>hm</think>four", Split("hm", "four", True)),
        ("hm\n</think>\n\nfour", Split("hm", "four", False)),
        ("</think>four", Split("", "four", False)),
        ("<think>a</think>b</think>c", Split("a", "b</think>c", True)),
        ("<think>on and on", Split("on and on", "", True)),
        ("the mark `</think>` ends it", Split(None, "the mark `</think>` ends it", False)),
        ("use <think> and </think>", Split(None, "use <think> and </think>", False)),
    ],
)
def test_a_thought_is_what_stands_before_the_rest(text, found):
    assert split(text) == found
