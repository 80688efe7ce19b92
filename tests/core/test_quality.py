"""What is odd about one answer, and what is not."""

import random
import time

import pytest

from genpipe.core import quality
from genpipe.core.quality import FLAGS, ends_in_loop, flags_of

WORDS = ["harbour", "wakes", "before", "light", "while", "slow", "boats", "turn", "against", "soft", "grey"]
WORDS += [
    "tide",
    "men",
    "carry",
    "rope",
    "past",
    "open",
    "doors",
    "where",
    "bread",
    "is",
    "cut",
    "and",
    "poured",
]


def prose(chars, seed=1):
    """Text that does not repeat itself."""
    return " ".join(random.Random(seed).choices(WORDS, k=chars))[:chars]


def part(content=None, *, reasoning=None, calls=None):
    return {"content": content, "reasoning_content": reasoning, "tool_calls": calls}


def flags(content=None, *, finish="stop", **more):
    return flags_of(finish, [part(content, **more)])


CALL = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


# ---- empty, cut, unclosed ----


@pytest.mark.parametrize(
    "content", ["Yes", "7", "\N{REPLACEMENT CHARACTER}", [{"type": "text", "text": "x"}]]
)
def test_nearly_always_nothing_is_odd(content):
    assert flags(content) == flags(content, finish=None) == flags(content, reasoning=prose(900)) == ()


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        " \n\t\u2028 ",
        [],
        "<think>so it is 7</think>",
        "so</think>\n\n",
        "<think>x</think>" + "\n" * 40,
    ],
)
def test_an_answer_without_text_beside_its_thought_is_empty(content):
    assert flags(content) == ("empty",)
    assert flags(content, calls=CALL) == ()
    assert flags(content, calls=[]) == ("empty",)


@pytest.mark.parametrize(
    "content", ["Mark its end: **</think>**", "It is a `</think>`", "See </think> or\n `</think>"]
)
def test_an_answer_that_ends_in_a_mark_it_speaks_of_is_not_empty(content):
    assert flags(content) == ()


def test_a_thought_without_an_answer_is_empty_whatever_ended_it():
    assert flags("", reasoning="hm", finish="stop") == ("empty",)
    assert flags(None, reasoning="hm", finish="length") == ("empty", "cut", "unclosed_think")
    assert flags(None, reasoning="hm", finish="length", calls=CALL) == ("cut",)
    assert flags("so", reasoning="hm", finish="length") == ("cut",)


@pytest.mark.parametrize(
    ("content", "is_open"),
    [
        ("<think>hm, so", True),
        ("<think>\nhm</think> it is 7", False),
        ("hm</think> it is 7", False),
        ("hm\n</think>\n\nit is 7\n<think>or", True),
        ("Begin with the <think> token.", False),
        ("Tokens: (<think>), **<think>**.", False),
        ("<think>a</think> b <think>c</think> d", False),
        ("Models write `<think>` before a thought.", False),
        ('<think>a "<think>" is a mark', True),
        ("a<think", False),
        ("x < y > z, <thinking> no", False),
    ],
)
def test_a_thought_that_was_begun_and_not_ended_is_unclosed(content, is_open):
    assert flags(content) == (("unclosed_think",) if is_open else ())
    assert flags(content, finish="length") == (("cut", "unclosed_think") if is_open else ("cut",))


def test_a_cut_is_one_whatever_the_text():
    assert flags("so it", finish="length") == ("cut",)


def test_of_several_samples_each_may_be_odd_but_only_all_of_them_are_empty():
    good, loop = part("good"), part("no, " * 200)

    assert flags_of("stop", [good, part(""), loop]) == ("looping",)
    assert flags_of("stop", [part(""), part(None)]) == ("empty",)
    assert flags_of("length", [good, part("<think>hm")]) == ("cut", "unclosed_think")


def test_all_at_once_come_in_one_order():
    found = flags(None, reasoning="hm, no: " * 100, finish="length")

    assert found == ("empty", "cut", "looping", "unclosed_think") == FLAGS[:4]


# ---- loops ----


def phrase(chars, seed=2):
    return "." + prose(chars - 2, seed) + ","


