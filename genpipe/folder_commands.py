"""The commands that look at a whole run: ``genpipe verify`` and ``genpipe export``."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from genpipe.core.errors import ConfigError
from genpipe.edges.files import Files, OsFiles
from genpipe.edges.record import Wall
from genpipe.edges.s3.objects import Objects
from genpipe.edges.s3.place import PLACE, Place
from genpipe.signals import exit_on_signals

if TYPE_CHECKING:
    from genpipe.edges.export.wish import Wish
    from genpipe.edges.folder_shelf import Prefix
    from genpipe.edges.reading import Shelf

Target = Path | Place
"""A run: its folder, or its prefix in an object store."""

OpenObjects = Callable[[Place], Objects]
"""Begins to speak to a store; nothing is asked of it yet."""

Show = Callable[[str], None]
"""Shows a line."""

STDOUT = "-"


def verify(target: Target, *, repair: bool, as_json: bool, say: Show, open_objects: OpenObjects) -> int:
    """Look at a run, after mending its folder if that is wanted.

    Args:
        target: the run.
        repair: mend it first; only a folder can be mended.
        as_json: the result is for programs.
        say: shows a line on stdout.
        open_objects: begins to speak to an object store.

    Returns:
        The exit code.

    Raises:
        ConfigError: it holds no run that can be understood.
        Fenced: it is to be mended, and a driver owns it.
        StoreError: it cannot be read or mended.
    """
    from genpipe.edges import verify as verifying

    done: list[str] = []
    if isinstance(target, Place):
        from genpipe.edges.s3.verify_remote import verify_remote

        assert not repair
        with _bar("verify") as progress:
            report = verify_remote(open_objects(target), progress=progress)
    else:
        files = OsFiles()
        if repair:

            def warn(text: str) -> None:
                done.append(text)
                if not as_json:
                    say(f"done: {text}")

            now_text = Wall(wall_s=time.time(), run_s=0.0).text(0.0)
            verifying.repair(target, files, now_text=now_text, warn=warn)
        remote = _remote_of(target, files, open_objects)
        with _bar("verify") as progress:
            report = verifying.verify(target, files, progress=progress, remote=remote)
    say(json.dumps({**report.as_json(), "done": done}) if as_json else report.as_text())
    return 1 if report.problem_count else 0


def export(
    target: Target,
    out: str,
    *,
    force: bool,
    tell: Show,
    open_objects: OpenObjects,
    wish: "Wish | None" = None,
    card: Path | None = None,
) -> int:
    """Write the records of a run to a file, or to stdout.

    Args:
        target: the run.
        out: the file's path, or ``-``.
        force: existing files are replaced.
        tell: shows a line on stderr.
        open_objects: begins to speak to an object store.
        wish: which records, in which form; all as they are where it is None.
        card: where the data card goes, or None for none.

    Returns:
        The exit code.

    Raises:
        ConfigError: it holds no run that can be understood, or some of it is out of reach, or it has not what
            is wished for, or a file cannot have its place.
        StoreError: something cannot be read or written; the file is not there, or as it was before.
    """
    from genpipe.edges.export import export as exporting

    exit_on_signals()

    def warn(text: str) -> None:
        tell(f"genpipe: warning: {text}")

    shelf = _shelf_of(target, open_objects)
    place = None
    if card is not None:
        now_text = Wall(wall_s=time.time(), run_s=0.0).text(0.0)
        place = exporting.CardPlace(path=card, now_text=now_text)
    with _telling_the_end(tell, out), _bar("export") as progress:
        if out == STDOUT:
            if sys.stdout is None:
                raise ConfigError("stdout is closed: name a file instead of -")
            exported = exporting.export_to_stream(
                shelf,
                sys.stdout.buffer,
                OsFiles(),
                force=force,
                warn=warn,
                progress=progress,
                wish=wish,
                card=place,
            )
        else:
            exported = exporting.export_to_file(
                shelf,
                OsFiles(),
                Path(out),
                force=force,
                warn=warn,
                progress=progress,
                wish=wish,
                card=place,
            )
    tell(f"genpipe: {exported.as_text()}")
    return 0 if exported.is_whole else 1


def card_path(out: str, given: Path | None, *, no_card: bool) -> Path | None:
    """Where the data card of an export goes: beside its file, unless it is said otherwise; None for none.

    Args:
        out: the file's path, or ``-``.
        given: what ``--card`` says.
        no_card: ``--no-card`` was given.

    Raises:
        ConfigError: both were given, or ``-`` for the card.
    """
    if no_card and given is not None:
        raise ConfigError("--card and --no-card: keep one of them")
    if given == Path(STDOUT):
        raise ConfigError("--card -: the card goes to a file; name one, or write --no-card")
    if no_card or given is not None or out == STDOUT:
        return given
    return Path(f"{out}.md")


def _shelf_of(target: Target, open_objects: OpenObjects) -> "Shelf":
    if isinstance(target, Place):
        from genpipe.edges.s3.shelf import S3Shelf

        return S3Shelf(open_objects(target))
    from genpipe.edges.folder_shelf import FolderShelf

    files = OsFiles()
    return FolderShelf(target, files, _remote_of(target, files, open_objects))


def _remote_of(folder: Path, files: Files, open_objects: OpenObjects) -> "Prefix | None":
    """Where a run folder is sent to; nothing is asked of the store yet."""
    from genpipe.edges.folder_shelf import Prefix

    try:
        place = Place.read(folder, files)
    except ConfigError as error:
        # It is told where it matters.
        refused = error

        def refuse() -> NoReturn:
            raise refused

        return Prefix(uri=str(folder / PLACE), open=refuse)
    return Prefix(uri=place.uri, open=partial(open_objects, place)) if place is not None else None


@contextmanager
def _telling_the_end(tell: Show, out: str) -> Iterator[None]:
    """Say what there is of an export that a signal has ended."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        left = "what came out is not all of it" if out == STDOUT else "nothing was written"
        tell(f"genpipe: the export was stopped: {left}")
        raise


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
