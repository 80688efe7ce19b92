"""The input files of a run: those that are here, and copies of what is in S3 or comes from standard input."""

import json
import os
import re
import tempfile
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genpipe.config import Settings
from genpipe.core import wording
from genpipe.core.errors import ConfigError, ObjectStoreError
from genpipe.core.values import CheckReport
from genpipe.edges.files import OsFiles, blaming, make_folder, replace_atomically
from genpipe.edges.prompts.checking import check_files
from genpipe.edges.prompts.formats import check_readable
from genpipe.edges.prompts.patterns import head_of, is_pattern, local_files, matching, nothing_matches
from genpipe.edges.prompts.spool import SPOOL, STDIN, demand_piped, spool
from genpipe.edges.s3.place import Place
from genpipe.offsite import SCHEME, is_offsite, place_of
from genpipe.signals import exit_on_signals
from genpipe.wiring import dialect_of

FOLDER = "inputs"
"""The folder of the run folder that holds the copies."""


class Inputs:
    """The input files of a run, in order.

    Attributes:
        are_copied: at least one of them is in S3 or comes from standard input, so that a folder is needed.
        names: what each file is called, once it was looked for; patterns are the files that match them.
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
        self._format = settings.input.format
        self._s3 = settings.s3
        # What a listing has told of objects: sizes (bytes) and ETags.
        self._listed: dict[str, tuple[int, str]] = {}
        self.names: list[str] = []
        self.are_copied = any(path == STDIN or is_offsite(path) for path in self._paths)

    def look(self) -> None:
        """Make sure that what is wanted is there. Blocking.

        Raises:
            ConfigError: it is not, is empty, or is named twice; a copy from an earlier start will do.
        """
        found = [(name, path) for path in self._paths for name in self._found(path)]
        by_file: dict[str, str] = {}
        for name, path in found:
            key = name if is_offsite(name) or name == STDIN else os.path.realpath(name)
            if key in by_file:
                called = "standard input" if name == STDIN else name
                by = f" (by {by_file[key]!r} and {path!r})" if name != path or by_file[key] != path else ""
                raise ConfigError(f"{called} is in the input twice{by}: name each file once")
            by_file[key] = path
        self.names = [name for name, _ in found]
        for name in self.names:
            if name == STDIN:
                if not self._spool_path.exists():
                    demand_piped()
            elif not is_offsite(name):
                check_readable(Path(name), self._format)
            elif self._head(name).size_bytes == 0:
                raise ConfigError(f"{name} is empty: name the object that holds the prompts")

    def local(self) -> list[Path]:
        """The files, where all of them are here and were looked for."""
        assert not self.are_copied
        return [Path(name) for name in self.names]

    def fetch(self, note: Callable[[str], None]) -> list[Path]:
        """The files, some of them as copies, once they were looked for. Blocking; the caller owns the folder.

        A copy that was made before is used again: of standard input always, of an object if it is still the
        same, or cannot be looked at. Copies of what it was before are kept.

        Args:
            note: told what is copied.

        Raises:
            ConfigError: an object, or standard input, cannot be read.
            StoreError: a copy cannot be written, or is not wanted any more.
        """
        found = []
        for place, name in enumerate(self.names):
            if name == STDIN:
                found.append(self._spooled(note))
            elif is_offsite(name):
                found.append(self._fetch(name, self._folder / FOLDER, place, note))
            else:
                found.append(Path(name))
        for path in found:
            check_readable(path, self._format)
        return found

    def _found(self, path: str) -> list[str]:
        """What a path stands for."""
        if path == STDIN:
            return [path]
        if not is_offsite(path):
            return local_files(path)
        if re.fullmatch(r"s3://[^/\s]+/[^\r\n]+", path) is None:
            raise ConfigError(f"{path!r} names no object: write s3://bucket/key")
        return self._matching(path) if is_pattern(path) else [path]

    def _matching(self, uri: str) -> list[str]:
        """The objects that a pattern stands for; empty ones, such as folders and marks, are none."""
        from genpipe.edges.s3.boto import BotoObjects
        from genpipe.edges.s3.download import LOOK_S, LOOK_TRIES
        from genpipe.edges.s3.troubles import Troubles

        bucket, _, pattern = uri.removeprefix(SCHEME).partition("/")
        place = replace(self._place(f"{SCHEME}{bucket}"), timeout_s=min(self._s3.timeout_s, LOOK_S))
        try:
            with closing(BotoObjects(place, Troubles(), stop=self._stop)) as objects:
                some = objects.list(head_of(pattern), tries=LOOK_TRIES)
                listed = {one.key: (one.size_bytes, one.etag) for one in some if one.size_bytes}
        except ObjectStoreError as error:
            raise ConfigError(f"{error}; the input cannot be read") from error
        found = {f"{place.uri}/{key}": listed[key] for key in matching(listed, pattern)}
        if not found:
            raise nothing_matches(uri)
        self._listed.update(found)
        return list(found)

    @property
    def _spool_path(self) -> Path:
        return self._folder / FOLDER / SPOOL

    def _spooled(self, note: Callable[[str], None]) -> Path:
        """The file that holds what came from standard input."""
        path = self._spool_path
        if path.exists():
            note(f"standard input is not read: this run began with what is in {path}")
            return path
        with blaming(path.parent, "create"):
            make_folder(OsFiles(), path.parent)
        note(f"copying standard input into {path}")
        size_bytes = spool(path, stop=self._stop)
        note(f"standard input is at its end: {wording.size(size_bytes)}")
        return path

    def _fetch(self, uri: str, folder: Path, place: int, note: Callable[[str], None]) -> Path:
        from genpipe.edges.s3.download import download

        files = OsFiles()
        with blaming(folder, "create"):
            make_folder(files, folder)
        found = self._head(uri)
        if (copy := found.copy) is None:
            older = self._copies(uri)
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

    def _head(self, uri: str) -> "_Found":
        """What an object is; where the store does not say, what a copy of it was."""
        from genpipe.edges.s3.download import head

        copies = self._copies(uri)
        try:
            size_bytes, etag = self._listed.get(uri) or head(self._place(uri), stop=self._stop)
        except ConfigError as error:
            if len(copies) != 1:
                raise
            (copy, facts), *_ = copies
            return _Found(size_bytes=facts["size_bytes"], etag=facts["etag"], copy=copy, trouble=str(error))
        same = [copy for copy, facts in copies if (facts["size_bytes"], facts["etag"]) == (size_bytes, etag)]
        return _Found(size_bytes=size_bytes, etag=etag, copy=same[0] if same else None, trouble=None)

    def _copies(self, uri: str) -> list[tuple[Path, dict[str, Any]]]:
        """The whole copies of an object that earlier starts have made, and what each was."""
        found = []
        for path in sorted((self._folder / FOLDER).glob("*.json")):
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
    are_copied = Inputs(settings, Path(), stop).are_copied
    if are_copied:
        exit_on_signals()
    with tempfile.TemporaryDirectory(prefix="genpipe-check-") if are_copied else nullcontext("") as folder:
        inputs = Inputs(settings, Path(folder), stop)
        inputs.look()
        files = inputs.fetch(note)
        named = dict(zip(map(str, files), inputs.names, strict=True))
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
