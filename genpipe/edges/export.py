"""The records of a run as one file, in the order of the input: ``genpipe export``.

Finding the records, putting them in order and writing a format are three steps apart, so that another format
is another consumer of :meth:`Records.in_order`.
"""

import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import ConfigError, StoreError
from genpipe.core.wording import number
from genpipe.edges import lines
from genpipe.edges.files import Files, blaming
from genpipe.edges.reading import Held, Shelf, in_turn
from genpipe.edges.shards import Scan, scan

Progress = Callable[[int, int], None]
"""Called with the bytes of shards that were read, and all that there are."""

BUCKET_INDICES = 1 << 16
"""Neighbouring prompts that are put in order at once, by their places alone: some 10 MB of memory."""

BUFFER_BYTES = 32 << 20
"""Records that are kept in memory on their way into the buckets."""

_FOLDER = ".genpipe-export-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was exported.

    Attributes:
        records: how many.
        total: prompts of the run as its last report has it, or None where that is not known.
        doubled: records that were left out because an earlier one is of the same prompt.
        is_whole: nothing was found that could be missing.
    """

    records: int
    total: int | None
    doubled: int
    is_whole: bool

    def as_text(self) -> str:
        """In one line."""
        of = f" of {number(self.total)}" if self.total is not None and self.total >= self.records else ""
        doubled = f", {self.doubled} doubled ones left out" if self.doubled else ""
        return f"{number(self.records)}{of} records exported{doubled}"


class Records:
    """The records of a run, put in order on disk: in memory are a bit per prompt and a few buckets' ends.

    Attributes:
        count: records that were gathered.
        doubled: records that were left out because an earlier shard, or line, is of the same prompt.
        is_whole: nothing was found that could be missing.
    """

    def __init__(
        self,
        shelf: Shelf,
        place: Path,
        *,
        warn: Callable[[str], None],
        bucket_indices: int = BUCKET_INDICES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            shelf: the run, which is only read.
            place: an empty folder for the buckets.
            warn: told, in one line each, what may be missing.
            bucket_indices: neighbouring prompts in a bucket.
            buffer_bytes: records that are kept in memory before they are written to their buckets.
        """
        self._shelf = shelf
        self._place = place
        self._warn = warn
        self._bucket_indices = bucket_indices
        self._buffer_bytes = buffer_bytes
        self._seen = Bitmap()
        self._buckets: set[int] = set()
        self._waiting: defaultdict[int, list[bytes]] = defaultdict(list)
        self._waiting_bytes = 0
        self.doubled = 0
        self.is_whole = True

    @property
    def count(self) -> int:
        """Records that were gathered."""
        return len(self._seen)

    def gather(self, progress: Progress) -> None:
        """Read every shard once, and put its records into buckets.

        Raises:
            ConfigError: not all shards are within reach.
            StoreError: a shard cannot be read, or a bucket not be written.
        """
        at_work = self._shelf.is_at_work()
        inventory = self._shelf.inventory()
        for lack in inventory.lacks:
            self._miss(lack.file, lack.what, lack.then)
        total_bytes = sum(held.size_bytes for held in inventory.held)
        read_bytes = 0
        # A few are fetched ahead; what is read is put away before more is.
        for held, data in in_turn(_read, inventory.held, self._shelf.threads):
            if isinstance(data, bytes):
                self._take(held, scan(data), at_work=at_work)
                read_bytes += len(data)
            else:
                self._miss(held.file, data.what, held.then)
                read_bytes += held.size_bytes
            progress(read_bytes, total_bytes)
        self._flush()

    def in_order(self) -> Iterator[bytes]:
        """The records by index, each as a line without its checksum; to be called once, after the gathering.

        A bucket is removed when its last record was taken, so that the disk needs room for the records once,
        beside what is made of them.

        Raises:
            StoreError: a bucket cannot be read.
        """
        for bucket in sorted(self._buckets):
            path = self._path_of(bucket)
            with blaming(path, "read"), open(path, "rb") as file:
                places = []
                offset = 0
                for line in file:
                    places.append((lines.index_of(line), offset, len(line)))
                    offset += len(line)
                places.sort()
                for _, start, size_bytes in places:
                    yield os.pread(file.fileno(), size_bytes, start)
            path.unlink()

    def _take(self, held: Held, found: Scan, *, at_work: bool) -> None:
        entry = held.entry
        if entry is not None and found.size_bytes != entry.size_bytes:
            what = f"has {found.size_bytes} bytes where {held.noted_in} says {entry.size_bytes}"
            self._miss(held.file, what, held.then)
        # Beside a driver, the end of the open shard is what it is writing just now.
        in_flight = held.is_open and found.is_torn and (at_work or self._shelf.is_at_work())
        if found.bad and not in_flight:
            size_bytes = sum(len(bad) for _, bad in found.bad)
            what = f"holds {size_bytes} bytes that are no record (first at byte {found.bad[0][0]})"
            self._miss(held.file, what, held.then)
        for index, (start, stop) in zip(found.indices, found.spans, strict=True):
            if not self._seen.add(index):
                self.doubled += 1
                continue
            line = lines.body_of(found.data[start:stop]) + b"\n"
            self._waiting[index // self._bucket_indices].append(line)
            self._waiting_bytes += len(line)
        if self._waiting_bytes > self._buffer_bytes:
            self._flush()

    def _miss(self, file: str, what: str, then: str) -> None:
        self.is_whole = False
        self._warn(f"{file} {what}: records may be missing; {then}")

    def _flush(self) -> None:
        # Opened for each write: a run may have more buckets than a process may have open files.
        for bucket, waiting in self._waiting.items():
            path = self._path_of(bucket)
            with blaming(path, "write"), open(path, "ab") as file:
                file.writelines(waiting)
            self._buckets.add(bucket)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _path_of(self, bucket: int) -> Path:
        return self._place / f"bucket-{bucket}"


def export_to_file(
    shelf: Shelf,
    files: Files,
    out: Path,
    *,
    force: bool,
    warn: Callable[[str], None],
    progress: Progress,
    bucket_indices: int = BUCKET_INDICES,
    buffer_bytes: int = BUFFER_BYTES,
) -> Exported:
    """Write the records of a run to a file, which appears whole or not at all.

    Args:
        shelf: the run; a driver may be at work.
        files: the disk that the file is on.
        out: the file; a folder for temporary files is made beside it, and removed again.
        force: an existing file is replaced.
        warn: told, in one line each, what may be missing.
        progress: told how far it is.
        bucket_indices: see :class:`Records`.
        buffer_bytes: see :class:`Records`.

    Raises:
        ConfigError: there is no run, not all of it is within reach, or the file cannot have that place.
        DiskFull: there is no room; nothing is left of what was written.
        StoreError: something cannot be read or written; likewise.
    """
    shelf.check()
    # What a link points to is replaced, and not the link.
    out = out.resolve()
    _check_place(shelf.folder, out, force=force)
    with _temporary_folder(out.parent) as place:
        records = Records(shelf, place, warn=warn, bucket_indices=bucket_indices, buffer_bytes=buffer_bytes)
        records.gather(progress)
        temporary = place / "whole"
        with blaming(temporary, "create"), open(temporary, "xb") as file:
            _write_lines(records, file, out)
            with blaming(out, "write"):
                file.flush()
                os.fsync(file.fileno())
        with blaming(out, "write"):
            _put_in_place(temporary, out, force=force)
            files.sync_folder(out.parent)
        return _exported(shelf, records)


def export_to_stream(
    shelf: Shelf, stream: BinaryIO, *, warn: Callable[[str], None], progress: Progress
) -> Exported:
    """Write the records of a run to a stream; temporary files are where the system keeps them.

    Raises:
        ConfigError: there is no run, or not all of it is within reach.
        BrokenPipeError: whoever read the stream has gone.
        StoreError: something cannot be read or written.
    """
    shelf.check()
    with _temporary_folder(Path(tempfile.gettempdir())) as place:
        records = Records(shelf, place, warn=warn)
        records.gather(progress)
        _write_lines(records, stream, Path("stdout"))
        return _exported(shelf, records)


def _write_lines(records: Records, stream: BinaryIO, name: Path) -> None:
    """The format ``jsonl``: a record a line."""
    try:
        for record in records.in_order():
            with blaming(name, "write"):
                stream.write(record)
        with blaming(name, "write"):
            stream.flush()
    except StoreError as error:
        if isinstance(error.__cause__, BrokenPipeError):
            raise error.__cause__ from None
        raise


def _check_place(folder: Path | None, out: Path, *, force: bool) -> None:
    """Refuse a file that must not be replaced, or that would lie where a driver may be at work."""
    if folder is not None and folder.resolve() in (out, *out.parents):
        raise ConfigError(
            f"{out} is in the run folder {folder}, which is not to be changed: name another place"
        )
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is no folder: make it first, or name another place than {out}")
    if out.exists():
        if not out.is_file():
            raise ConfigError(f"{out} is no file, and is not replaced: name another, or - for stdout")
        if not force:
            raise ConfigError(f"{out} exists: name another file, or replace it with --force")


def _put_in_place(temporary: Path, out: Path, *, force: bool) -> None:
    """Give the finished file its name; one that has come to be there meanwhile is not replaced either."""
    if not force:
        try:
            out.hardlink_to(temporary)
        except OSError:
            # It exists, or the file system has no hard links.
            _check_place(None, out, force=False)
        else:
            return
    temporary.rename(out)


@contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    with blaming(parent, "write to"):
        place = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _exported(shelf: Shelf, records: Records) -> Exported:
    return Exported(
        records=records.count,
        total=shelf.total(),
        doubled=records.doubled,
        is_whole=records.is_whole,
    )


@dataclass(frozen=True, slots=True)
class _Wrong:
    what: str


def _read(held: Held) -> tuple[Held, bytes | _Wrong]:
    """The lines of a shard, or what is wrong with it. Runs in a thread."""
    try:
        return held, held.read()
    except ValueError as error:
        return held, _Wrong(str(error))
