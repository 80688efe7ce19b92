"""What SIGINT, SIGTERM and SIGHUP do to a run."""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import NoReturn

from genpipe.driver import Driver
from genpipe.edges.console import Display


class Signals:
    """What the first and the second signal do.

    Attributes:
        first: the signal that came first, or None.
        hurried: a second one came.
        driver: the run under way; before there is one, a signal ends the preparations.
        is_uploading: all answers are on disk, and only uploads are waited for.
        on_first: called when the first one comes.
    """

    def __init__(self, display: Display, *, grace_s: float, upload_s: float) -> None:
        """Prepare.

        Args:
            display: told what a signal does.
            grace_s: how long the first one lets requests in flight go on.
            upload_s: how long it lets uploads go on, after that.
        """
        self.first: signal.Signals | None = None
        self.hurried = False
        self.driver: Driver | None = None
        self.is_uploading = False
        self.on_first: Callable[[], None] | None = None
        self._grace_s = grace_s
        self._upload_s = upload_s
        self._display = display
        self._task = asyncio.current_task()
        self._installed: list[signal.Signals] = []

    def install(self) -> None:
        """Take over SIGINT, SIGTERM and SIGHUP; off the main thread they are left alone."""
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        # A closed terminal must not lose what is in flight; under nohup it is ignored, and stays so.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self._came, number)
                self._installed.append(number)

    def remove(self) -> None:
        """Give the signals back."""
        for number in self._installed:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _came(self, number: signal.Signals) -> None:
        self.hurried = self.first is not None
        self.first = self.first or number
        if not self.hurried and self.on_first is not None:
            self.on_first()
        if self.is_uploading:
            wait = "ending" if self.hurried else f"waiting up to {self._upload_s:g} s for the uploads"
            again = "again" if self.hurried else "all answers are on disk"
            self._display.note(f"{number.name}: {again}; {wait}")
        elif self.driver is None:
            assert self._task is not None
            self._task.cancel()
        elif self.hurried:
            self._display.note(f"{number.name} again: saving what has arrived, and ending")
            self.driver.stop(0.0)
        else:
            self._display.note(
                f"{number.name}: nothing more is sent; waiting up to {self._grace_s:g} s for the requests in "
                "flight (again, to end at once)"
            )
            self.driver.stop(self._grace_s)


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise ``SystemExit``: their default leaves no time to remove temporary files."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _exit)


def _exit(number: int, frame: object) -> NoReturn:  # noqa: ARG001  # the signature is the system's
    raise SystemExit(128 + number)
