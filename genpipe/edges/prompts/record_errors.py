"""Why an input record cannot become a prompt, and how such reasons call what they found."""

from typing import Any

_KIND = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


class RecordError(ValueError):
    """An input record that cannot become a prompt; the message is one line and says why.

    Attributes:
        remedy: the setting with which records like this one can be read, where there is one.
    """

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


def kind_of(value: object) -> str:
    """What JSON calls the type of ``value``."""
    return _KIND.get(type(value), "a number")


def keys_of(record: dict[str, Any]) -> str:
    """The keys of ``record``, as far as one line has room."""
    names = [short(name) for name in list(record)[:8]]
    if len(record) > len(names):
        names.append(f"{len(record) - len(names)} more")
    return ", ".join(names) or "no keys"


def short(value: object) -> str:
    """``value`` in one line of at most 40 characters."""
    text = repr(value[:40]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
