"""What an export holds, in Markdown, for people: the data card beside it."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from genpipe import __version__
from genpipe.core.wording import number, percent
from genpipe.edges.export.wish import Wish

_BAR_CHARS = 30
_NAMES_MAX = 1000
"""So many different models, reasons or flags are told apart."""

_OTHERS = "others"


@dataclass(slots=True)
class Facts:
    """What is counted of the records of an export, as they are written.

    Attributes:
        records: records with a row.
        rows: their rows.
        left_out: records that are not wished for, by the reason.
        samples_left_out: samples that have no row, of records of which others have one, by the reason.
        unread: records that could not be parsed, or not be put into the form that is wished for.
        tokens: records by their output tokens.
        usage_unknown: records whose output tokens are not known.
        flags: records by flag.
        finish_reasons: records by finish reason.
        models: records by the model's name, as its servers gave it.
        other_settings: records by the digest of their settings, where these are not those of ``run.json``.
    """

    records: int = 0
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    samples_left_out: Counter[str] = field(default_factory=Counter)
    unread: int = 0
    tokens: Counter[int] = field(default_factory=Counter)
    usage_unknown: int = 0
    flags: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    other_settings: Counter[str] = field(default_factory=Counter)

    def take(self, record: dict[str, Any], rows: int) -> None:
        """Count one record that has so many rows."""
        self.records += 1
        self.rows += rows
        tokens = output_tokens(record)
        if tokens is None:
            self.usage_unknown += 1
        else:
            self.tokens[tokens] += 1
        for flag in record.get("flags") or ():
            _count(self.flags, flag)
        _count(self.finish_reasons, record.get("finish_reason"))
        _count(self.models, record.get("model"))
        if "settings" in record:
            _count(self.other_settings, record["settings"])


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a card says beside the sums.

    Attributes:
        name: of the file that it is about.
        now_text: when it was made (ISO 8601, UTC).
        run: what ``run.json`` says.
        wish: what was wished for.
        total: prompts of the run, or None where that is not known.
        doubled: records that were left out since an earlier one is of the same prompt.
        warnings: how often was warned that records may be missing.
    """

    name: str
    now_text: str
    run: dict[str, Any]
    wish: Wish
    total: int | None
    doubled: int
    warnings: int


def output_tokens(record: dict[str, Any]) -> int | None:
    """Tokens of a record's answer, or answers, as they were counted when it was written."""
    tokens = record.get("output_tokens")
    if "output_tokens" not in record:
        usage = record.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0 else None


def card(about: About, facts: Facts) -> str:
    """The card, with a line feed at its end."""
    sections = [
        f"# {_inline(about.name)}",
        _in_short(about, facts),
        _table(("", ""), _origin(about)),
        "## Records",
        _table(("what", "records"), _counts(about, facts)),
        "## Settings",
        _settings(about, facts),
        "## Output tokens of a record",
        *_lengths(facts),
        "## Flags",
        _shares("flag", facts.flags, facts.records) if facts.flags else "No record has a flag.",
        "## Finish reasons",
        _shares("reason", facts.finish_reasons, facts.records),
        "## Models, as the servers named them",
        _shares("model", facts.models, facts.records),
    ]
    return "\n\n".join(sections) + "\n"


def _in_short(about: About, facts: Facts) -> str:
    what = (
        "records as they are" if about.wish.format == "raw" else f"rows of the format `{about.wish.format}`"
    )
    text = (
        f"{number(facts.rows)} {what}, of {number(facts.records)} prompts, in the order of the input, "
        "each prompt once."
    )
    if about.wish.format != "raw":
        text += {
            "field": " Reasoning stands in `reasoning_content`.",
            "think": " Reasoning stands in the text, between `<think>` and `</think>`.",
            "drop": " Reasoning was left out.",
        }[about.wish.reasoning]
    if about.wish.token_ids:
        text += " `loss_mask` is 1 over the token ids that the model wrote."
    if about.warnings:
        text += " **Some records may be missing**: shards of the run were damaged or out of reach."
    return text


def _origin(about: About) -> list[tuple[str, str]]:
    run = about.run
    inputs = [PurePath(str(given.get("path"))).name for given in run["inputs"] if isinstance(given, dict)]
    return [
        ("made", f"{about.now_text} by genpipe {__version__}"),
        ("run", f"{run['run_id']}, begun {run['created_at']} with genpipe {run.get('genpipe', '?')}"),
        ("input", ", ".join(inputs[:20]) + (f" and {len(inputs) - 20} more" if len(inputs) > 20 else "")),
    ]


