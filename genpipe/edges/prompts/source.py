"""Reads prompts from files: in order, without what is done, ahead of nobody's need."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from genpipe.core import wording
from genpipe.core.bitmap import Bitmap
from genpipe.core.errors import ConfigError, ResumeMismatch
from genpipe.core.values import BadLine, Chunk, Prompt
from genpipe.edges.prompts.chunks import IS_ARRAY, IS_SPREAD, Cut
from genpipe.edges.prompts.dialects import Dialect, RecordError
from genpipe.edges.prompts.formats import Handles
from genpipe.edges.prompts.input_index import InputIndex

READ_BYTES_MAX: Final = 8 << 20
"""Payload of one read, unless a single prompt is larger."""

_CHUNKS_PER_READ = 16
_RECORDS_BETWEEN_YIELDS = 64
_NAP_MIN_S = 0.001


class FileSource:
    """The prompts of some input files; a :class:`genpipe.core.ports.Source`.

    Reading and parsing happen in one worker thread. From the first read on, a second thread runs ahead to
    the end of the input: it counts what is new and verifies what the index of an earlier process promised.
    """

    def __init__(
        self,
        *,
        files: Sequence[Path],
        dialect: Dialect,
        index_path: Path | None,
        done: Bitmap,
        warn: Callable[[str], None],
        on_mismatch: Callable[[ConfigError], None] | None = None,
    ) -> None:
        """Open the input.

        Args:
            files: the input, in order.
            dialect: how a record becomes a prompt.
            index_path: of ``input.idx``, or None for none.
            done: records to be left out; only looked at. Indices of prompts that were given out may be
                added at any time.
            warn: told, in one line, what is wrong with the index, and of the first record that ends in an
                answer. May be called from any thread.
            on_mismatch: told once, from the scanning thread, that the input is not what this run began
                with (a ResumeMismatch) or cannot be read (another ConfigError).

        Raises:
            ConfigError: no file is given, or one cannot be read.
            ResumeMismatch: the sizes show that the input is not what this run began with.
        """
        self._files = tuple(files)
        self._index = InputIndex(files=self._files, path=index_path, resumed=len(done) > 0, warn=warn)
        self._on_mismatch = on_mismatch
        self._done = done
        self._total_fits = False
        self._fault: ConfigError | None = None
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._reader = _Reader(
            files=self._files, dialect=dialect, index=self._index, done=done, stop=self._stop, warn=warn
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="input-read")
        self._scanner: threading.Thread | None = None

    @property
    def total(self) -> int | None:
        """Records in the whole input, done ones and bad ones included; None until it is counted."""
        return self._index.total if self._check_total() else None

    def _check_total(self) -> bool:
        """Whether the run is within the input: whatever became of the index, it cannot have done more."""
        total = self._index.total
        if total is None or self._total_fits:
            return True
        self._total_fits = self._done.count_between(0, total) == len(self._done)
        if not self._total_fits:
            message = f"the input holds {total} records, and the run has gone further than that: restore the "
            self._fail(ResumeMismatch(message + "files, or start a new run in another folder"))
        return self._total_fits

    @property
    def mismatch(self) -> ResumeMismatch | None:
        """How the input differs from what this run began with; None as long as no difference is known."""
        return self._fault if isinstance(self._fault, ResumeMismatch) else None

    async def read(self, count: int) -> Chunk:
        """The next prompts that are not done, in input order: at most ``count``, perhaps fewer, perhaps none.

        Bad records count like prompts. A cancelled read loses its prompts: cancel it only at the run's end.

        Raises:
            ConfigError: the input cannot be read.
            ResumeMismatch: the input is not what this run began with.
        """
        assert count >= 1
        future = asyncio.get_running_loop().run_in_executor(self._worker, self._reader.read, count)
        if self._scanner is None:
            self._scanner = threading.Thread(target=self._scan, name="input-scan", daemon=False)
            self._scanner.start()
        try:
            chunk = await future
        except ConfigError as error:
            self._fail(error)
            raise
        self._raise_fault()
        return chunk

    async def verify_rest(self) -> None:
        """Wait until the whole input has been counted and verified, which from now on is done without rests.

        To be awaited before a run calls itself done. May be cancelled.

        Raises:
            ConfigError: the input cannot be read.
            ResumeMismatch: the input is not what this run began with.
        """
        self._hurry.set()
        await asyncio.get_running_loop().run_in_executor(self._worker, self._await_scan)
        self._raise_fault()

    def _raise_fault(self) -> None:
        """Raise what is known to be wrong; a total that has become known is held against the run first."""
        self._check_total()
        if self._fault is not None:
            raise self._fault

    def _await_scan(self) -> None:
        if self._scanner is not None:
            self._scanner.join()

    def close(self) -> None:
        """Stop both threads and close all files; takes a fraction of a second. May be repeated."""
        self._stop.set()
        self._worker.shutdown(wait=True, cancel_futures=True)
        if self._scanner is not None:
            self._scanner.join()
        self._reader.close()
        self._index.close()

    def _scan(self) -> None:
        """Count and verify the whole input, chunk by chunk, and leave the others their share in between."""
        handles = Handles(self._files)
        number = 0
        try:
            while not self._stop.is_set():
                began_s = time.perf_counter()
                if number < len(self._index):
                    worked = self._index.verify(number, handles)
                else:
                    worked = self._index.extend(number, handles, keep=False) is not None
                    if not worked and number >= len(self._index):
                        return
                number += 1
                if worked and not self._hurry.is_set():
                    self._stop.wait(max(_NAP_MIN_S, time.perf_counter() - began_s))
        except ConfigError as error:
            self._fail(error)
            if self._on_mismatch is not None:
                self._on_mismatch(error)
        finally:
            handles.close()

    def _fail(self, error: ConfigError) -> None:
        if self._fault is None:
            self._fault = error


@dataclass(slots=True, kw_only=True)
class _Batch:
    """What one read has found so far, and what it may still take.

    Attributes:
        left: prompts and bad records that fit.
        left_bytes: payload that fits.
    """

    left: int
    left_bytes: int = READ_BYTES_MAX
    prompts: list[Prompt] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)

    def fits(self, prompt: Prompt) -> bool:
        """Whether there is room for ``prompt``; the first one always has some."""
        return not self.prompts or len(prompt.payload) <= self.left_bytes

    def take(self, prompt: Prompt) -> None:
        """Add ``prompt``."""
        self.left -= 1
        self.left_bytes -= len(prompt.payload)
        self.prompts.append(prompt)

    def take_bad(self, line: BadLine) -> None:
        """Add a bad record."""
        self.left -= 1
        self.bad.append(line)

    def chunk(self, *, exhausted: bool) -> Chunk:
        """As the port wants it."""
        return Chunk(prompts=tuple(self.prompts), bad=tuple(self.bad), exhausted=exhausted)


class _Reader:
    """Where reading stands; belongs to the worker thread."""

    def __init__(
        self,
        *,
        files: Sequence[Path],
        dialect: Dialect,
        index: InputIndex,
        done: Bitmap,
        stop: threading.Event,
        warn: Callable[[str], None],
    ) -> None:
        self._files = files
        self._dialect = dialect
        self._index = index
        self._done = done
        self._stop = stop
        self._warn = warn
        self._has_warned = False
        self._handles = Handles(files)
        self._next_chunk = 0
        self._cut: Cut | None = None
        self._place = 0

    def read(self, count: int) -> Chunk:
        """What :meth:`FileSource.read` gives."""
        batch = _Batch(left=count)
        for _ in range(_CHUNKS_PER_READ):
            cut = self._cut or self._take_chunk()
            if cut is None:
                return batch.chunk(exhausted=not self._stop.is_set())
            self._cut = None if self._parse(cut, batch) else cut
            if self._cut is not None or not batch.left:
                break
        return batch.chunk(exhausted=False)

    def close(self) -> None:
        """Close the open file."""
        self._handles.close()

    def _parse(self, cut: Cut, batch: _Batch) -> bool:
        """Go on in ``cut`` as far as the batch has room; whether nothing is left of it."""
        first, done = cut.entry.first, self._done
        for place in range(self._place, len(cut.texts)):
            index = first + place
            if index in done:
                continue
            self._place = place
            if not batch.left or self._stop.is_set():
                return False
            if not index % _RECORDS_BETWEEN_YIELDS:
                # Parsing holds the interpreter, and the event loop should not have to wait for its share.
                time.sleep(0)
            try:
                prompt = self._prompt(cut, place)
            except RecordError as error:
                batch.take_bad(bad_line(self._files, cut, place, error))
                continue
            if not batch.fits(prompt):
                return False
            batch.take(prompt)
        self._place = 0
        return True

    def _prompt(self, cut: Cut, place: int) -> Prompt:
        """The record at ``place``; of the first one that ends in an answer a word is said."""
        index, text = cut.entry.first + place, text_at(cut, place)
        if self._has_warned:
            return self._dialect.prompt(index, text)
        converted = self._dialect.convert(index, text)
        if converted.ends_in_answer:
            self._has_warned = True
            where = f"{self._files[cut.entry.file]}:{cut.numbers[place]}"
            self._warn(f"{where} ends in an answer, {wording.GOES_ON} (said of the first such record only)")
        return converted.prompt

    def _take_chunk(self) -> Cut | None:
        """The next chunk that has something to do; None at the end of the input, or when told to stop."""
        index = self._index
        while not self._stop.is_set():
            number = self._next_chunk
            if number < len(index):
                entry = index.entry(number)
                if self._done.count_between(entry.first, entry.first + entry.records) < entry.records:
                    cut = index.read(number, self._handles)
                    self._next_chunk += 1
                    return cut
                self._next_chunk += 1
                continue
            fresh = index.extend(number, self._handles)
            if fresh is not None:
                self._next_chunk += 1
                return fresh
            if number >= len(index):
                return None
        return None


def bad_line(files: Sequence[Path], cut: Cut, place: int, error: RecordError) -> BadLine:
    """What is told of the record at ``place``."""
    reason, text = str(error), cut.texts[place]
    is_first = not (cut.entry.start or place)
    if isinstance(text, bytes) and (text.strip() == b"[" or (is_first and text.lstrip().startswith(b"["))):
        reason = f"{reason}; {IS_ARRAY}"
    elif isinstance(text, bytes) and is_first and text.strip() == b"{":
        reason = f"{reason}; {IS_SPREAD}"
    return BadLine(
        index=cut.entry.first + place,
        file=str(files[cut.entry.file]),
        line=cut.numbers[place],
        reason=reason,
    )


def text_at(cut: Cut, place: int) -> bytes:
    """The record's text.

    Raises:
        RecordError: there is none, such as of a line over the limit.
    """
    text = cut.texts[place]
    if isinstance(text, str):
        raise RecordError(text)
    return text
