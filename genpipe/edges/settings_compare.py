"""The settings of a run: their digest, and where two of them differ."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from genpipe.core.errors import ConfigError

_VALUE_CHARS_MAX = 120


def canonical(value: Mapping[str, Any], *, sort: bool = True) -> bytes:
    """As JSON without spaces; sorted, the same for the same settings.

    Raises:
        ConfigError: a value has no place in JSON.
    """
    try:
        return json.dumps(value, sort_keys=sort, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a setting has no place in JSON: {error}") from None


def digest_of(settings: Mapping[str, Any]) -> str:
    """The settings as 16 hex digits: the same for the same settings, whatever their order.

    Raises:
        ConfigError: a setting has no place in JSON.
    """
    return sha256(canonical(settings)).hexdigest()[:16]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What was changed, a line for each setting, by its dotted name.

    Raises:
        ConfigError: a setting has no place in JSON.
    """
    was = _flat(json.loads(canonical(before)))
    is_ = _flat(json.loads(canonical(now)))
    return [
        f"{key} was {_shown(was, key)}, is {_shown(is_, key)}"
        for key in sorted(was.keys() | is_.keys())
        if _shown(was, key, whole=True) != _shown(is_, key, whole=True)
    ]


def shortened(text: str) -> str:
    """A text cut to what a message has room for."""
    return text if len(text) <= _VALUE_CHARS_MAX else text[:_VALUE_CHARS_MAX] + "…"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """A tree of objects as dotted paths to its leaves; lists are leaves."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    leaves = {}
    for key, item in value.items():
        leaves.update(_flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return leaves


def _shown(leaves: Mapping[str, Any], key: str, *, whole: bool = False) -> str:
    if key not in leaves:
        return "not set"
    text = json.dumps(leaves[key], ensure_ascii=False, sort_keys=True)
    return text if whole else shortened(text)
