"""Genpipe in a hurry: for the process as a whole, seconds pass many times as fast as outside.

A limit of five minutes that somebody set, or that a library has by default, is then met by a request of a few
seconds. The program itself is not touched: what is changed is Python's monotonic clock and every wait by it.
"""

import sys

_FAST = """
import selectors, sys, threading, time

FACTOR = {factor}
sys.modules["uvloop"] = None  # its clock is not Python's

_monotonic, _sleep, _began_s = time.monotonic, time.sleep, time.monotonic()
time.monotonic = lambda: _began_s + (_monotonic() - _began_s) * FACTOR
time.sleep = lambda seconds: _sleep(seconds / FACTOR)

def shortened(wait):
    def fast(self, timeout=None):
        return wait(self, None if timeout is None else timeout / FACTOR)
    return fast

threading.Condition.wait = shortened(threading.Condition.wait)
threading.Thread.join = shortened(threading.Thread.join)
selectors.DefaultSelector.select = shortened(selectors.DefaultSelector.select)

from genpipe.cli import main
"""


def hurried(factor: float, main: str = "main()") -> tuple[str, ...]:
    """Genpipe's command, in a process for which one second lasts ``1 / factor`` of one.

    Args:
        factor: how many times as fast its time passes (> 0).
        main: what is run in place of genpipe.
    """
    return (sys.executable, "-c", _FAST.format(factor=factor) + main)
