"""What becomes of each record of an export: which rows, and what is counted."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from genpipe.core.errors import ConfigError
from genpipe.core.quality import flags_of
from genpipe.core.wording import number
from genpipe.edges import lines, strict_json
from genpipe.edges.export.columns import Columns
from genpipe.edges.export.data_card import Facts
from genpipe.edges.export.rows import Maker, Row
from genpipe.edges.export.wish import WITHOUT_IDS, Wish

_OF_ONE = frozenset({"empty", "looping", "unclosed_think"})
"""Flags that are found in the text of one sample; the others are known of a record only."""

_IDS = b'"token_ids":'
_UNFIT = (AttributeError, LookupError, TypeError, ValueError)
"""What a record raises that cannot be parsed, or not be put into the form that is wished for."""


class _Choice(NamedTuple):
    """What of a record is wished for.

    Attributes:
        left_out: why nothing is, in a few words.
        samples: which samples are; None where they were not judged one by one.
        samples_left_out: those that are not, by the reason.
    """

    left_out: str
    samples: list[int] | None
    samples_left_out: Counter[str]


_NONE: Counter[str] = Counter()


class Making:
    """One export's rows.

    Attributes:
        run: what ``run.json`` says.
        wish: what is wished for.
        columns: the types of the columns, as far as lines were shown to :meth:`look`.
        facts: the sums, as far as rows were made.
        lost: records that should have rows and have none, since they cannot be parsed, or not be put into
            the form that is wished for.
        warnings: how often was warned.
    """

    def __init__(
        self,
        run: dict[str, Any],
        wish: Wish,
        *,
        as_columns: bool,
        with_card: bool,
        warn: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            run: what ``run.json`` says.
            wish: what is wished for.
            as_columns: rows are for columns with types, not for lines.
            with_card: the sums are wanted, so that records are parsed even where they go out as they are.
            warn: told, in one line each, what may be missing.

        Raises:
            ConfigError: the run has not what is wished for.
        """
        wish.check_against(run)
        self.run = run
        self.wish = wish
        self.columns = Columns()
        self.facts = Facts()
        self.lost = 0
        self.warnings = 0
        self._maker = Maker(wish, run, as_columns=as_columns)
        self._as_columns = as_columns
        self._doubts_ids = wish.doubts_ids(run)
        self._has_ids = False
        self._judges_samples = wish.format != "raw" and not wish.takes_all
        self._copies = wish.format == "raw" and not as_columns
        self._parses = with_card or not (self._copies and wish.takes_all)
        self._first_lost: int | None = None
        self._warn = warn

    def warn(self, text: str) -> None:
        """Warn that something may be missing."""
        self.warnings += 1
        self._warn(text)

    @property
    def looks(self) -> bool:
        """Lines have to be shown to :meth:`look` before rows are made."""
        return self._as_columns or self._doubts_ids

    def look(self, line: bytes) -> None:
        """See what columns a record's rows need, and whether there are token ids if that is in doubt."""
        if self._doubts_ids and not self._has_ids:
            self._has_ids = _IDS in line
        if not self._as_columns:
            return
        try:
            record = strict_json.loads(line)
            choice = self._choose(record)
            if not choice.left_out:
                for row in self._maker.rows(record, line, choice.samples):
                    self.columns.see(row)
        except _UNFIT:
            # Told when its turn comes.
            return

    def check_gathered(self) -> None:
        """Find out, once all lines were shown to :meth:`look`, what cannot be.

        Raises:
            ConfigError: token ids are wished for, and there are none.
        """
        if self._doubts_ids:
            told = "this run did not begin with request.token_ids=true"
            if not self._has_ids:
                raise ConfigError(
                    f"--token-ids: {told}, and has no token ids: set it for a new run, or drop --token-ids"
                )
            self._warn(f"{told}: records from before it was set are left out")

    def rows(self, line: bytes) -> Sequence[Row | bytes]:
        """The rows of a record, or the record as it is where lines are copied.

        Raises:
            ConfigError: it cannot be put into the form that is wished for.
        """
        if not self._parses:
            self.facts.records += 1
            self.facts.rows += 1
            return (line,)
        try:
            record = strict_json.loads(line)
            choice = self._choose(record)
            left_out = choice.left_out
            rows: Sequence[Row | bytes] = ()
            if not left_out:
                rows = (line,) if self._copies else self._maker.rows(record, line, choice.samples)
                left_out = "" if rows else WITHOUT_IDS
        except _UNFIT:
            return self._unreadable(line)
        if left_out:
            self.facts.left_out[left_out] += 1
        else:
            self._count(record, choice, len(rows))
        return rows

    def tell_unread(self) -> None:
        """Warn of records that could not be parsed, once, where there are some."""
        if self.lost:
            self.warn(
                f"{number(self.lost)} records cannot be parsed or put into this form (the first is prompt "
                f"{self._first_lost}'s) and were left out: --format raw to a file of lines has them as they "
                "are"
            )

    def _choose(self, record: dict[str, Any]) -> _Choice:
        """What of a record is wished for; of several samples each is judged where each has a row."""
        if not self._judges_samples or "response" in record:
            return _Choice(self.wish.left_out(record.get("flags") or ()), None, _NONE)
        whys = [self.wish.left_out(_flags_among(record, [part])) for part in record["responses"]]
        samples = [sample for sample, why in enumerate(whys) if not why]
        found = Counter(filter(None, whys))
        return _Choice("" if samples else " or ".join(sorted(found)), samples, found)

    def _count(self, record: dict[str, Any], choice: _Choice, rows: int) -> None:
        """Count a record that has so many rows."""
        if self.wish.format != "raw" and "response" not in record:
            parts = record["responses"]
            wished = len(parts) - choice.samples_left_out.total()
            self.facts.samples_left_out += choice.samples_left_out
            if wished > rows:
                self.facts.samples_left_out[WITHOUT_IDS] += wished - rows
            if choice.samples_left_out and choice.samples is not None:
                record["flags"] = _flags_among(record, [parts[sample] for sample in choice.samples])
        self.facts.take(record, rows)

    def _unreadable(self, line: bytes) -> Sequence[bytes]:
        self.facts.unread += 1
        if self._copies and self.wish.takes_all:
            self.facts.records += 1
            self.facts.rows += 1
            return (line,)
        if not self.lost:
            self._first_lost = lines.index_of(line)
        self.lost += 1
        return ()


def _flags_among(record: dict[str, Any], parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The flags that a record has, or would have, with these of its samples only."""
    flags = [flag for flag in record.get("flags") or () if flag not in _OF_ONE]
    return flags + [flag for flag in flags_of(record.get("finish_reason"), parts) if flag in _OF_ONE]
