"""Guards: when a run is not worth going on with, and what is said of it."""

import random
import sys
from dataclasses import replace

import pytest

from genpipe.core.errors import FaultKind, PromptFault, ServerFault
from genpipe.core.guard import QualityGuard, RefusalGuard
from genpipe.core.histogram import Histogram
from genpipe.core.lengths import Lengths
from genpipe.core.server import Server
from genpipe.core.settings import GuardSettings
from genpipe.core.values import ServerSpec
from tests.core.build import an_answer

TOO_LONG = PromptFault("too long", status=400)
BROKEN = ServerFault("500: oh", kind=FaultKind.BROKEN, status=500)
EMPTY = "look at max_tokens, which a thought may have used up, at stop and at the chat template"
CUT = "raise max_tokens, or leave it out"


def guard(**changes):
    fields = {
        "after": 10,
        "window": 20,
        "failed_share_max": 0.5,
        "empty_share_max": 0.2,
        "cut_share_max": 0.5,
    }
    settings = GuardSettings(**{**fields, **changes})
    known = Histogram(per_octave=4, least=1.0)
    servers = [Server(0, ServerSpec(url="http://s0", limit=1), 0.0)]
    lengths = Lengths(short_tokens=settings.short_tokens, known=known, servers=servers)
    return QualityGuard(settings, lengths)


def feed(watching, *answers, times=1, output_tokens=100):
    """Answers by their flags; an error is a prompt that was given up."""
    for _ in range(times):
        for one in answers:
            if isinstance(one, Exception):
                watching.gave_up(one)
            else:
                watching.answered(replace(an_answer(output_tokens=output_tokens), flags=one), 0)


# ---- the first prompts ----


def test_a_fleet_that_refuses_most_of_the_first_prompts_is_named_by_its_key_with_the_commonest_message():
    watching = RefusalGuard(after=10, share_max=0.5)
    reasons = [watching.gave_up(PromptFault("too short" if turn == 3 else "too long")) for turn in range(10)]

    assert reasons[:9] == [None] * 9
    assert reasons[9] == (
        "guards.refused_share: 10 of the first 10 prompts were refused (bound 50 %), 9 with: too long"
    )


@pytest.mark.parametrize(("refused", "stops"), [(10, False), (11, True)])
def test_the_share_of_refused_prompts_may_be_as_large_as_its_bound_and_no_larger(refused, stops):
    watching = RefusalGuard(after=20, share_max=0.5)
    for _ in range(20 - refused):
        watching.answered()
    reasons = [watching.gave_up(TOO_LONG) for _ in range(refused)]

    assert (reasons[-1] is not None) is stops


def test_faults_of_servers_are_no_refusals():
    watching = RefusalGuard(after=10, share_max=0.5)

    assert [watching.gave_up(BROKEN) for _ in range(20)] == [None] * 20


def test_refusals_late_in_a_run_do_not_stop_it():
    watching = RefusalGuard(after=10, share_max=0.5)
    for _ in range(20):
        watching.answered()

    assert [watching.gave_up(TOO_LONG) for _ in range(100)] == [None] * 100


# ---- the last prompts ----


def test_too_many_empty_answers_stop_a_run_where_that_is_wanted_and_the_reason_has_the_numbers():
    watching = guard(on_empty="stop", after=200, window=1000)
    feed(watching, (), times=130)
    feed(watching, ("empty",), times=32)
    before = watching.reason
    feed(watching, (), ("empty",), times=100)

    assert before is None
    assert (
        watching.reason == f"guards.empty_share: 51 of the last 200 answers are empty (bound 20 %): {EMPTY}"
    )


def test_thousands_are_set_off():
    watching = guard(on_empty="warn", after=200, window=1000)
    feed(watching, (), times=500)
    feed(watching, ("empty",), times=870)

    assert watching.warnings == (
        f"guards.empty_share: 870 of the last 1,000 answers are empty (bound 20 %): {EMPTY}",
    )


def test_a_warning_stops_nothing_and_is_gone_once_the_share_is_back_under_its_bound():
    watching = guard()
    feed(watching, ("cut",), times=20)
    during = watching.warnings
    feed(watching, (), times=9)
    still = watching.warnings
    feed(watching, ())

    assert during == (
        f"guards.cut_share: 20 of the last 20 answers are cut off at the length limit (bound 50 %): {CUT}",
    )
    assert still == (
        f"guards.cut_share: 11 of the last 20 answers are cut off at the length limit (bound 50 %): {CUT}",
    )
    assert watching.warnings == ()
    assert watching.reason is None


def test_a_reason_to_stop_stays_though_better_answers_come():
    watching = guard(on_cut="stop")
    feed(watching, ("cut",), times=10)
    reason = watching.reason
    feed(watching, (), times=100)

    assert reason is not None
    assert watching.reason == reason
    assert watching.warnings == ()


@pytest.mark.parametrize("last", [BROKEN, ()])
def test_nothing_is_said_before_enough_prompts_have_ended(last):
    watching = guard()
    feed(watching, BROKEN, times=9)
    before = watching.reason
    feed(watching, last)

    assert before is None
    assert watching.reason is not None


def test_failures_are_told_with_the_most_frequent_message_among_those_looked_at():
    watching = guard(window=10, on_failed="warn")
    feed(watching, BROKEN, times=10)
    feed(watching, TOO_LONG, times=6)

    (warning,) = watching.warnings
    assert warning.startswith("guards.failed_share: 10 of the last 10 prompts ended without an answer (bound")
    assert warning.endswith(" (bound 50 %), 6 with: too long")


