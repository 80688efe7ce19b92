"""The commands that look at a whole run folder: ``genpipe verify`` and ``genpipe export``."""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from genpipe.core.errors import ConfigError
from genpipe.edges.files import OsFiles
from genpipe.edges.record import Wall

Show = Callable[[str], None]
"""Shows a line."""

STDOUT = "-"


def verify(folder: Path, *, repair: bool, as_json: bool, say: Show) -> int:
    """Look at a run folder, after mending it if that is wanted.

    Args:
        folder: the run folder.
        repair: mend it first.
        as_json: the result is for programs.
        say: shows a line on stdout.

    Returns:
        The exit code.

    Raises:
        ConfigError: it holds no run that can be understood.
        Fenced: it is to be mended, and a driver owns it.
        StoreError: it cannot be read or mended.
    """
    from genpipe.edges import verify as verifying

    files = OsFiles()
    done: list[str] = []
    if repair:

        def warn(text: str) -> None:
            done.append(text)
            if not as_json:
                say(f"done: {text}")

        now_text = Wall(wall_s=time.time(), run_s=0.0).text(0.0)
        verifying.repair(folder, files, now_text=now_text, warn=warn)
    with _bar("verify") as progress:
        report = verifying.verify(folder, files, progress=progress)
    say(json.dumps({**report.as_json(), "done": done}) if as_json else report.as_text())
    return 1 if report.problem_count else 0


def export(folder: Path, out: str, *, force: bool, tell: Show) -> int:
    """Write the records of a run to a file, or to stdout.

    Args:
        folder: the run folder.
        out: the file's path, or ``-``.
        force: an existing file is replaced.
        tell: shows a line on stderr.

    Returns:
        The exit code.

    Raises:
        ConfigError: it holds no run that can be understood, or the file cannot have that place.
        StoreError: something cannot be read or written; the file is not there, or as it was before.
    """
    from genpipe.edges import export as exporting

    # Temporary files are removed on the way out, for which the default of these signals leaves no time.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)

    def warn(text: str) -> None:
        tell(f"genpipe: warning: {text}")

    with _bar("export") as progress:
        if out == STDOUT:
            if sys.stdout is None:
                raise ConfigError("stdout is closed: name a file instead of -")
            exported = exporting.export_to_stream(
                folder, OsFiles(), sys.stdout.buffer, warn=warn, progress=progress
            )
        else:
            exported = exporting.export_to_file(
                folder, OsFiles(), Path(out), force=force, warn=warn, progress=progress
            )
    tell(f"genpipe: {exported.as_text()}")
    return 0 if exported.is_whole else 1


def _end(number: int, frame: object) -> NoReturn:  # noqa: ARG001  # the signature is the system's
    raise SystemExit(128 + number)


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on a terminal; elsewhere nothing is shown."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    with tqdm(
        desc=name, unit="B", unit_scale=True, file=sys.stderr, disable=not is_terminal, leave=False
    ) as bar:

        def progress(done_bytes: int, total_bytes: int) -> None:
            bar.total = total_bytes
            bar.update(done_bytes - bar.n)

        yield progress
