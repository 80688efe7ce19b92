"""Mistakes in the settings, in words: where, which key, what is wanted, and what was given."""

import difflib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails


class Origin:
    """Where each setting came from.

    Attributes:
        file: the config file, or what stands for it where there is none.
        keys: the keys that each option has set.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.keys: defaultdict[str, list[list[str]]] = defaultdict(list)

    def of(self, place: Sequence[str]) -> str:
        """The option that set what is at this place or within it, or the file."""
        for option, keys in self.keys.items():
            for key in keys:
                shared = min(len(key), len(place))
                if list(place[:shared]) == key[:shared]:
                    return option
        return self.file


def explain(error: ErrorDetails, data: dict[str, Any], origin: Origin, settings: type[BaseModel]) -> str:
    """One line for one mistake: where, which key, what is wanted, and what was given.

    Args:
        error: the mistake, as pydantic tells it.
        data: the settings that were checked.
        origin: where they came from.
        settings: what they were checked against.
    """
    place, kind = [str(part) for part in error["loc"]], error["type"]
    if kind == "misplaced":
        place += error["ctx"]["place"].split(".")
    where, key = origin.of(place), _shown_key(place, data)
    if kind == "extra_forbidden":
        known = _names(place[:-1], settings)
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{where}: unknown key {key}; {hint}"
    if place == ["servers"]:
        kind = "servers"
    wanted = _WANTED.get(kind) or error["msg"].removeprefix("Value error, ")
    for library, ours in _PHRASES.items():
        wanted = wanted.replace(library, ours)
    given = error.get("input")
    if kind in ("secret", "misplaced", "missing") or isinstance(given, BaseModel | None):
        return f"{where}: {key} {wanted}"
    if kind == "string_type" and isinstance(given, int | float):
        wanted += ', in quotes ("…")'
    shown = str(given).lower() if isinstance(given, bool) else repr(given)
    return f"{where}: {key} {wanted}, got {shown:.80}"


_WANTED = {
    "missing": "is missing",
    "servers": "must be sections of their own, [[servers]]",
    "tuple_type": 'must be a list, as in ["a", "b"]',
    "dict_type": "must be a section of its own",
    "model_type": "must be a section of its own",
    "string_type": "must be text",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "finite_number": "must be a finite number",
}

_PHRASES = {
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}


def _shown_key(place: list[str], data: dict[str, Any]) -> str:
    """The key as people find it; a server is named by its address, since port ranges shift the count."""
    if place[0] != "servers":
        return ".".join(place)
    if len(place) == 1:
        return "servers"
    entry = data["servers"][int(place[1])]
    rest = ".".join(["servers", *place[2:]])
    url = entry.get("url") if isinstance(entry, dict) else None
    return f"{rest} of {url}" if isinstance(url, str) and place[2:] != ["url"] and "@" not in url else rest


def _names(place: Sequence[str], settings: type[BaseModel]) -> list[str]:
    """The keys known at a place of the settings."""
    model = settings
    for part in place:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel))
    return list(model.model_fields)
