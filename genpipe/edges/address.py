"""Addresses of servers: what one may be, and the one form in which it is a server's name."""

import re
from urllib.parse import urlsplit

_PORTS_OF_SCHEMES = {"http": 80, "https": 443}


class HoldsSecretError(ValueError):
    """An address with a user or a password in it: it must not be shown."""


def base_address(url: str) -> str:
    """An address as a server's name: two that lead to the same server have the same one.

    The host is in lower case, the port that the scheme has anyway is left out, and so are ``/v1`` and slashes
    at the end. Other names of the same machine are not looked for.

    Raises:
        HoldsSecretError: it names a user.
        ValueError: it is no such address; the message says what one must be.
    """
    if "@" in url:
        # An address is a server's name in every file and log.
        raise HoldsSecretError("must hold no user and no password")
    if not (url.isprintable() and re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url)):
        raise ValueError("must be an address such as http://gpu1:30000")
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ValueError(f"must be an address such as http://gpu1:30000 ({_reason(error)})") from None
    if not parts.hostname or port == 0 or parts.netloc.endswith(":"):
        raise ValueError("must be an address such as http://gpu1:30000")
    host = (parts.netloc if port is None else parts.netloc.rpartition(":")[0]).lower()
    named = "" if port is None or port == _PORTS_OF_SCHEMES[parts.scheme] else f":{port}"
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{host}{named}{path}"


def each_port(url: str) -> list[str]:
    """The addresses that one with a range of ports means, such as ``http://gpu1:30000-30007``; else itself.

    Raises:
        ValueError: the range is none; the message says what is wrong with it.
    """
    match = re.fullmatch(r"([^@]*:)([0-9]{1,9})-([0-9]{1,9})(/.*)?", url)
    if match is None:
        return [url]
    head, first, last, tail = match.group(1), int(match.group(2)), int(match.group(3)), match.group(4) or ""
    if not 0 < first <= last < 65536:
        raise ValueError(f"{first}-{last} is no range of ports; write e.g. 30000-30007")
    return [f"{head}{port}{tail}" for port in range(first, last + 1)]


def _reason(error: ValueError) -> str:
    """Why something is no address."""
    if isinstance(error, UnicodeError):
        return "its host has a part that is empty, too long, or of odd characters"
    return str(error).lower()
