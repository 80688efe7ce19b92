"""Calls of the system that a signal breaks off. Python makes only some of them again (read, write, sync)."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def again(step: Callable[[], T]) -> T:
    """Carry out a step that changes nothing when it is broken off, until it is not.

    Raises:
        OSError: it failed for another reason.
    """
    while True:
        try:
            return step()
        except InterruptedError:
            continue


def close(handle: int) -> None:
    """Close a file, once: even where a signal broke this off, its number may be another file's by then.

    Raises:
        OSError: it failed for another reason.
    """
    with suppress(InterruptedError):
        os.close(handle)
