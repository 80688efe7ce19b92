"""Which form an input file has, told by its first bytes, and reading it in that form."""

import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Literal

from genpipe.core.errors import ConfigError
from genpipe.edges.prompts.chunks import InputFile, LineFile

if TYPE_CHECKING:
    from genpipe.edges.prompts.parquet_rows import ParquetRows

Form = Literal["plain", "gzip", "zstd", "Parquet"]
"""Lines of JSON, as they are or packed, or rows of Parquet."""

Demand = Literal["auto", "jsonl", "parquet"]

MAGIC: Final[dict[bytes, Form]] = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "Parquet"}
FOREIGN: Final = {b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"PK\x03\x04": "zip", b"PARE": "encrypted Parquet"}
"""What is told by name, and not read."""
WIDE: Final = {b"\xff\xfe\x00\x00": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
"""Byte order marks of text that is not UTF-8."""

_HEAD_BYTES = 8
_BUFFER_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """An input file from outside.

    Attributes:
        form: how it is to be read.
        size_bytes: its length on disk.
    """

    form: Form
    size_bytes: int


class Handles:
    """The input files as one thread reads them, one open at a time."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._number = -1
        self._open: InputFile | None = None

    @contextmanager
    def reading(self, number: int) -> Iterator[InputFile]:
        """File ``number``, wherever it was last read.

        Raises:
            ConfigError: it cannot be opened, is damaged, or reading it fails.
        """
        try:
            if self._open is None or self._number != number:
                self.close()
                path = self._files[number]
                self._open = open_input(path, _look(path).form)
                self._number = number
            yield self._open
        except OSError as error:
            raise unreadable(self._files[number], error) from error

    def close(self) -> None:
        """Close what is open; a later use opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None


def open_input(path: Path, form: Form) -> InputFile:
    """An input file, at its beginning.

    Raises:
        ConfigError: it is damaged, or pyarrow is missing.
        OSError: it cannot be opened.
    """
    if form == "plain":
        return LineFile(open(path, "rb", buffering=_BUFFER_BYTES))
    if form == "Parquet":
        return _open_parquet(path)
    return LineFile(_open_packed(path, form))


def length_of(path: Path, facts: FileFacts) -> int | None:
    """Where a file ends, counted as in :attr:`genpipe.edges.prompts.chunks.Entry.end`.

    None if only reading it can tell.

    Raises:
        ConfigError: it is damaged or cannot be read, or pyarrow is missing.
    """
    if facts.form == "plain":
        return facts.size_bytes
    if facts.form != "Parquet":
        return None
    try:
        with closing(_open_parquet(path)) as rows:
            return rows.count
    except OSError as error:
        raise unreadable(path, error) from error


def check_readable(path: Path, demand: Demand = "auto") -> FileFacts:
    """Look at an input file from outside, and at the first bytes of what is packed in it.

    Args:
        path: the file.
        demand: which form it is to have.

    Raises:
        ConfigError: it is not there, is no plain file, may not be read, or has another form.
    """
    facts = _look(path)
    if demand != "auto" and (facts.form == "Parquet") != (demand == "parquet"):
        is_what = "Parquet" if facts.form == "Parquet" else "no Parquet file"
        raise ConfigError(f"{path} is {is_what}, and input.format is {demand!r}: set it to 'auto'")
    if facts.form in ("gzip", "zstd"):
        _check_inside(path, facts.form)
    return facts


def _look(path: Path) -> FileFacts:
    """As :func:`check_readable`, whatever is packed in it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise _no_file(path, status.st_mode)
        with open(path, "rb", buffering=0) as handle:
            head = handle.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    return FileFacts(form=_form_of(path, head), size_bytes=status.st_size)


def unreadable(path: Path, error: OSError) -> ConfigError:
    """The ConfigError for an input file that the system will not give us."""
    return ConfigError(f"{path} cannot be read: {error.strerror or error}")


def _open_parquet(path: Path) -> "ParquetRows":
    try:
        from genpipe.edges.prompts.parquet_rows import ParquetRows
    except ImportError as error:
        if not (error.name or "").startswith("pyarrow"):
            raise
        raise ConfigError(
            "reading Parquet needs pyarrow, which is not installed: pip install 'genpipe-llm[parquet]'"
        ) from None
    return ParquetRows(path)


def _open_packed(path: Path, form: Form) -> BinaryIO:
    from genpipe.edges.prompts.packed import open_gzip, open_zstd

    return open_gzip(path) if form == "gzip" else open_zstd(path)


def _check_inside(path: Path, form: Form) -> None:
    """Refuse what is packed twice, or is no text; damage is told of where reading comes to it."""
    try:
        with closing(_open_packed(path, form)) as text:
            head = text.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error
    except ConfigError:
        return
    inside = _form_of(path, head)
    if inside != "plain":
        raise ConfigError(f"{path} is {inside} within {form}, which is not read: unpack it once")


def _form_of(path: Path, head: bytes) -> Form:
    for magic, form in MAGIC.items():
        if head.startswith(magic):
            return form
    if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:
        # A frame that is to be skipped: some packers begin with one.
        return "zstd"
    for magic, what in FOREIGN.items():
        if head.startswith(magic):
            raise ConfigError(f"{path} is {what}, which is not read: make it JSON Lines, plain, gzip or zstd")
    for mark, what in WIDE.items():
        if head.startswith(mark):
            raise ConfigError(
                f"{path} is {what}, which is not read: make it UTF-8, with iconv -f {what} -t UTF-8 FILE"
            )
    return "plain"


def _no_file(path: Path, mode: int) -> ConfigError:
    if stat.S_ISDIR(mode):
        return ConfigError(f"{path} is a directory: name its files, as in {str(path).rstrip('/')}/*.jsonl")
    if stat.S_ISFIFO(mode):
        return ConfigError(
            f"{path} is a pipe, which can be read only once: give it as standard input, with --prompts -"
        )
    return ConfigError(f"{path} is not a plain file: name the input files themselves")
