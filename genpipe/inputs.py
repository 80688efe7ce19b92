"""The input files of a run: those that are here, and those in S3, which are copied into the run folder."""

import json
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genpipe.config import Settings
from genpipe.core import wording
from genpipe.core.errors import ConfigError
from genpipe.core.values import CheckReport
from genpipe.edges.chunks import check_readable
from genpipe.edges.files import OsFiles, blaming, make_folder, replace_atomically
from genpipe.edges.prompts import check_files
from genpipe.edges.s3.place import Place
from genpipe.offsite import is_offsite, place_of
from genpipe.signals import exit_on_signals
from genpipe.wiring import dialect_of

FOLDER = "inputs"
"""The folder of the run folder that holds the copies."""


class Inputs:
    """The input files of a run, in order.

    Attributes:
        are_remote: at least one of them is in S3.
    """

    def __init__(self, settings: Settings, folder: Path, stop: threading.Event) -> None:
        """Prepare; nothing is looked at yet.

        Args:
            settings: which files, and how S3 is spoken to.
            folder: the copies are kept in a folder of it.
            stop: once set, whoever waits gives up.
        """
        self._stop = stop
        self._folder = folder
        self._paths = settings.input.paths
        self._s3 = settings.s3
        self.are_remote = any(is_offsite(path) for path in self._paths)

    def look(self) -> None:
        """Make sure that what is wanted is there. Blocking.

        Raises:
            ConfigError: it is not, or is empty; a copy from an earlier start will do.
        """
        for place, path in enumerate(self._paths):
            if not is_offsite(path):
                check_readable(Path(path))
            elif re.fullmatch(r"s3://[^/\s]+/[^\r\n]+", path) is None:
                raise ConfigError(f"{path!r} names no object: write s3://bucket/key")
            elif self._head(path, place).size_bytes == 0:
                raise ConfigError(f"{path} is empty: name the object that holds the prompts")

    def local(self) -> list[Path]:
        """The files, where all of them are here."""
        assert not self.are_remote
        return [Path(path) for path in self._paths]

    def fetch(self, note: Callable[[str], None]) -> list[Path]:
        """The files, those of S3 as copies. Blocking; the caller owns the folder.

        A copy that was made before is used again if the object is still the same, or cannot be looked at.
        Copies of what it was before are kept.

        Args:
            note: told what is copied.

        Raises:
            ConfigError: an object cannot be read.
            StoreError: a copy cannot be written, or is not wanted any more.
        """
        found = []
        for place, path in enumerate(self._paths):
            if is_offsite(path):
                found.append(self._fetch(path, self._folder / FOLDER, place, note))
            else:
                found.append(Path(path))
        return found

    def _fetch(self, uri: str, folder: Path, place: int, note: Callable[[str], None]) -> Path:
        from genpipe.edges.s3.download import download

        files = OsFiles()
        with blaming(folder, "create"):
            make_folder(files, folder)
        found = self._head(uri, place)
        if (copy := found.copy) is None:
            older = self._copies(uri, place)
            copy = folder / f"{place:03d}-{_letters(found.etag)}-{_letters(uri.rpartition('/')[2])[-100:]}"
            note(f"copying {uri} ({wording.size(found.size_bytes)}) into {folder}")
            download(self._place(uri), copy, stop=self._stop)
            facts = {"uri": uri, "size_bytes": found.size_bytes, "etag": found.etag}
            with blaming(copy, "write"):
                replace_atomically(files, _facts_of(copy), json.dumps(facts).encode() + b"\n")
            for path, _ in older:
                note(f"warning: {uri} has changed; {path} is how it was, and can be given with --prompts")
        elif found.trouble:
            note(f"warning: {found.trouble}; its copy is used: {copy}")
        return copy

    def _head(self, uri: str, place: int) -> "_Found":
        """What an object is; where the store does not say, what a copy of it was."""
        from genpipe.edges.s3.download import head

        copies = self._copies(uri, place)
        try:
            size_bytes, etag = head(self._place(uri), stop=self._stop)
        except ConfigError as error:
            if len(copies) != 1:
                raise
            (copy, facts), *_ = copies
            return _Found(size_bytes=facts["size_bytes"], etag=facts["etag"], copy=copy, trouble=str(error))
        same = [copy for copy, facts in copies if (facts["size_bytes"], facts["etag"]) == (size_bytes, etag)]
        return _Found(size_bytes=size_bytes, etag=etag, copy=same[0] if same else None, trouble=None)

    def _copies(self, uri: str, place: int) -> list[tuple[Path, dict[str, Any]]]:
        """The whole copies of an object that earlier starts have made, and what each was."""
        found = []
        for path in sorted((self._folder / FOLDER).glob(f"{place:03d}-*.json")):
            copy = path.with_name(path.name.removesuffix(".json"))
            try:
                facts = json.loads(path.read_bytes())
                if facts["uri"] == uri and copy.stat().st_size == facts["size_bytes"]:
                    found.append((copy, facts))
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return found

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
    dialect, stop = dialect_of(settings), threading.Event()
    inputs = Inputs(settings, Path(), stop)
    if not inputs.are_remote:
        return check_files(inputs.local(), dialect)
    exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="genpipe-check-") as folder:
        inputs = Inputs(settings, Path(folder), stop)
        inputs.look()
        files = inputs.fetch(note)
        named = dict(zip(map(str, files), settings.input.paths, strict=True))
        report = check_files(files, dialect)
        bad_lines = tuple(replace(bad, file=named[bad.file]) for bad in report.bad_lines)
        return replace(report, bad_lines=bad_lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One object: how it is, or was when it was copied.

    Attributes:
        size_bytes: its length.
        etag: changes with its content.
        copy: a copy of it that is here.
        trouble: why the store could not be asked.
    """

    size_bytes: int
    etag: str
    copy: Path | None
    trouble: str | None


def _facts_of(copy: Path) -> Path:
    return copy.with_name(copy.name + ".json")


def _letters(text: str) -> str:
    """What of it may stand in any file's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)
