"""What SIGINT, SIGTERM and SIGHUP do to a run."""

import asyncio
import contextlib
import signal

from genpipe.driver import Driver
from genpipe.edges.console import Display


class Signals:
    """What the first and the second signal do.

    Attributes:
        first: the signal that came first, or None.
        hurried: a second one came.
        driver: the run under way; before there is one, a signal ends the preparations.
    """

    def __init__(self, grace_s: float, display: Display) -> None:
        self.first: signal.Signals | None = None
        self.hurried = False
        self.driver: Driver | None = None
        self._grace_s = grace_s
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
        if self.driver is None:
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