LOOPS = {
    "one character": "!" * 300,
    "one character after a long good text": prose(50_000) + "a" * 400,
    "a word": prose(500) + "the " * 100,
    "a sentence five times": phrase(70) * 5,
    "a paragraph three times": phrase(200) * 3,
    "a page of phrases": prose(90, 5) + phrase(7_000) * 4,
    "as long a phrase as is found": phrase(quality.TAIL_CHARS // 3) * 3,
    "cut in mid-phrase": (phrase(90) * 8)[:-37],
    "cut within its first word": phrase(90) * 6 + ".",
    "rows of a table": "| item | count |\n|---|---|\n" + "| a thing | 17 |\n" * 40,
    "rows of zeros, cut in a row": (("| " + "0 | " * 20 + "\n") * 12)[:-9],
    "a phrase that ends in a rule": (phrase(300) + "-" * 60 + "\n") * 4,
    "a phrase within a phrase": ("Wait. " * 7 + "Let me look at that again, from the start. ") * 9,
    "blanks alone": "{" + " " * 400,
    "blanks of two kinds": '{"a": 1' + "\n \t\n" * 100,
    "a loop, then a line end": prose(100) + "and so on " * 60 + "\n\n",
    "other letters": prose(40) + "海は広い、" * 100,
    "of two planes": "🌊 вода " * 80,
}

FINE = {
    "prose": prose(20_000),
    "short": "no no no no no no",
    "299 characters": "!" * 299,
    "a rule": prose(300) + "\n" + "-" * 80,
    "rules in a text": "\n".join(f"{prose(60, seed)}\n{'=' * 80}" for seed in range(20)),
    "a table": "| n | square |\n|---|---|\n" + "".join(f"| {n} | {n * n} |\n" for n in range(200)),
    "a table of empty cells": "| day | mon | tue |\n|---|---|---|\n" + "| | | |\n" * 12,
    "a list of zeros": f"grid = {[0] * 200}",
    "a matrix": r"\begin{pmatrix}" + r"0 & 0 & 0 & 0 \\ " * 30 + r"\end{pmatrix}",
    "numbers in a row": ", ".join(map(str, range(2_000))),
    "rows of a file": "".join(f"{n},{n % 7},ok\n" for n in range(500)),
    "a refrain": "".join(f"{prose(150, seed)}\nOh, roll the old boat home,\n" * 1 for seed in range(12)),
    "a refrain sung three times": prose(600) + "\nOh, roll the old boat home" * 3,
    "a paragraph twice": prose(500) + phrase(900) * 2,
    "a sentence four times": prose(90) + phrase(190) * 4,
    "a loop that it came out of": "wait, no. " * 200 + "So the answer is seven.",
    "base64": "".join(random.Random(3).choices("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdef0123456789+/", k=3_000)),
    "code": "".join(f"    if kind == {n}:\n        return handle_{n}(value)\n" for n in range(60)),
    "counted": "".join(f"{n}. The same sentence with its number.\n" for n in range(100)),
    "blank lines at the end": prose(400) + "\n" * 100,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_phrase_that_repeats_itself_to_the_end_is_a_loop(name):
    text = LOOPS[name]

    assert ends_in_loop(text)
    assert flags(text) == ("looping",)
    assert flags(None, reasoning=text) == ("empty", "looping")
    assert flags("So it is seven.", reasoning=text) == ()


@pytest.mark.parametrize("name", FINE)
def test_what_only_looks_like_a_loop_is_none(name):
    assert not ends_in_loop(FINE[name])


@pytest.mark.parametrize("seed", range(30))
def test_what_is_found_is_what_the_rule_says(seed):
    """Against the rule in so many words, over texts of few letters, which repeat themselves by chance."""
    rng = random.Random(seed)
    period = rng.choice([1, 2, 3, 17, 31, 32, 33, 64, 150, 199, 200, 201, 333])
    unit = "".join(rng.choices("ab" if rng.random() < 0.5 else "abcdefgh", k=period))
    if seed % 2:
        # One that repeats itself within.
        unit = "".join(rng.choice(["0.", "ab", "-"]) * rng.randint(1, 80) for _ in range(rng.randint(1, 6)))
        period = len(unit)
    times = rng.uniform(1, 7)
    text = "".join(rng.choices("abcdefgh", k=rng.choice([0, 5, 900]))) + (unit * 8)[: int(times * period)]
    spans = {
        p: next((n for n in range(len(text) - p) if text[-1 - n] != text[-1 - n - p]), len(text) - p) + p
        for p in range(1, len(text) // 3 + 1)
    }
    wanted = any(span >= max(300, p * (3 if p >= 200 else 5)) for p, span in spans.items())

    assert ends_in_loop(text) == wanted


def test_a_loop_is_found_in_linear_time():
    """Of texts that are slow to search from behind, ten times as much takes ten times as long, or so."""

    def took_s(text):
        times_s = []
        for _ in range(3):
            began_s = time.process_time()
            flags(text)
            times_s.append(time.process_time() - began_s)
        return min(times_s)

    for make in (
        lambda n: "a" * n,
        lambda n: "a" * n + "b" + "a" * 15,
        lambda n: ("b" + "a" * 199) * (n // 200) + "b" + "a" * 250,
        lambda n: "ab" * (n // 2) + "b" + "a" * 400,
        lambda n: "<think" * (n // 6),
        lambda n: "`<think>`</think>" * (n // 17),
        lambda n: " " * n,
    ):
        # What is fixed, a search of the last 64 KiB at its worst, is allowed for.
        assert took_s(make(4_000_000)) < 40 * took_s(make(400_000)) + 0.02
