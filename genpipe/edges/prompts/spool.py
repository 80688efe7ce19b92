"""Prompts from standard input: kept as a file, for a run that goes on later must find them again."""

import contextlib
import os
import select
import threading
from pathlib import Path
from typing import BinaryIO, Final

from genpipe.core.errors import ConfigError, StoreError
from genpipe.edges.files import OsFiles, blaming
from genpipe.edges.prompts.checking import has_records

STDIN: Final = "-"
"""The path that means standard input."""

SPOOL: Final = "stdin"
"""The file's name."""

_BLOCK_BYTES = 1 << 20
_LOOK_S = 0.2
_LINGER_S = 0.5
"""How long the end is not believed: a Ctrl-C reaches the program that writes to us as well, and its death may
be noticed here before the signal is (seconds)."""


def demand_piped(descriptor: int = 0) -> None:
    """Refuse a terminal, at which everybody would wait.

    Raises:
        ConfigError: standard input is one, or is closed.
    """
    with contextlib.suppress(OSError):
        os.fstat(descriptor)
        if not os.isatty(descriptor):
            return
    raise ConfigError(
        "--prompts - reads standard input, which is a terminal here: pipe the prompts into genpipe, or name "
        "a file"
    )


def spool(path: Path, *, stop: threading.Event, descriptor: int = 0) -> int:
    """Copy standard input into a file, which is there, whole and durable, on return, and not before.

    Memory: a block.

    Args:
        path: the file; ``.part`` is added to its name until it is whole.
        stop: once set, the copy is given up.
        descriptor: of standard input.

    Returns:
        How many bytes there were.

    Raises:
        ConfigError: standard input cannot be read, is damaged, or holds no prompts.
        StoreError: the file cannot be written, or ``stop`` was set.
    """
    part, files = path.with_name(path.name + ".part"), OsFiles()
    with blaming(part, "write"):
        try:
            with open(part, "wb") as file:
                size_bytes = _copy(descriptor, file, stop)
                file.flush()
                os.fsync(file.fileno())
            _demand_records(part)
            files.rename(part, path)
            files.sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    return size_bytes


def _copy(descriptor: int, file: BinaryIO, stop: threading.Event) -> int:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    size_bytes = 0
    while not stop.is_set():
        if not poll.poll(_LOOK_S * 1000):
            continue
        try:
            block = os.read(descriptor, _BLOCK_BYTES)
        except BlockingIOError:
            continue
        except OSError as error:
            raise ConfigError(f"standard input cannot be read: {error.strerror}") from error
        if not block:
            if stop.wait(_LINGER_S):
                break
            return size_bytes
        file.write(block)
        size_bytes += len(block)
    raise StoreError("standard input: the copy was stopped")


def _demand_records(part: Path) -> None:
    """Whether there are any is to be known before a later start finds the file."""
    if not has_records([part]):
        raise ConfigError("no prompts on standard input: it is empty")
