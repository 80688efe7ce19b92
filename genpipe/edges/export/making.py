"""What becomes of each record of an export: which rows, and what is counted."""

from collections.abc import Callable, Sequence
from typing import Any

from genpipe.core.wording import number
from genpipe.edges import lines, strict_json
from genpipe.edges.export.columns import Columns
from genpipe.edges.export.data_card import Facts
from genpipe.edges.export.rows import Maker, Row
from genpipe.edges.export.wish import WITHOUT_IDS, Wish


class Making:
    """One export's rows.

    Attributes:
        run: what ``run.json`` says.
        wish: what is wished for.
        columns: the types of the columns, as far as lines were shown to :meth:`look`.
        facts: the sums, as far as rows were made.
        lost: records that should have rows and have none, since they cannot be parsed.
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
        self._copies = wish.format == "raw" and not as_columns
        self._parses = with_card or not (self._copies and wish.takes_all)
        self._first_lost: int | None = None
        self._warn = warn

    def warn(self, text: str) -> None:
        """Warn that something may be missing."""
        self.warnings += 1
        self._warn(text)

    def look(self, line: bytes) -> None:
        """See what columns the rows of a record need."""
        try:
            record = strict_json.loads(line)
            if not self.wish.left_out(record.get("flags") or ()):
                for row in self._maker.rows(record, line):
                    self.columns.see(row)
        except ValueError:
            # Told when its turn comes.
            return

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
            left_out = self.wish.left_out(record.get("flags") or ())
            rows: Sequence[Row | bytes] = ()
            if not left_out:
                rows = (line,) if self._copies else self._maker.rows(record, line)
                left_out = "" if rows else WITHOUT_IDS
        except ValueError:
            return self._unreadable(line)
        if left_out:
            self.facts.left_out[left_out] += 1
        else:
            self.facts.take(record, len(rows))
        return rows

    def tell_unread(self) -> None:
        """Warn of records that could not be parsed, once, where there are some."""
        if self.lost:
            self.warn(
                f"{number(self.lost)} records cannot be parsed (the first is prompt {self._first_lost}'s) "
                "and were left out: --format raw to a file of lines has them as they are"
            )

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
