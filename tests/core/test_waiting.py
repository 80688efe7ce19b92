"""The order in which prompts are sent: that of the input, or the longest first; and who goes last."""

from genpipe.core.errors import FaultKind
from genpipe.core.values import Chunk, Prompt
from tests.core.build import answer, cancel, fail, make_core, started, starts


def with_lengths(first, *lengths):
    return tuple(Prompt(index=first + number, payload=b"x" * length) for number, length in enumerate(lengths))


def make(*lengths, slots=(1,), exhausted=True, **settings):
    """A core that has read prompts of these lengths."""
    fields = {"longest_first": True, "backoff_s": 0.01, "backoff_max_s": 0.01, **settings}
    core = make_core(0, slots, exhausted=False, **fields)
    core.due(0.0)
    core.offered(Chunk(prompts=with_lengths(0, *lengths), exhausted=exhausted), 0.0)
    core.check()
    return core


def order(core, now_s=0.0):
    """The order in which all that waits is sent, one after the other."""
    found = []
    while sent := starts(core, now_s) or started(core):
        found.append(sent[0].prompt.index)
        now_s += 1.0
        answer(core, sent[0], now_s)
    return found


def test_by_option_the_longest_of_what_is_in_memory_goes_first():
    assert order(make(3, 9, 5, 7)) == [1, 3, 2, 0]


def test_otherwise_prompts_go_in_the_order_of_the_input():
    assert order(make(3, 9, 5, 7, longest_first=False)) == [0, 1, 2, 3]


def test_prompts_of_one_length_go_in_the_order_of_the_input():
    assert order(make(5, 5, 9, 5)) == [2, 0, 1, 3]


def test_a_long_one_that_is_read_later_goes_before_shorter_ones_that_wait():
    core = make(3, 5, exhausted=False)
    first = starts(core, 0.0)
    core.offered(Chunk(prompts=with_lengths(2, 4, 9), exhausted=True), 0.0)

    assert [start.prompt.index for start in first] + order(core)[1:] == [1, 3, 2, 0]


def test_one_that_is_sent_again_after_a_fault_goes_before_longer_ones_until_more_is_read():
    core = make(9, 5, 7, 8)
    (first,) = starts(core, 0.0)
    fail(core, first, 0.0, FaultKind.UNREACHABLE)
    (second,) = starts(core, 0.0)
    answer(core, second, 1.0)

    assert [start.prompt.index for start in (first, second)] == [0, 3]
    assert order(core, 1.0) == [0, 2, 1]


def test_a_suspect_stays_at_the_back_however_long_it_is_and_whatever_is_read():
    """At the front it would be a benched server's only trial for ever."""
    core = make(9, 5, exhausted=False)
    (first,) = starts(core, 0.0)
    fail(core, first, 0.0, FaultKind.BROKEN)
    (second,) = starts(core, 0.0)
    core.due(0.5)
    core.offered(Chunk(prompts=with_lengths(2, 1, 2), exhausted=True), 0.5)
    answer(core, second, 1.0)

    assert order(core, 1.0) == [3, 2, 0]


def test_a_prompt_that_was_called_off_for_no_fault_is_the_next_to_be_sent():
    core = make(9, 5, 7, abort_s=1.0)
    (first,) = starts(core, 0.0)
    cancel(core, first, 0.5)

    assert [start.prompt.index for start in starts(core, 1.5)] == [0]
