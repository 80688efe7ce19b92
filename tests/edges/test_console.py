"""What a run shows on stderr: a bar on a terminal, whole lines elsewhere."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from genpipe.edges import console
from genpipe.edges.console import Bar, Lines
from tests.ui.samples import UNKNOWN, progress, server

STAMPED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} (.*)\n")
LIVE = ("starting", "running", "waiting", "draining")


class Gone(io.StringIO):
    """A stream whose other end is closed."""

    def __init__(self, error):
        super().__init__()
        self.error = error
        self.tries = 0

    def write(self, text):
        self.tries += 1
        raise self.error

    def flush(self):
        raise self.error


ODD: list[dict[str, Any]] = [
    {},
    UNKNOWN,
    {"rate_per_sec": float("nan"), "eta_hours": float("nan"), "output_tokens_per_sec": float("inf")},
    {"eta_hours": float("inf"), "eta_hours_low": None},
    {"eta_hours": 0.5, "eta_hours_high": float("nan")},
    {"percent": float("nan"), "avg_output_tokens": float("nan")},
    {"failed": 7, "servers": [server(n, state="benched", last_error="no\r\nroute") for n in range(9)]},
    {"total": 0, "completed": 0, "percent": 100.0},
    {"servers": []},
]


# ---- lines ----


@pytest.mark.parametrize("changes", ODD)
@pytest.mark.parametrize("state", [*LIVE, "done", "failed"])
def test_each_line_is_whole_stamped_and_alone(changes, state):
    stream = io.StringIO()
    Lines(stream, every_s=15).show(progress(state=state, **changes))

    match = STAMPED.fullmatch(stream.getvalue())
    assert match
    assert match[1].startswith(f"{state}: ")
    assert match[1].isprintable()
    assert "nan" not in match[1]
    assert "None" not in match[1]


def test_a_line_comes_at_once_then_at_each_interval_and_at_the_end():
    stream = io.StringIO()
    lines = Lines(stream, every_s=15)
    for elapsed_s in range(61):
        lines.show(progress(elapsed_s=float(elapsed_s), completed=elapsed_s))
    lines.show(progress(elapsed_s=61.0, completed=61, state="done"))
    shown = [re.search(r": (\d+)/", line) for line in stream.getvalue().splitlines()]

    assert [match and match[1] for match in shown] == ["0", "15", "30", "45", "60", "61"]


def test_lines_come_also_while_nothing_moves():
    stream = io.StringIO()
    lines = Lines(stream, every_s=15)
    for elapsed_s in range(46):
        lines.show(progress(elapsed_s=float(elapsed_s), state="waiting", rate_per_sec=0.0))

    assert stream.getvalue().count("\n") == 4


def test_without_an_interval_only_messages_are_shown():
    stream = io.StringIO()
    lines = Lines(stream, every_s=None)
    lines.show(progress(state="done"))
    lines.note("a word")

    assert [match[1] for match in STAMPED.finditer(stream.getvalue())] == ["a word"]


@pytest.mark.parametrize(
    "text", ["two\nlines", "back\rto the start", "a\x1b[2Jclean screen", "a\x9bc\x07bell\x00"]
)
def test_a_message_is_one_line_and_moves_no_cursor(text):
    stream = io.StringIO()
    Lines(stream, every_s=None).note(text)

    match = STAMPED.fullmatch(stream.getvalue())
    assert match
    assert match[1].isprintable()


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed")])
def test_lines_to_nobody_end_no_run_and_are_not_tried_for_ever(error):
    stream = Gone(error)
    lines = Lines(stream, every_s=0)
    for elapsed_s in range(5):
        lines.show(progress(elapsed_s=float(elapsed_s)))
    lines.note("a word")
    lines.close()

    assert stream.tries == 1


def test_a_closed_stderr_shows_nothing_and_harms_nothing():
    lines = Lines(None, every_s=15)
    lines.show(progress())
    lines.note("a word")
    lines.close()


# ---- a bar ----


def on_terminal(draw: Callable[[Bar], None], *, columns: int = 120) -> str:
    """What a terminal gets."""
    master, slave = pty.openpty()
    try:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        with open(slave, "w", closefd=False) as stream:
            bar = Bar(stream)
            draw(bar)
            bar.close()
        os.set_blocking(master, False)
        data = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(master, 65536):
                data += piece
        return data.decode()
    finally:
        os.close(slave)
        os.close(master)


def last_of(text: str) -> str:
    """What stands in a terminal's line in the end."""
    return text.rstrip("\r\n").split("\r")[-1].rstrip()


