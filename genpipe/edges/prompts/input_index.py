"""``input.idx``: where the chunks of the input begin and end, and what they held when this run began.

A chunk is up to 1,000 records or 4 MiB, whichever is first, of one file (of Parquet, of one row group). The
index lets a resumed run seek over what is done, and shows whether the input is still the one that the record
numbers were counted in. Of a packed file the text is what counts: it may be packed anew, or unpacked.
It is derived: it is extended as the input is read, never synced, and indexed again where it is lost.
"""

import os
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from genpipe.core.errors import ConfigError, ResumeMismatch
from genpipe.edges import lines
from genpipe.edges.prompts.chunks import Cut, Entry, LineFile
from genpipe.edges.prompts.formats import Handles, check_readable, length_of
from genpipe.edges.strict_json import loads

_LINE_BYTES_MAX = 4_096
_WIDTH = len(Entry.__slots__)
_WHAT_NEXT = "restore the file, or start a new run in another folder"


class InputIndex:
    """The chunks of the input: read from ``input.idx``, checked, and extended as the input is read.

    Any number of threads may use it, each with its own :class:`Handles`.

    Attributes:
        total: records in the whole input; None until it has been read to its end, or is known from elsewhere.
    """

    def __init__(
        self, *, files: Sequence[Path], path: Path | None, resumed: bool, warn: Callable[[str], None]
    ) -> None:
        """Open the input and its index.

        Args:
            files: the input, in order.
            path: of ``input.idx``, or None to hold the index in memory only.
            resumed: the run has done something before, so that the index is missed where it is not there.
            warn: told, in one line, what is wrong with the index; the input is then indexed again. Called
                from whatever thread finds it.

        Raises:
            ConfigError: an input file cannot be read.
            ResumeMismatch: the sizes show that the input is not what this run began with.
        """
        self._facts = [check_readable(file) for file in files]
        if not self._facts:
            raise ConfigError("no input file is given: name one with --prompts or input.paths")
        self.total: int | None = None
        # Whether all chunks are known.
        self._is_whole = False
        self._files = files
        self._lock = threading.Lock()
        self._columns = array("Q")
        self._verified = bytearray()
        self._path = path
        self._warn = warn
        self._descriptor: int | None = None
        if path is not None:
            self._open(path, resumed=resumed)
        self._loaded = len(self)
        self._check_ends([length_of(file, facts) for file, facts in zip(files, self._facts, strict=True)])

    def __len__(self) -> int:
        return len(self._columns) // _WIDTH

    def entry(self, number: int) -> Entry:
        """Chunk ``number``, from 0, of those that are known."""
        file, first, records, line_count, start, end, digest = self._columns[
            number * _WIDTH : (number + 1) * _WIDTH
        ]
        return Entry(
            file=file, first=first, records=records, lines=line_count, start=start, end=end, digest=digest
        )

    def read(self, number: int, handles: Handles) -> Cut:
        """Known chunk ``number`` with its records, verified.

        Raises:
            ConfigError: the file cannot be read.
            ResumeMismatch: the chunk's bytes are not those that were indexed.
        """
        entry = self.entry(number)
        with handles.reading(entry.file) as file:
            cut = file.cut(
                file=entry.file,
                first=entry.first,
                lines_before=self._lines_before(number),
                start=entry.start,
                end=entry.end,
            )
        if cut is None or cut.entry != entry:
            raise self._differs(entry)
        self._set_verified(number, entry, handles)
        return cut

    def verify(self, number: int, handles: Handles) -> bool:
        """Hold known chunk ``number`` against the input; False where that was done before.

        Raises:
            ConfigError: the file cannot be read.
            ResumeMismatch: the chunk's bytes are not those that were indexed.
        """
        if self._verified[number]:
            return False
        entry = self.entry(number)
        with handles.reading(entry.file) as file:
            digest = file.digest(entry.start, entry.end)
        if digest != entry.digest:
            raise self._differs(entry)
        self._set_verified(number, entry, handles)
        return True

    def extend(self, number: int, handles: Handles, *, keep: bool = True) -> Cut | None:
        """Read chunk ``number``, the first that is not known, and add it to the index.

        None where another thread has added it meanwhile, or where the input is at its end and ``total`` is
        known. Without ``keep`` the records are only counted.

        Raises:
            ConfigError: the file cannot be read.
            ResumeMismatch: the last line of a packed file that was indexed before goes on.
        """
        with self._lock:
            if number < len(self) or self._is_whole:
                return None
            file, first, line_count, start = self._end()
            if number and number == self._loaded and self._is_packed(file):
                self._check_last_line(self.entry(number - 1), handles)
            while file < len(self._files):
                with handles.reading(file) as opened:
                    cut = opened.cut(file=file, first=first, lines_before=line_count, start=start, keep=keep)
                if cut is not None:
                    self._append(cut.entry)
                    return cut
                file, line_count, start = file + 1, 0, 0
            self.total, self._is_whole = first, True
            return None

    def close(self) -> None:
        """Close ``input.idx``."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _lines_before(self, number: int) -> int:
        if number == 0 or self.entry(number - 1).file != self.entry(number).file:
            return 0
        return self.entry(number - 1).lines

    def _end(self) -> tuple[int, int, int, int]:
        """Where the known chunks end: file, next record, lines and bytes of the file."""
        if not len(self):
            return 0, 0, 0, 0
        last = self.entry(len(self) - 1)
        return last.file, last.first + last.records, last.lines, last.end

    def _add(self, entry: Entry, *, verified: bool) -> None:
        # The columns come last: other threads take a chunk as known once its column is there.
        self._verified.append(verified)
        self._columns.extend(
            (entry.file, entry.first, entry.records, entry.lines, entry.start, entry.end, entry.digest)
        )

    def _append(self, entry: Entry) -> None:
        self._add(entry, verified=True)
        if self._descriptor is None:
            return
        line = encode_entry(entry)
        try:
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            os.close(self._descriptor)
            self._descriptor = None
            self._warn(
                f"{self._path} cannot be written ({error.strerror}): "
                "a later resume will index the input again from there"
            )

    def _open(self, path: Path, *, resumed: bool) -> None:
        """Read what ``input.idx`` has, cut off what does not count, and leave it open to be extended."""
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            damaged = self._load(self._descriptor)
        except OSError as error:
            self.close()
            trouble = f"cannot be used ({error.strerror})"
        else:
            if damaged:
                trouble = f"is damaged after chunk {len(self)}"
            elif resumed and not len(self):
                trouble = "is missing or empty"
            else:
                return
        self._warn(
            f"{path} {trouble}: the input is indexed again from there, "
            "and that part is not held against what this run began with"
        )

    def _load(self, descriptor: int) -> bool:
        """Read the entries up to the first line that does not count, and cut the file there.

        Whether that is damage: half a line at the very end is only what a kill leaves behind.
        """
        good_bytes = 0
        with open(descriptor, "rb", closefd=False) as handle:
            while line := handle.readline(_LINE_BYTES_MAX):
                entry = decode_entry(line)
                if entry is None or not self._follows(entry):
                    break
                self._add(entry, verified=False)
                good_bytes += len(line)
            else:
                return False
            torn = not line.endswith(b"\n") and not handle.read(1)
        os.ftruncate(descriptor, good_bytes)
        return not torn

    def _follows(self, entry: Entry) -> bool:
        """Whether ``entry`` can come after the chunks that are known."""
        file, first, line_count, start = self._end()
        if entry.file > file:
            line_count = start = 0
        return (
            entry.file >= file
            and entry.first == first
            and entry.start == start < entry.end
            and entry.lines >= line_count
        )

    def _set_verified(self, number: int, entry: Entry, handles: Handles) -> None:
        """The chunk is as it was; what no size could tell of a packed file is whether it has grown."""
        is_last = number + 1 < len(self) and self.entry(number + 1).file != entry.file
        if is_last and self._is_packed(entry.file):
            self._demand_end(entry.file, entry.end, handles)
        self._verified[number] = 1

    def _is_packed(self, file: int) -> bool:
        return self._facts[file].form in ("gzip", "zstd")

    def _check_ends(self, ends_now: list[int | None]) -> None:
        """What the files' ends alone tell, at the start: shrunk, grown in the middle, or already counted."""
        last_file, records, _, last_end = self._end()
        if last_file >= len(ends_now):
            raise ResumeMismatch(
                f"this run began with {last_file + 1} input files at least, now there are {len(ends_now)}: "
                "name all of them in the same order, or start a new run in another folder"
            )
        ends = [0] * len(ends_now)
        for number in range(len(self)):
            entry = self.entry(number)
            end_now = ends_now[entry.file]
            if end_now is not None and entry.end > end_now:
                raise self._differs(entry, f"it ends at {self._unit(entry.file)} {end_now}")
            ends[entry.file] = entry.end
        handles = Handles(self._files)
        try:
            for file in range(last_file):
                end_now = ends_now[file]
                if end_now is not None and ends[file] < end_now:
                    raise self._grown(file, ends[file], f" to {end_now}")
                if end_now is None and not ends[file]:
                    # The others are looked at when their last chunk is verified.
                    self._demand_end(file, 0, handles)
            if last_end and last_end < (ends_now[last_file] or 0) and self._facts[last_file].form == "plain":
                self._check_last_line(self.entry(len(self) - 1), handles)
        finally:
            handles.close()
        if ends == ends_now:
            self.total, self._is_whole = records, True
        elif all(facts.form == "Parquet" for facts in self._facts):
            self.total = sum(end or 0 for end in ends_now)

    def _demand_end(self, file: int, end: int, handles: Handles) -> None:
        """A file that has others behind it must not have grown."""
        with handles.reading(file) as opened:
            if opened.goes_on(end):
                raise self._grown(file, end)

    def _check_last_line(self, entry: Entry, handles: Handles) -> None:
        """Where the input grew, its last line of then must end where it ended then."""
        with handles.reading(entry.file) as file:
            if isinstance(file, LineFile) and file.line_goes_on(entry.end):
                raise self._differs(entry, "its last line goes on")

    def _unit(self, file: int) -> str:
        return "row" if self._facts[file].form == "Parquet" else "byte"

    def _grown(self, file: int, end: int, to: str = "") -> ResumeMismatch:
        return ResumeMismatch(
            f"{self._files[file]} has grown from {end}{to} {self._unit(file)}s since this run began, so that "
            f"the records of the files after it would change numbers: {_WHAT_NEXT}"
        )

    def _differs(self, entry: Entry, how: str = "") -> ResumeMismatch:
        where = f"in records {entry.first}-{entry.first + entry.records - 1}"
        if not entry.records:
            where = f"in blank lines before record {entry.first}"
        return ResumeMismatch(
            f"{self._files[entry.file]} differs from what this run began with, {where} "
            f"({self._unit(entry.file)}s {entry.start}-{entry.end}{': ' + how if how else ''}): {_WHAT_NEXT}"
        )


def encode_entry(entry: Entry) -> bytes:
    """The entry as a line of ``input.idx``."""
    return lines.encode(
        b'{"file":%d,"first":%d,"records":%d,"lines":%d,"start":%d,"end":%d,"hash":"%016x"'
        % (entry.file, entry.first, entry.records, entry.lines, entry.start, entry.end, entry.digest)
    )


def decode_entry(line: bytes) -> Entry | None:
    """The entry of a line of ``input.idx``; None where the line does not count."""
    body = lines.decode(line)
    if body is None:
        return None
    try:
        data = loads(body)
        entry = Entry(
            digest=int(data["hash"], 16),
            **{name: data[name] for name in ("file", "first", "records", "lines", "start", "end")},
        )
    except (KeyError, TypeError, ValueError):
        return None
    values = (entry.file, entry.first, entry.records, entry.lines, entry.start, entry.end, entry.digest)
    return entry if all(type(value) is int and 0 <= value < 1 << 64 for value in values) else None
