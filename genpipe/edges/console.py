"""What a run shows on stderr: a bar on a terminal, whole lines with a time stamp elsewhere."""

import contextlib
import math
import sys
from datetime import datetime
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from genpipe.core import wording

LINE_EVERY_S = 15.0
"""Elsewhere than on a terminal a line comes this often, also while nothing moves (seconds)."""

_CONTROLS = dict.fromkeys([*range(32), *range(127, 160)], " ")
# The figures go in as the unit, which tqdm leaves as it is; it puts a comma before a postfix.
_COUNTING = "{desc}{unit}"
_COUNTED = "{desc}{percentage:5.1f}% |{bar}| {unit}"


class Display(Protocol):
    """Shows the state of a run. Called by one thread; may block."""

    def show(self, progress: dict[str, Any]) -> None:
        """Show this state; called about once a second."""
        ...

    def note(self, text: str) -> None:
        """Show a message of one line."""
        ...

    def close(self) -> None:
        """Leave the terminal tidy."""
        ...


def display(*, quiet: bool) -> Display:
    """What suits this process's stderr."""
    stream = sys.stderr
    if stream is None or quiet:
        return Lines(stream, every_s=None)
    try:
        is_terminal = stream.isatty()
    except ValueError:
        return Lines(None, every_s=None)
    return Bar(stream) if is_terminal else Lines(stream, every_s=LINE_EVERY_S)


class Lines:
    """Whole lines with a time stamp: for logs.

    Attributes:
        every_s: time between two lines of progress (seconds); None for messages only.
    """

    def __init__(self, stream: TextIO | None, *, every_s: float | None) -> None:
        self.every_s = every_s
        self._stream = stream
        self._next_s = 0.0

    def show(self, progress: dict[str, Any]) -> None:
        """A line, if the last one is long enough ago."""
        elapsed_s = progress["elapsed_s"]
        over = progress["state"] not in ("starting", "running", "waiting", "draining")
        if self.every_s is None or (elapsed_s < self._next_s and not over):
            return
        self._next_s = elapsed_s + self.every_s
        self.note(wording.line(_known(progress)))

    def note(self, text: str) -> None:
        """A line."""
        if self._stream is None:
            return
        try:
            moment = datetime.now().astimezone()
            self._stream.write(f"{moment:%Y-%m-%d %H:%M:%S%z} {_one_line(text)}\n")
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody is left to read it; that is no reason to end the run.
            self._stream = None

    def close(self) -> None:
        """Nothing to tidy."""


class Bar:
    """A bar: for terminals."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: tqdm[Any] | None = None
        self._lost = False

    def show(self, progress: dict[str, Any]) -> None:
        """Redraw."""
        progress = _known(progress)
        if self._lost:
            return
        try:
            if self._bar is None:
                self._bar = tqdm(file=self._stream, dynamic_ncols=True, delay=1e-9, bar_format=_COUNTING)
            bar = self._bar
            bar.total = progress["total"]
            bar.n = progress["completed"]
            bar.bar_format = _COUNTING if bar.total is None else _COUNTED
            bar.desc = f"{progress['state']} "
            bar.unit = self._figures(progress)
            bar.refresh()
        except (OSError, ValueError):
            # The terminal is gone; that is no reason to end the run.
            self._lost = True

    @staticmethod
    def _figures(progress: dict[str, Any]) -> str:
        parts = [
            f"{wording.number(progress['completed'])}/{wording.number(progress['total'])}",
            f"{wording.number(progress['rate_per_sec'])}/s",
            f"{wording.number(progress['output_tokens_per_sec'])} tok/s",
        ]
        if progress["eta_hours"] is not None:
            parts.append(f"eta {wording.duration(progress['eta_hours'] * 3600)}")
        if progress["failed"]:
            parts.append(f"{wording.number(progress['failed'])} failed")
        if away := wording.servers_away_text(progress):
            parts.append(away)
        if waiting := wording.uploads_waiting(progress):
            parts.append(waiting)
        return "  ".join(parts)

    def note(self, text: str) -> None:
        """A line above the bar."""
        try:
            tqdm.write(_one_line(text), file=self._stream)
        except (OSError, ValueError):
            self._lost = True

    def close(self) -> None:
        """Leave the bar as it stands, on a line of its own."""
        if self._bar is None:
            return
        if self._lost:
            # Nothing more is drawn, not even when the bar is thrown away.
            self._bar.disable = True
        with contextlib.suppress(OSError, ValueError):
            self._bar.close()


def _known(progress: dict[str, Any]) -> dict[str, Any]:
    """The snapshot with nothing in it that is neither a number nor None."""
    known = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in progress.items()
    }
    if any(known[key] is None for key in ("eta_hours", "eta_hours_low", "eta_hours_high")):
        known["eta_hours"] = None
    return known


def _one_line(text: str) -> str:
    """Control characters become spaces: a path or a server's words may hold any."""
    return text.translate(_CONTROLS)
