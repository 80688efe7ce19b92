"""The input files of a run: those that are here, and those in S3, which are copied into the run folder."""

import json
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from genpipe.config import Settings
from genpipe.core import wording
from genpipe.core.errors import ConfigError
from genpipe.core.values import CheckReport
from genpipe.edges.files import OsFiles, blaming, make_folder, replace_atomically
from genpipe.edges.prompts import check_files
from genpipe.edges.s3.place import Place
from genpipe.offsite import is_offsite, place_of
from genpipe.wiring import dialect_of

FOLDER = "inputs"
"""The folder of the run folder that holds the copies."""


class Inputs:
    """The input files of a run, in order.

    Attributes:
        are_remote: at least one of them is in S3.
    """

    def __init__(self, settings: Settings, stop: threading.Event) -> None:
        """Prepare; nothing is looked at yet.

        Args:
            settings: which files, and how S3 is spoken to.
            stop: once set, whoever waits gives up.
        """
        self._stop = stop
        self._paths = settings.input.paths
        self._s3 = settings.s3
        self.are_remote = any(is_offsite(path) for path in self._paths)

    def look(self) -> None:
        """Make sure that what is in S3 is there. Blocking.

        Raises:
            ConfigError: it is not, or is empty.
        """
        from genpipe.edges.s3.download import head

        for path in self._paths:
            if is_offsite(path) and head(self._place(path), stop=self._stop).size_bytes == 0:
                raise ConfigError(f"{path} is empty: name the object that holds the prompts")

    def local(self) -> list[Path]:
        """The files, where all of them are here."""
        assert not self.are_remote
        return [Path(path) for path in self._paths]

    def fetch(self, folder: Path, note: Callable[[str], None]) -> list[Path]:
        """The files, those of S3 as copies below ``folder``. Blocking.

        A copy that was made before is used again if the object is still the same.

        Args:
            folder: where the copies are kept; the caller owns it.
            note: told what is copied.

        Raises:
            ConfigError: an object cannot be read.
            StoreError: a copy cannot be written, or is not wanted any more.
        """
        found = []
        for place, path in enumerate(self._paths):
            if is_offsite(path):
                found.append(self._fetch(path, folder / FOLDER, place, note))
            else:
                found.append(Path(path))
        return found

    def _fetch(self, uri: str, folder: Path, place: int, note: Callable[[str], None]) -> Path:
        from genpipe.edges.s3.download import download, head

        files = OsFiles()
        with blaming(folder, "create"):
            make_folder(files, folder)
        copy = folder / f"{place:03d}-{uri.rpartition('/')[2]}"
        facts = copy.with_name(copy.name + ".json")
        size_bytes, etag = head(self._place(uri), stop=self._stop)
        known = {"uri": uri, "size_bytes": size_bytes, "etag": etag}
        if _reads(facts) == known and copy.exists() and copy.stat().st_size == size_bytes:
            return copy
        note(f"copying {uri} ({wording.size(size_bytes)}) into {folder}")
        download(self._place(uri), copy, stop=self._stop)
        with blaming(facts, "write"):
            replace_atomically(files, facts, json.dumps(known).encode() + b"\n")
        return copy

    def _place(self, uri: str) -> Place:
        return place_of(self._s3, uri)


def check(settings: Settings, *, note: Callable[[str], None]) -> CheckReport:
    """Read the whole input, as a run would, and say what it holds; copies of what is in S3 are not kept.

    Args:
        settings: what to read, and how.
        note: told what is copied.

    Raises:
        ConfigError: something cannot be read.
        StoreError: a copy cannot be written.
    """
    inputs, dialect = Inputs(settings, threading.Event()), dialect_of(settings)
    if not inputs.are_remote:
        return check_files(inputs.local(), dialect)
    with tempfile.TemporaryDirectory(prefix="genpipe-check-") as folder:
        files = inputs.fetch(Path(folder), note)
        named = dict(zip(map(str, files), settings.input.paths, strict=True))
        report = check_files(files, dialect)
        bad_lines = tuple(replace(bad, file=named[bad.file]) for bad in report.bad_lines)
        return replace(report, bad_lines=bad_lines)


def _reads(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
