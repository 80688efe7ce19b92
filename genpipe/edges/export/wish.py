"""What is wished of an export: which records, in which form."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, get_args

from genpipe.core.errors import ConfigError
from genpipe.core.quality import FLAGS
from genpipe.core.values import ApiName

FORMATS: Final = ("raw", "openai", "sharegpt", "prompt")
REASONINGS: Final = ("field", "think", "drop")
WITHOUT_IDS = "no token ids"
"""Why records are left out that an export with token ids has no use for."""

_OF_MESSAGES = ("openai", "sharegpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Which records are exported, and in which form.

    Attributes:
        format: ``raw`` (records as they are), ``openai`` (``messages``), ``sharegpt`` (``conversations``) or
            ``prompt`` (``prompt`` and ``completion``).
        only: records without any of these flags are left out, where there are any here. Where each sample of
            a record has a row, each is judged for itself; likewise with ``without``.
        without: records with one of these flags are left out.
        reasoning: what becomes of the thoughts before an answer: a ``field`` of their own, ``think`` for
            marks in the text, or ``drop``.
        token_ids: rows carry ``input_ids`` and ``loss_mask``; records whose token ids are not known are
            left out.
    """

    format: str = "raw"
    only: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    reasoning: str = "field"
    token_ids: bool = False

    @property
    def takes_all(self) -> bool:
        """No record is left out for its flags."""
        return not self.only and not self.without

    def left_out(self, flags: Iterable[str]) -> str:
        """Why a record, or sample, of these flags is not wished for, in a few words; nothing where it is."""
        if self.only and self.only.isdisjoint(flags):
            return f"not flagged {' or '.join(sorted(self.only))}"
        for flag in sorted(self.without.intersection(flags)):
            return f"flagged {flag}"
        return ""

    def doubts_ids(self, run: dict[str, Any]) -> bool:
        """Token ids are wished for of a run that did not ask for them when it began.

        With ``--allow-changed`` it may have gone on with them.

        Args:
            run: what ``run.json`` says.
        """
        return self.token_ids and run["settings"].get("request", {}).get("token_ids") is not True

    def check_against(self, run: dict[str, Any]) -> None:
        """Find out early what cannot be: messages of a run whose prompts were texts.

        Args:
            run: what ``run.json`` says.

        Raises:
            ConfigError: it cannot be.
        """
        api = run["settings"].get("request", {}).get("api", "chat")
        if self.format in _OF_MESSAGES and api in get_args(ApiName) and api != "chat":
            raise ConfigError(
                f"--format {self.format} is made of messages, and this run asked {api}: use --format prompt"
            )


def wish(
    *,
    format_name: str = "raw",
    only: Iterable[str] = (),
    without: Iterable[str] = (),
    reasoning: str | None = None,
    token_ids: bool = False,
) -> Wish:
    """What the options of the command mean.

    Args:
        format_name: see :class:`Wish`.
        only: flags; several may stand in one text, between commas.
        without: likewise.
        reasoning: see :class:`Wish`; None is the default.
        token_ids: see :class:`Wish`.

    Raises:
        ConfigError: an option says nothing that is known, or does not go with another.
    """
    _demand_known("--format", format_name, FORMATS)
    if format_name == "raw":
        if reasoning is not None:
            raise ConfigError("--reasoning is for other formats than raw, which keeps records as they are")
        if token_ids:
            raise ConfigError("--token-ids is for other formats than raw, which has `token_ids` as it is")
    if reasoning is not None:
        _demand_known("--reasoning", reasoning, REASONINGS)
    chosen, shunned = _flags("--only", only), _flags("--without", without)
    if both := sorted(chosen & shunned):
        raise ConfigError(f"--only and --without both name {both[0]}: keep one of them")
    return Wish(
        format=format_name,
        only=chosen,
        without=shunned,
        reasoning=reasoning or REASONINGS[0],
        token_ids=token_ids,
    )


def _flags(option: str, texts: Iterable[str]) -> frozenset[str]:
    found = set()
    for text in texts:
        for name in map(str.strip, text.split(",")):
            if not name:
                raise ConfigError(f"{option} {text!r}: a flag is missing; write one of {', '.join(FLAGS)}")
            _demand_known(option, name, FLAGS)
            found.add(name)
    return frozenset(found)


def _demand_known(option: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"{option} {name or repr(name)}: unknown; write one of {', '.join(known)}")
