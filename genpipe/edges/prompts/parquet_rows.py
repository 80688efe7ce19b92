"""Rows of Parquet files as records: one JSON object a row, a row group at a time, never a file at once.

How values look (JSON has fewer types than Parquet): whole numbers and decimals keep their digits, NaN and
Infinity become null, instants are ISO 8601 (those of a time zone in UTC, ``+00:00``), durations are seconds,
maps with text keys are objects, and bytes are their UTF-8 text, or ``{"base64": …}`` where they are none; so
are texts that are no UTF-8. Maps with other keys, and structs that have a name twice, are lists of pairs.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import parquet

from genpipe.core.errors import ConfigError
from genpipe.edges.prompts.chunks import CHUNK_BYTES_MAX, CHUNK_RECORDS_MAX, Cut, Entry, digest_of_texts
from genpipe.edges.prompts.parquet_json import texts_of

_SLICE_ROWS: Final = 128
"""Made into JSON at once; in between, other threads have their turn."""

_BUFFER_BYTES: Final = 64 << 10
"""Read of a column at once, so that a row group of gigabytes is not held."""


class ParquetRows:
    """The rows of a Parquet file; a :class:`genpipe.edges.prompts.chunks.InputFile` whose places are rows.

    A chunk that is cut anew lies within one row group. Chunks in a row are read without going back; another
    place costs the row group that it is in.

    Attributes:
        count: rows in the file.
    """

    def __init__(self, path: Path) -> None:
        """Open it, and read what stands at its end.

        Raises:
            ConfigError: it is damaged, or has two columns of one name.
            OSError: it cannot be read.
        """
        self._path = path
        with self._reading():
            self._file = parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            names = self._file.schema_arrow.names
            if twice := [name for place, name in enumerate(names) if name in names[:place]]:
                raise ConfigError(f"{path} has several columns named {twice[0]!r}: rename all but one")
            metadata = self._file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            self._sizes = [group.total_byte_size for group in groups]
            self._ends = list(accumulate(group.num_rows for group in groups))
        self.count = self._ends[-1] if self._ends else 0
        # The next row that is given; those that stand ready from it on; what is decoded behind them.
        self._at = 0
        self._ready: deque[bytes | str] = deque()
        self._batch: pa.RecordBatch | None = None
        self._batches: Iterator[pa.RecordBatch] | None = None

    def cut(
        self,
        *,
        file: int,
        first: int,
        lines_before: int,
        start: int,
        end: int | None = None,
        keep: bool = True,
    ) -> Cut | None:
        """See :class:`genpipe.edges.prompts.chunks.InputFile`."""
        if start >= self.count:
            return None
        if is_new := end is None:
            group_end = self._ends[bisect_right(self._ends, start)]
            limit = min(group_end, start + CHUNK_RECORDS_MAX)
        else:
            limit = min(end, self.count)
        texts: list[bytes | str] = []
        left_bytes = CHUNK_BYTES_MAX
        with self._reading():
            self._go_to(start)
            while self._at < limit and (left_bytes > 0 or not is_new):
                text = self._take()
                texts.append(text)
                left_bytes -= len(text)
        entry = Entry(
            file=file,
            first=first,
            records=len(texts),
            lines=lines_before + len(texts),
            start=start,
            end=self._at,
            digest=digest_of_texts(texts),
        )
        if not keep:
            return Cut(entry=entry)
        return Cut(entry=entry, texts=texts, numbers=list(range(start + 1, self._at + 1)))

    def digest(self, start: int, end: int) -> int | None:
        """See :class:`genpipe.edges.prompts.chunks.InputFile`."""
        cut = self.cut(file=0, first=0, lines_before=0, start=start, end=end, keep=False)
        return cut.entry.digest if cut is not None and cut.entry.end == end else None

    def goes_on(self, end: int) -> bool:
        """See :class:`genpipe.edges.prompts.chunks.InputFile`."""
        return end < self.count

    def close(self) -> None:
        """See :class:`genpipe.edges.prompts.chunks.InputFile`."""
        self._batches = self._batch = None
        self._file.close()

    def _go_to(self, row: int) -> None:
        """Let ``row`` be the next one; rows in between are not looked at."""
        group = bisect_right(self._ends, row)
        if self._batches is None or row < self._at or group != bisect_right(self._ends, self._at):
            self._at = self._ends[group - 1] if group else 0
            self._ready.clear()
            self._batch = None
            self._batches = self._decoded(group)
        while self._at < row:
            missing = row - self._at
            if self._ready:
                self._ready.popleft()
                self._at += 1
                continue
            batch = self._batch or self._decode()
            passed = min(missing, batch.num_rows)
            self._at += passed
            self._batch = batch.slice(passed) if passed < batch.num_rows else None

    def _take(self) -> bytes | str:
        """The next row as JSON, or why there is none."""
        if not self._ready:
            batch = self._batch or self._decode()
            self._batch = batch.slice(_SLICE_ROWS) if batch.num_rows > _SLICE_ROWS else None
            self._ready.extend(texts_of(batch.slice(0, _SLICE_ROWS)))
            # Making JSON holds the interpreter, and the event loop should not have to wait for its share.
            time.sleep(0)
        self._at += 1
        return self._ready.popleft()

    def _decode(self) -> pa.RecordBatch:
        assert self._batches is not None
        for batch in self._batches:
            if batch.num_rows:
                return batch
        raise ConfigError(f"{self._path} is damaged: it has fewer rows than the {self.count} it speaks of")

    def _decoded(self, group: int) -> Iterator[pa.RecordBatch]:
        """The rows from a row group on, some at a time."""
        begin = self._ends[group - 1] if group else 0
        for number, (end, size_bytes) in enumerate(zip(self._ends, self._sizes, strict=True)):
            if number < group or begin == end:
                continue
            rows = CHUNK_BYTES_MAX * (end - begin) // max(1, size_bytes)
            yield from self._file.iter_batches(
                batch_size=max(1, min(CHUNK_RECORDS_MAX, rows)), row_groups=[number], use_threads=False
            )
            begin = end

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn what the library raises into one line."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            what = " ".join(str(error).split())
            raise ConfigError(f"{self._path} cannot be read as Parquet: {what[:200]}") from error