def test_the_bar_shows_how_far_how_fast_and_until_when():
    text = on_terminal(
        lambda bar: bar.show(progress(failed=3, servers=[server(), server(1, state="benched")]))
    )
    shown = last_of(text)

    assert shown.startswith("running  25.0% |")
    assert "| 2,500/10,000  12.3/s  5,000 tok/s  eta 30 min 00 s  3 failed  1 of 2 servers away" in shown
    assert text.endswith("\n")
    assert "\n" not in text.rstrip("\r\n")


def test_the_bar_is_redrawn_in_its_place():
    def draw(bar):
        for completed in range(0, 10_001, 2_500):
            bar.show(progress(completed=completed, state="running" if completed < 10_000 else "done"))

    text = on_terminal(draw)

    assert text.count("\n") == 1
    assert last_of(text).startswith("done 100.0% |")


def test_before_the_input_is_counted_no_share_is_shown():
    shown = last_of(on_terminal(lambda bar: bar.show(progress(**UNKNOWN, completed=17))))

    assert shown == "running 17/?  ?/s  ? tok/s"


def test_the_first_thing_drawn_is_the_state_and_not_an_empty_bar():
    text = on_terminal(lambda bar: bar.show(progress()))

    assert next(part for part in text.split("\r") if part.strip()).startswith("running ")


@pytest.mark.parametrize("changes", ODD)
@pytest.mark.parametrize("columns", [20, 80, 200])
def test_no_state_breaks_the_bar_out_of_its_line(changes, columns):
    text = on_terminal(lambda bar: bar.show(progress(**changes)), columns=columns)

    assert max(len(part.strip("\n")) for part in text.split("\r")) <= columns
    assert "nan" not in text
    assert text.count("\n") == 1


def test_a_message_stands_above_the_bar_in_a_line_of_its_own():
    def draw(bar):
        bar.show(progress())
        bar.note("warning: a\nword\x1b[2J")
        bar.show(progress(completed=5_000))

    lines = on_terminal(draw).replace("\r\n", "\n").split("\n")

    assert last_of(lines[0]) == "warning: a word [2J"
    assert last_of(lines[1]).startswith("running  50.0% |")


def test_a_bar_that_never_showed_anything_leaves_nothing():
    assert on_terminal(lambda bar: None) == ""


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed")])
def test_a_terminal_that_is_gone_ends_no_run(error):
    bar = Bar(Gone(error))
    bar.show(progress())
    bar.show(progress())
    bar.note("a word")
    bar.close()


def test_a_terminal_that_goes_away_in_between_ends_no_run():
    master, slave = pty.openpty()
    with open(slave, "w") as stream:
        bar = Bar(stream)
        bar.show(progress())
        os.close(master)
        bar.show(progress(completed=2_501))
        bar.note("a word")
        bar.close()
        with contextlib.suppress(OSError):
            stream.close()


# ---- which of them ----

ASK = """
import sys
from genpipe.edges.console import display
shows = display(quiet=len(sys.argv) > 1)
print(type(shows).__name__, getattr(shows, "every_s", None))
"""


def kind_of(stderr, *args):
    command = [sys.executable, "-c", ASK, *args]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True
    ).stdout.strip()


def test_a_terminal_gets_a_bar_and_everything_else_gets_lines(tmp_path):
    master, slave = pty.openpty()
    try:
        on_pty, quiet_on_pty = kind_of(slave), kind_of(slave, "quiet")
    finally:
        os.close(master)
        os.close(slave)
    with open(tmp_path / "err", "w") as log:
        in_file = kind_of(log)

    assert on_pty == "Bar None"
    assert quiet_on_pty == "Lines None"
    assert in_file == f"Lines {console.LINE_EVERY_S}"


def test_without_a_stderr_there_is_a_display_that_shows_nothing():
    command = f"exec {sys.executable} -c '{ASK}' 2>&-"

    assert subprocess.run(command, shell=True, capture_output=True, text=True).stdout.strip() == "Lines None"
