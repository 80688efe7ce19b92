"""Rows as Parquet, in row groups of a bounded size; needs pyarrow."""

import contextlib
from collections.abc import Iterable
from typing import Any, BinaryIO

from genpipe.core.errors import ConfigError
from genpipe.edges.export.columns import Columns

GROUP_ROWS, GROUP_BYTES = 20_000, 64 << 20
"""A row group is full with so many rows, or bytes of columns."""

BATCH_ROWS, BATCH_BYTES = 1_000, 4 << 20
"""So much is held as Python objects, which are some times as large, before it becomes columns."""


def demand_pyarrow() -> None:
    """Make sure that Parquet can be written.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow: pip install 'genpipe-llm[parquet]', or name a file that ends in .jsonl"
        ) from None


class ParquetRows:
    """A Parquet file; what its columns are is known before the first row."""

    def __init__(self, stream: BinaryIO, columns: Columns) -> None:
        """Begin the file.

        Args:
            stream: where it is written.
            columns: has seen every row that will come.
        """
        import pyarrow.parquet

        self._schema, self._converts = columns.found()
        self._writer = pyarrow.parquet.ParquetWriter(stream, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._rows_bytes = 0
        self._batches: list[Any] = []
        self._batches_rows = 0
        self._batches_bytes = 0

    def put(self, rows: Iterable[dict[str, Any] | bytes], size_bytes: int) -> None:
        """See :class:`genpipe.edges.export.packing.Sink`."""
        for row in rows:
            assert isinstance(row, dict)
            self._rows.append(row)
            # A row of several has all of the prompt, too.
            self._rows_bytes += size_bytes
            if len(self._rows) >= BATCH_ROWS or self._rows_bytes >= BATCH_BYTES:
                self._end_batch()

    def close(self) -> None:
        """See :class:`genpipe.edges.export.packing.Sink`."""
        self._end_batch()
        self._end_group()
        self._writer.close()

    def abandon(self) -> None:
        """See :class:`genpipe.edges.export.packing.Sink`."""
        with contextlib.suppress(Exception):
            self._writer.close()
        # One that could not be closed would try it again, and complain, when it is collected.
        self._writer.is_open = False

    def _end_batch(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        arrays = []
        for field in self._schema:
            convert = self._converts[field.name]
            arrays.append(pa.array([convert(row.get(field.name)) for row in self._rows], type=field.type))
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._batches.append(batch)
        self._batches_rows += batch.num_rows
        self._batches_bytes += batch.nbytes
        self._rows.clear()
        self._rows_bytes = 0
        if self._batches_rows >= GROUP_ROWS or self._batches_bytes >= GROUP_BYTES:
            self._end_group()

    def _end_group(self) -> None:
        import pyarrow as pa

        if not self._batches:
            return
        table = pa.Table.from_batches(self._batches, schema=self._schema)
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._batches.clear()
        self._batches_rows = self._batches_bytes = 0
