"""What came of an export, as its command tells it."""

from collections import Counter
from dataclasses import dataclass, field

from genpipe.core.wording import number


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was exported.

    Attributes:
        records: how many.
        rows: the rows that they became.
        left_out: records that were not wished for, by the reason.
        samples_left_out: samples that have no row, of records of which others have one, by the reason.
        total: prompts of the run as its last report has it, or None where that is not known.
        doubled: records that were left out because an earlier one is of the same prompt.
        is_whole: nothing was found that could be missing.
    """

    records: int
    rows: int
    total: int | None
    doubled: int
    is_whole: bool
    left_out: Counter[str] = field(default_factory=Counter)
    samples_left_out: Counter[str] = field(default_factory=Counter)

    def as_text(self) -> str:
        """In one line."""
        of = f" of {number(self.total)}" if self.total is not None and self.total >= self.records else ""
        parts = [f"{number(self.records)}{of} records exported"]
        if self.rows != self.records:
            parts[0] += f" as {number(self.rows)} rows"
        if self.doubled:
            parts.append(f"{self.doubled} doubled ones left out")
        parts += [f"{number(count)} left out ({why})" for why, count in sorted(self.left_out.items())]
        parts += [
            f"{number(count)} of their samples left out ({why})"
            for why, count in sorted(self.samples_left_out.items())
        ]
        return ", ".join(parts)
