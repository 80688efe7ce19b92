"""A run whose answers are odd: 87 % of them hold six tokens, as a data set once did for days."""

import random

import pytest

from genpipe.core.notices import Notices
from genpipe.core.progress import Progress, Restored
from genpipe.core.settings import GuardSettings
from genpipe.core.sums import Sums
from genpipe.core.values import Commit
from tests.core.build import answer, cancels, make_core, started


def tokens_of(count, seed=1):
    """Tokens of so many answers: six in 87 % of them."""
    rng = random.Random(seed)
    return [6 if rng.random() < 0.87 else rng.randint(200, 2_000) for _ in range(count)]


def play(tokens, *, slots=64, stop_at=None, **guards):
    """A run of such answers one after the other, all slots taken: the core, the time, what is in flight."""
    core = make_core(len(tokens), slots=(slots,), guards=GuardSettings(**guards))
    now_s = 0.0
    for place, count in enumerate(tokens):
        now_s = place / 1_000
        save(core, now_s)
        if core.stopping or place == stop_at:
            break
        answer(core, started(core)[0], now_s, output_tokens=count)
    save(core, now_s)
    return core, now_s, started(core)


def save(core, now_s):
    """Carry out what is due; groups are on disk at once."""
    while found := [action for action in core.due(now_s) if isinstance(action, Commit)]:
        for action in found:
            core.committed(action.group.number, now_s)


def progress_of(core, now_s, before=None):
    return Progress(before or Restored(sums=Sums()), began_s=0.0).snapshot(core, None, now_s)


@pytest.mark.parametrize("seed", range(5))
def test_the_run_is_warned_of_within_its_first_thousand_answers_by_default(seed):
    core, now_s, _ = play(tokens_of(1_000, seed))
    (warning,) = progress_of(core, now_s)["warnings"]
    lines = Notices().due(core, now_s)

    assert warning.startswith("guards.short_share: ")
    assert "of the last 1,000 answers hold fewer than 8 tokens (bound 50 %): look at max_tokens" in warning
    assert warning.endswith("or set guards.short_tokens = 0 where such answers are right")
    assert lines == [f"warning: {warning}"]
    assert core.refusal is None
    assert not core.stopping


def test_it_is_warned_of_as_soon_as_there_are_enough_answers_to_say_so():
    core, now_s, _ = play(tokens_of(1_000), stop_at=199)
    before = progress_of(core, now_s)["warnings"]
    core, now_s, _ = play(tokens_of(1_000), stop_at=200)

    assert before == []
    assert progress_of(core, now_s)["warnings"][0].startswith("guards.short_share: 1")


def test_it_is_stopped_where_that_is_wanted_and_what_is_in_flight_is_waited_for_and_saved():
    core, now_s, under_way = play(tokens_of(1_000), on_short="stop")
    for start in under_way:
        answer(core, start, now_s + 1.0, output_tokens=500)
    save(core, now_s + 1.0)

    assert core.refusal is not None
    assert core.refusal.startswith("guards.short_share: ")
    assert len(under_way) == 63
    assert core.finished
    assert core.done == 200 + 63


def test_what_does_not_come_within_the_grace_is_cancelled():
    core, now_s, under_way = play(tokens_of(1_000), on_short="stop")
    at_s = core.next_timer_s()

    assert at_s == pytest.approx(now_s + core.settings.grace_s, abs=0.01)
    assert len(cancels(core, at_s)) == len(under_way)


def test_a_record_says_that_it_is_short_and_so_do_the_counts():
    core, now_s, _ = play([6] * 5 + [100] * 15)
    quality = progress_of(core, now_s)["quality"]

    assert core.sums.flags == {"short": 5}
    assert (quality["short"], quality["empty"]) == (5, 0)
    assert quality["shares"]["whole"]["short"] == quality["shares"]["recent"]["short"] == 0.25


def test_the_answers_of_a_data_set_of_single_words_are_let_be_where_that_is_said():
    core, now_s, _ = play([1, 2] * 500, short_tokens=0)

    assert progress_of(core, now_s)["warnings"] == []
    assert core.sums.flags == {}


def test_flags_of_earlier_segments_are_counted_and_are_in_no_warning():
    before = Sums()
    for _ in range(900):
        before.add(6, ("short", "looping"))
    for _ in range(100):
        before.add(6, ("of a later version",))
    core, now_s, _ = play([100] * 1_000)
    shown = progress_of(core, now_s, Restored(done=1_000, sums=before))

    assert shown["warnings"] == []
    assert (shown["quality"]["short"], shown["quality"]["looping"], shown["quality"]["cut"]) == (900, 900, 0)
    assert shown["quality"]["shares"]["whole"]["short"] == 0.45
    assert shown["quality"]["shares"]["recent"]["short"] == 0.0


def test_shares_are_not_known_before_there_is_an_answer():
    core = make_core(5)

    assert progress_of(core, 0.0)["quality"] == {
        **dict.fromkeys(["empty", "cut", "looping", "unclosed_think", "short"], 0),
        "shares": {"whole": None, "recent": None},
    }


def test_each_of_several_servers_with_far_shorter_answers_is_told_of_once():
    core = make_core(1_200, slots=(100, 100, 100, 100, 100), hedge=False)
    notices, said = Notices(), []
    save(core, 0.0)
    for now in range(2):
        for start in started(core):
            answer(core, start, float(now), output_tokens=9 if start.server in (1, 3) else 900)
        save(core, float(now))
        said += notices.due(core, float(now))

    assert [line.partition(": answers hold 9 tokens")[0] for line in said] == [
        "warning: http://s1",
        "warning: http://s3",
    ]
