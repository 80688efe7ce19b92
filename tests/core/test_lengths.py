"""Short answers, by themselves and against the run's own median, and servers that give them."""

import random
from dataclasses import replace

import pytest

from genpipe.core import lengths as module
from genpipe.core.histogram import Histogram
from genpipe.core.lengths import Lengths
from genpipe.core.server import Server, ServerState
from genpipe.core.values import ServerSpec
from tests.core.build import an_answer


class Run:
    """A fleet whose answers come one by one, each on disk at once."""

    def __init__(self, servers=1, *, short_tokens=8):
        self.servers = [Server(n, ServerSpec(url=f"http://gpu{n}", limit=1), 0.0) for n in range(servers)]
        self.known = histogram()
        self.lengths = Lengths(short_tokens=short_tokens, known=self.known, servers=self.servers)

    def add(self, tokens, server=0, times=1, **changes):
        """Whether the last of these answers is short."""
        for _ in range(times):
            is_short = self.lengths.add(replace(an_answer(output_tokens=tokens), **changes), server)
            if tokens is not None:
                self.known.add(tokens)
        return is_short

    @property
    def warnings(self):
        return list(self.lengths.warnings())


def histogram(**counts):
    known = Histogram(per_octave=4, least=1.0)
    for tokens, count in counts.items():
        for _ in range(count):
            known.add(int(tokens[1:]))
    return known


def parts(count, **changes):
    return [{"content": "x", "reasoning_content": None, "tool_calls": None, **changes} for _ in range(count)]


# ---- one answer ----


@pytest.mark.parametrize(("tokens", "is_short"), [(0, True), (7, True), (8, False), (None, False)])
def test_an_answer_of_fewer_tokens_than_are_set_is_short(tokens, is_short):
    assert Run().add(tokens) is is_short


def test_no_answer_is_short_where_none_is_to_be():
    run = Run(short_tokens=0)

    assert not run.add(0)
    assert not run.add(1, times=2_000)


def test_a_call_of_a_tool_is_not_short_and_says_nothing_of_its_server():
    run = Run(servers=2)
    calls = [{"id": "c"}]
    run.add(500, 0, times=64)

    assert not run.add(3, 1, times=200, response=parts(1, tool_calls=calls)[0])
    assert not run.add(3, 1, response=parts(2) + parts(1, tool_calls=calls))
    assert run.warnings == []


def test_of_several_samples_and_of_the_turns_of_a_conversation_each_is_counted_on():
    run = Run()

    assert run.add(31, response=parts(4))
    assert not run.add(32, response=parts(4))
    assert run.add(15, steps=[{}, {}])
    assert not run.add(16, steps=[{}, {}])


def test_an_answer_far_below_the_run_s_own_median_is_short_once_that_is_known():
    run = Run()
    early = run.add(20, times=10)
    run.add(800, times=module.KNOWN_MIN + module.LOOK_EVERY)

    assert not early
    assert run.add(38)
    assert not run.add(45)
    what, unless = run.lengths.short_texts
    assert what.startswith("answers hold less than a twentieth of the run's median, which is 790 tokens")
    assert "guards.short_share = 1" in unless


def test_the_lengths_of_earlier_segments_count_for_the_median():
    run = Run()
    run.lengths.remember(histogram(t800=module.KNOWN_MIN))

    assert run.add(30)
    assert not run.add(50)


def test_what_is_known_of_too_few_answers_is_no_median():
    run = Run()
    run.lengths.remember(histogram(t800=module.KNOWN_MIN - 1))

    assert not run.add(30)


def test_the_median_is_taken_now_and_then_and_not_for_each_answer(monkeypatch):
    taken = iter(range(100))
    monkeypatch.setattr(Lengths, "_median", lambda _: float(next(taken)))
    Run().add(100, times=10 * module.LOOK_EVERY)

    assert next(taken) == 10


# ---- a server ----


def test_a_server_whose_answers_are_far_shorter_than_the_others_is_named_with_both_medians():
    run = Run(servers=4)
    for server in (0, 1, 2):
        run.add(812, server, times=64)
    run.add(6, 3, times=63)
    before = run.warnings
    run.add(6, 3)

    assert before == []
    (text,) = run.warnings
    assert text.startswith(
        "http://gpu3: answers hold 6 tokens at the median, the fleet's hold 812: look at its log"
    )


def test_of_two_servers_it_is_the_one_with_the_shorter_answers():
    run = Run(servers=2)
    run.add(6, 0, times=64)
    run.add(812, 1, times=64)

    assert [text.partition(": ")[0] for text in run.warnings] == ["http://gpu0"]


def test_a_server_that_does_better_is_named_no_more_and_one_that_left_is_not_either():
    run = Run(servers=3)
    for server, tokens in enumerate((700, 5, 5_000)):
        run.add(tokens, server, times=64)
    bad = run.warnings
    run.servers[1].state = ServerState.GONE
    gone = run.warnings
    run.servers[1].state = ServerState.UP
    run.add(600, 1, times=64)

    assert len(bad) == 1
    assert gone == run.warnings == []


def test_a_fleet_that_is_short_altogether_is_no_matter_of_a_server():
    run = Run(servers=8)
    for server in range(8):
        run.add(6, server, times=64)

    assert run.warnings == []


def test_one_server_alone_is_held_against_nobody():
    run = Run()
    run.add(812, times=64)
    run.add(6, times=64)

    assert run.warnings == []


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("words", [0.1, 0.5, 0.6, 0.95])
def test_a_data_set_with_answers_of_a_word_among_long_ones_names_no_server(seed, words):
    rng = random.Random(seed)
    run = Run(servers=20)
    for count in range(10_000):
        tokens = rng.randint(1, 3) if rng.random() < words else round(rng.lognormvariate(6, 1))
        run.lengths.add(an_answer(output_tokens=tokens), rng.randrange(20))
        assert count % 64 or run.warnings == []


def test_no_more_than_a_few_servers_are_named():
    run = Run(servers=30)
    for server in range(30):
        run.add(6 if server < 12 else 812, server, times=64)

    assert len(run.warnings) == module.SERVERS_NAMED_MAX
    assert [text.endswith("likewise 8 more servers") for text in run.warnings] == [False, False, False, True]


def test_what_is_remembered_of_a_server_is_bounded():
    run = Run(servers=2)
    run.add(50, 0, times=10_000)

    assert len(run.lengths._blocks[0]) < module.BLOCK_ANSWERS
    assert len(run.lengths._quartiles) == 1
