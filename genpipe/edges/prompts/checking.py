"""Reading a whole input before any server is asked: what it holds, and what is wrong with it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from genpipe.core.errors import ConfigError
from genpipe.core.values import BadLine, CheckReport
from genpipe.edges.prompts.chunks import Cut
from genpipe.edges.prompts.dialects import Dialect, RecordError
from genpipe.edges.prompts.formats import Handles, check_readable
from genpipe.edges.prompts.source import bad_line, text_at


def check_files(files: Sequence[Path], dialect: Dialect, *, bad_lines_max: int = 1_000) -> CheckReport:
    """Read the whole input, as a run would, and say what it holds.

    Args:
        files: the input, in order.
        dialect: how a record becomes a prompt.
        bad_lines_max: how many bad lines are listed; all are counted.

    Raises:
        ConfigError: no file is given, or one cannot be read.
    """
    input_bytes = sum([check_readable(path).size_bytes for path in files])
    if not files:
        raise ConfigError("no input file is given: name one with --prompts or input.paths")
    records = line_count = bad_count = several_turns = answers = 0
    shapes: Counter[str] = Counter()
    hints: Counter[str] = Counter()
    bad_lines: list[BadLine] = []
    shortest: int | None = None
    longest: int | None = None
    for cut, new_lines in _cuts(files):
        entry = cut.entry
        records += entry.records
        line_count += new_lines
        for place in range(len(cut.texts)):
            try:
                prompt, shape, several, ends = dialect.convert(entry.first + place, text_at(cut, place))
            except RecordError as error:
                bad_count += 1
                if error.remedy is not None:
                    hints[error.remedy] += 1
                if len(bad_lines) < bad_lines_max:
                    bad_lines.append(bad_line(files, cut, place, error))
                continue
            shapes[shape] += 1
            several_turns += several
            answers += ends
            size = len(prompt.payload)
            shortest = size if shortest is None else min(shortest, size)
            longest = size if longest is None else max(longest, size)
    return CheckReport(
        records=records,
        blank_lines=line_count - records,
        input_bytes=input_bytes,
        shapes=dict(shapes),
        bad_count=bad_count,
        bad_lines=tuple(bad_lines),
        payload_bytes_min=shortest,
        payload_bytes_max=longest,
        several_turns=several_turns,
        ends_in_answer=answers,
        hints=tuple(hints.most_common()),
    )


def has_records(files: Sequence[Path]) -> bool:
    """Whether there is anything but blank lines; reads no further than the first chunk with a record.

    Raises:
        ConfigError: a file cannot be read.
    """
    for path in files:
        check_readable(path)
    return any(cut.entry.records for cut, _ in _cuts(files))


def _cuts(files: Sequence[Path]) -> Iterator[tuple[Cut, int]]:
    """The chunks of all files in order, each with how many physical lines it has."""
    handles = Handles(files)
    first = 0
    try:
        for file in range(len(files)):
            start = lines = 0
            while True:
                with handles.reading(file) as opened:
                    cut = opened.cut(file=file, first=first, lines_before=lines, start=start)
                if cut is None:
                    break
                yield cut, cut.entry.lines - lines
                first, lines, start = first + cut.entry.records, cut.entry.lines, cut.entry.end
    finally:
        handles.close()
