"""The records of a run as one file, in the order of the input: ``genpipe export``.

Finding the records, putting them in order, making rows of them and writing a format are steps apart.
"""

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import ConfigError, StoreError
from genpipe.edges import lines
from genpipe.edges.export import data_card
from genpipe.edges.export.making import Making
from genpipe.edges.export.outcome import Exported
from genpipe.edges.export.packing import Sink, lines_to
from genpipe.edges.export.parquet import ParquetRows, demand_pyarrow
from genpipe.edges.export.places import check_place, put_in_place, temporary_folder
from genpipe.edges.export.wish import Wish
from genpipe.edges.files import Files, blaming
from genpipe.edges.reading import Held, Shelf, in_turn
from genpipe.edges.shards import Scan, scan

Progress = Callable[[int, int], None]
"""Called with the bytes of shards that were read, and all that there are."""

BUCKET_INDICES = 1 << 16
"""Neighbouring prompts that are put in order at once, by their places alone: some 10 MB of memory."""

BUFFER_BYTES = 32 << 20
"""Records that are kept in memory on their way into the buckets."""

_PARQUET = ".parquet"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlace:
    """The data card that is wished for.

    Attributes:
        path: where.
        now_text: the present moment (ISO 8601, UTC).
    """

    path: Path
    now_text: str


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

    def gather(self, progress: Progress, look: Callable[[bytes], None] | None = None) -> None:
        """Read every shard once, and put its records into buckets.

        Args:
            progress: told how far it is.
            look: shown each line that :meth:`in_order` will give, in any order.

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
                self._take(held, scan(data), look, at_work=at_work)
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

    def _take(self, held: Held, found: Scan, look: Callable[[bytes], None] | None, *, at_work: bool) -> None:
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
            if look is not None:
                look(line)
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
    wish: Wish | None = None,
    card: CardPlace | None = None,
    bucket_indices: int = BUCKET_INDICES,
    buffer_bytes: int = BUFFER_BYTES,
) -> Exported:
    """Write the records of a run to a file, which appears whole or not at all, with its card before it.

    Args:
        shelf: the run; a driver may be at work.
        files: the disk that the file is on.
        out: the file; its ending (``.parquet``, ``.gz``, ``.zst``, in any case) says what it is, else it is
            JSON Lines. A folder for temporary files is made beside it, and removed again.
        force: existing files are replaced.
        warn: told, in one line each, what may be missing.
        progress: told how far it is.
        wish: which records, in which form; all as they are where it is None.
        card: the data card, or None for none.
        bucket_indices: see :class:`Records`.
        buffer_bytes: see :class:`Records`.

    Raises:
        ConfigError: there is no run, not all of it is within reach, it has not what is wished for, or a file
            cannot have its place.
        DiskFull: there is no room; nothing is left of what was written.
        StoreError: something cannot be read or written; likewise.
    """
    # What a link points to is replaced, and not the link.
    out = out.resolve()
    as_columns = out.name.lower().endswith(_PARQUET)
    if as_columns:
        demand_pyarrow()
    with ExitStack() as stack:
        making = Making(
            shelf.run(), wish or Wish(), as_columns=as_columns, with_card=card is not None, warn=warn
        )
        check_place(shelf.folder, out, force=force)
        card_path = _check_card(shelf, card, out, force=force)
        place = stack.enter_context(temporary_folder(out.parent))
        records = Records(
            shelf, place, warn=making.warn, bucket_indices=bucket_indices, buffer_bytes=buffer_bytes
        )
        records.gather(progress, making.look if making.looks else None)
        making.check_gathered()
        temporary = place / "whole"
        with blaming(temporary, "create"), open(temporary, "xb") as file:
            with blaming(out, "write"):
                sink = ParquetRows(file, making.columns) if as_columns else lines_to(file, out.name)
            _write_rows(records, making, sink, out)
            with blaming(out, "write"):
                file.flush()
                os.fsync(file.fileno())
        exported = _exported(shelf, records, making)
        finished = [(temporary, out)]
        if card is not None and card_path is not None:
            folder = stack.enter_context(temporary_folder(card_path.parent))
            finished.insert(0, (_write_card(folder, out.name, card, exported, making), card_path))
        put_in_place(finished, files, force=force)
        return exported


def export_to_stream(
    shelf: Shelf,
    stream: BinaryIO,
    files: Files,
    *,
    force: bool,
    warn: Callable[[str], None],
    progress: Progress,
    wish: Wish | None = None,
    card: CardPlace | None = None,
) -> Exported:
    """Write the records of a run to a stream as JSON Lines; temporary files are where the system keeps them.

    Args:
        shelf: the run; a driver may be at work.
        stream: where they go.
        files: the disk that the card is on.
        force: an existing card is replaced.
        warn: told, in one line each, what may be missing.
        progress: told how far it is.
        wish: which records, in which form; all as they are where it is None.
        card: the data card, or None for none.

    Raises:
        ConfigError: there is no run, not all of it is within reach, or it has not what is wished for.
        BrokenPipeError: whoever read the stream has gone.
        StoreError: something cannot be read or written.
    """
    with ExitStack() as stack:
        making = Making(shelf.run(), wish or Wish(), as_columns=False, with_card=card is not None, warn=warn)
        card_path = _check_card(shelf, card, None, force=force)
        place = stack.enter_context(temporary_folder(Path(tempfile.gettempdir())))
        records = Records(shelf, place, warn=making.warn)
        records.gather(progress, making.look if making.looks else None)
        making.check_gathered()
        _write_rows(records, making, lines_to(stream, ""), Path("stdout"))
        exported = _exported(shelf, records, making)
        if card is not None and card_path is not None:
            folder = stack.enter_context(temporary_folder(card_path.parent))
            finished = [(_write_card(folder, "stdout", card, exported, making), card_path)]
            put_in_place(finished, files, force=force)
        return exported


def _write_rows(records: Records, making: Making, sink: Sink, name: Path) -> None:
    try:
        for line in records.in_order():
            rows = making.rows(line)
            with blaming(name, "write"):
                sink.put(rows, len(line))
        with blaming(name, "write"):
            sink.close()
    except BaseException as error:
        sink.abandon()
        if isinstance(error, StoreError) and isinstance(error.__cause__, BrokenPipeError):
            raise error.__cause__ from None
        raise
    making.tell_unread()


def _check_card(shelf: Shelf, card: CardPlace | None, out: Path | None, *, force: bool) -> Path | None:
    """Where the card comes to be, once it is found that it can."""
    if card is None:
        return None
    path = card.path.resolve()
    if path == out:
        raise ConfigError(f"{path} cannot be both the records and their card: name another with --card")
    check_place(shelf.folder, path, force=force)
    return path


def _write_card(folder: Path, name: str, card: CardPlace, exported: Exported, making: Making) -> Path:
    about = data_card.About(
        name=name,
        now_text=card.now_text,
        run=making.run,
        wish=making.wish,
        total=exported.total,
        doubled=exported.doubled,
        warnings=making.warnings,
    )
    temporary = folder / "card"
    with blaming(card.path, "write"), open(temporary, "xb") as file:
        file.write(data_card.card(about, making.facts).encode())
        file.flush()
        os.fsync(file.fileno())
    return temporary


def _exported(shelf: Shelf, records: Records, making: Making) -> Exported:
    return Exported(
        records=making.facts.records,
        rows=making.facts.rows,
        left_out=making.facts.left_out,
        samples_left_out=making.facts.samples_left_out,
        total=shelf.total(),
        doubled=records.doubled,
        is_whole=records.is_whole and not making.lost,
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