def _counts(about: About, facts: Facts) -> list[tuple[str, str]]:
    rows = [("exported", number(facts.records))]
    rows += [(f"left out: {why}", number(count)) for why, count in sorted(facts.left_out.items())]
    rows += [
        (f"samples of exported records, left out: {why}", number(count))
        for why, count in sorted(facts.samples_left_out.items())
    ]
    if facts.unread:
        rows.append(("not readable", number(facts.unread)))
    if about.doubled:
        rows.append(("doubled, left out", number(about.doubled)))
    found = facts.records + facts.left_out.total() + facts.unread
    if about.total is not None and about.total >= found:
        rows.append(("prompts without a record", number(about.total - found)))
        rows.append(("prompts of the run", number(about.total)))
    return rows


def _settings(about: About, facts: Facts) -> str:
    text = json.dumps(about.run["settings"], indent=2, ensure_ascii=False)
    longest = max((len(run) for run in _runs_of(text, "`")), default=0)
    fence = "`" * max(3, longest + 1)
    block = f"{fence}json\n{text}\n{fence}"
    if facts.other_settings:
        others = ", ".join(
            f"{number(count)} with {_inline(mark)}" for mark, count in sorted(facts.other_settings.items())
        )
        block += (
            f"\n\n{number(facts.other_settings.total())} records were made with other settings, which "
            f"`--allow-changed` let in (by their digest: {others})."
        )
    return block


def _lengths(facts: Facts) -> Iterable[str]:
    count = facts.tokens.total()
    if not count:
        return ["Not known of any record."]
    in_order = sorted(facts.tokens)
    whole = sum(length * records for length, records in facts.tokens.items())
    rows = [
        ("min", number(in_order[0])),
        ("median", number(_quantile(facts.tokens, in_order, 0.5))),
        ("mean", number(whole / count)),
        ("p90", number(_quantile(facts.tokens, in_order, 0.9))),
        ("max", number(in_order[-1])),
        ("all together", number(whole)),
    ]
    if facts.usage_unknown:
        rows.append(("not known", f"{number(facts.usage_unknown)} records"))
    return [_table(("", "tokens"), rows), _histogram(facts.tokens)]


def _quantile(counts: Counter[int], in_order: list[int], share: float) -> int:
    """The least value that ``share`` of all values do not pass."""
    wanted, seen = share * counts.total(), 0
    for value in in_order:
        seen += counts[value]
        if seen >= wanted:
            break
    return value


def _histogram(counts: Counter[int]) -> str:
    """Records by the octave of their length, as text."""
    octaves: Counter[int] = Counter()
    for value, records in counts.items():
        octaves[value.bit_length()] += records
    most = max(octaves.values())
    lines = []
    for octave in range(min(octaves), max(octaves) + 1):
        records = octaves[octave]
        first, last = (1 << octave >> 1), (1 << octave) - 1
        name = f"{first:,} to {last:,}" if last > first else f"{first:,}"
        bar = "#" * -(-records * _BAR_CHARS // most)
        lines.append(f"{name:>20}  {bar:<{_BAR_CHARS}}  {number(records)}")
    return "\n".join(("```text", *lines, "```"))


def _shares(what: str, counts: Counter[str], records: int) -> str:
    rows = [
        (_inline(name), f"{number(count)} ({percent(count / records)})")
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return _table((what, "records"), rows)


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {_cell(left)} | {_cell(right)} |" for left, right in lines)


def _cell(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text).replace("|", "\\|")


def _inline(name: str) -> str:
    """A name that others chose, so that nothing in it is Markdown."""
    shown = "".join(char if char.isprintable() else " " for char in name)
    ticks = "`" * (1 + max((len(run) for run in _runs_of(shown, "`")), default=0))
    blank = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{ticks}{blank}{shown}{blank}{ticks}"


def _runs_of(text: str, char: str) -> list[str]:
    return [run for run in "".join(c if c == char else " " for c in text).split() if run]


def _count(counts: Counter[str], name: object) -> None:
    text = name if isinstance(name, str) else "none" if name is None else str(name)
    counts[text if text in counts or len(counts) < _NAMES_MAX else _OTHERS] += 1