def test_empty_and_cut_answers_are_shares_of_answers_and_failures_are_shares_of_prompts():
    watching = guard(after=10, window=100, failed_share_max=1.0)
    feed(watching, BROKEN, times=90)
    feed(watching, ("empty",), times=9)
    before = watching.warnings
    feed(watching, ("empty",))

    assert before == ()
    assert watching.warnings == (
        f"guards.empty_share: 10 of the last 10 answers are empty (bound 20 %): {EMPTY}",
    )


def test_an_answer_may_be_odd_in_two_ways():
    watching = guard()
    feed(watching, ("empty", "cut"), times=10)

    assert [text.partition(":")[0] for text in watching.warnings] == [
        "guards.empty_share",
        "guards.cut_share",
    ]


@pytest.mark.parametrize(
    ("share_max", "empty", "passed"), [(0.29, 29, False), (0.29, 30, True), (0, 1, True)]
)
def test_a_share_may_be_as_large_as_its_bound_and_no_larger(share_max, empty, passed):
    watching = guard(after=100, window=100, empty_share_max=share_max)
    feed(watching, (), times=100 - empty)
    feed(watching, ("empty",), times=empty)

    assert bool(watching.warnings) is passed


@pytest.mark.parametrize(
    ("flag", "share_max", "what", "advice"),
    [
        ("looping", 0.1, "end in a phrase that repeats itself", "repetition_penalty"),
        ("unclosed_think", 0.2, "end within their reasoning", "enable_thinking = false"),
        ("empty", 0.2, "are empty", "max_tokens"),
        ("cut", 0.5, "are cut off at the length limit", "max_tokens"),
        ("short", 0.5, "hold fewer than 8 tokens", "guards.short_tokens = 0"),
    ],
)
@pytest.mark.parametrize("then", ["warn", "stop"])
def test_each_flag_has_its_bound_its_words_and_what_to_look_at(flag, share_max, what, advice, then):
    flags, tokens = ((), 7) if flag == "short" else ((flag,), 100)
    watching = QualityGuard(
        GuardSettings(**{"after": 100, "window": 200, f"on_{flag}": then}), guard().lengths
    )
    feed(watching, (), times=200 - round(200 * share_max))
    feed(watching, flags, times=round(200 * share_max), output_tokens=tokens)
    before = (*watching.warnings, watching.reason)
    feed(watching, flags, output_tokens=tokens)

    assert before == (None,)
    said = (watching.reason or "") if then == "stop" else watching.warnings[0]
    assert len(watching.warnings) == (then == "warn")
    assert said.startswith(
        f"guards.{flag}_share: {round(200 * share_max) + 1} of the last 200 answers {what} (bound "
    )
    assert advice in said.partition("(bound")[2]


def test_a_share_that_is_no_bound_at_all_is_never_passed():
    shares = dict.fromkeys(["looping_share_max", "unclosed_think_share_max", "short_share_max"], 1.0)
    watching = guard(empty_share_max=1.0, cut_share_max=1.0, **shares)
    feed(watching, ("empty", "cut", "looping", "unclosed_think"), times=50, output_tokens=1)

    assert watching.warnings == ()


def test_an_answer_that_is_short_comes_back_with_that_flag_and_any_other_as_it_is():
    watching = guard()
    short, good = replace(an_answer(output_tokens=6), flags=("cut",)), an_answer(output_tokens=9)

    assert watching.answered(short, 0) == replace(short, flags=("cut", "short"))
    assert watching.answered(good, 0) is good


def test_the_shares_of_the_last_answers_are_told():
    watching = guard(window=4)
    before = watching.recent_shares()
    feed(watching, ("empty",), ("empty", "cut"), (), (), ("cut",))

    assert before is None
    assert watching.recent_shares() == {"empty": 0.25, "cut": 0.5}


@pytest.mark.parametrize("seed", range(10))
def test_what_is_said_is_what_a_count_of_the_last_prompts_gives(seed):
    rng = random.Random(seed)
    watching = guard(after=5, window=7, on_failed="warn", failed_share_max=0.3, empty_share_max=0.3)
    ended: list[bool] = []
    answers: list[tuple[str, ...]] = []
    for _ in range(300):
        flags = rng.choice([(), (), ("empty",), ("cut",), ("empty", "cut"), None, None])
        feed(watching, rng.choice([BROKEN, TOO_LONG]) if flags is None else flags)
        ended.append(flags is None)
        if flags is not None:
            answers.append(flags)
        expected = []
        if len(ended) >= 5 and sum(ended[-7:]) > 0.3 * len(ended[-7:]):
            expected.append(f"guards.failed_share: {sum(ended[-7:])} of the last {len(ended[-7:])} ")
        for flag, key, bound in (("empty", "empty_share", 0.3), ("cut", "cut_share", 0.5)):
            odd, looked_at = sum(flag in one for one in answers[-7:]), len(answers[-7:])
            if len(answers) >= 5 and odd > bound * looked_at:
                expected.append(f"guards.{key}: {odd} of the last {looked_at} ")

        assert len(watching.warnings) == len(expected)
        assert all(said.startswith(begin) for said, begin in zip(watching.warnings, expected, strict=True))


def test_a_million_failures_of_their_own_messages_are_not_all_remembered():
    watching = guard(window=50)
    for number in range(2_000):
        watching.gave_up(PromptFault(f"{number}: " + "x" * 10_000))

    assert len(watching._ended.counts) == 50
    assert sum(map(sys.getsizeof, watching._ended.counts)) < 50 * 300
