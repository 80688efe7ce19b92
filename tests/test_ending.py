"""What is said at the end of a run: the worst comes first."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genpipe.ending import Leftover, ending
from tests.ui.samples import progress


def end(*, complete=True, refusal=None, stopped_by=None, **changes):
    core: Any = SimpleNamespace(complete=complete, refusal=refusal)
    return ending(core, progress(**changes), Path("out"), stopped_by=stopped_by, leftover=Leftover())


@pytest.mark.parametrize(
    "reason",
    [
        "guards.empty_share: 870 of the last 1,000 answers are empty (bound 20 %)",
        "retry.give_up_s: no server could be used for 10 min 00 s",
    ],
)
def test_why_a_run_was_stopped_is_the_first_thing_that_is_said(reason):
    ended = end(complete=False, refusal=reason)

    assert ended.exit_code == 3
    assert ended.message == (
        f"stopped by {reason}; 2,500 of 10,000 prompts done and on disk; the same command goes on from there"
    )


def test_what_is_wrong_with_the_answers_is_said_before_that_they_are_done():
    ended = end(completed=10_000, warnings=["guards.cut_share: too many", "guards.empty_share: likewise"])

    assert ended.exit_code == 0
    assert ended.message == (
        "warning: guards.cut_share: too many; warning: guards.empty_share: likewise; "
        "done: 10,000 of 10,000 prompts answered, in 3 min 48 s"
    )


def test_what_is_odd_about_the_answers_is_said_at_the_end_and_nothing_where_nothing_is():
    shares = {"whole": {"empty": 0.0, "looping": 0.0012, "short": 0.0003}}
    quality = {"empty": 0, "looping": 12, "short": 3, "shares": shares}
    ended = end(completed=10_000, quality=quality)

    assert ended.exit_code == 0
    assert ended.message.endswith("in 3 min 48 s; of the answers 12 looping (0.1 %), 3 short")
    assert "of the answers" not in end(completed=10_000).message


def test_a_signal_does_not_hide_what_is_wrong_with_the_answers():
    ended = end(complete=False, stopped_by=signal.SIGTERM, warnings=["guards.cut_share: too many"])

    assert ended.exit_code == 143
    assert ended.message.startswith(
        "warning: guards.cut_share: too many; stopped by SIGTERM: 2,500 of 10,000"
    )


@pytest.mark.parametrize("warnings", [{}, {"warnings": []}, {"warnings": None}])
def test_without_a_warning_nothing_is_warned_of(warnings):
    assert end(completed=10_000, **warnings).message.startswith("done: 10,000 of 10,000 prompts answered")
