"""What servers reply: the bytes of a 200, and who is to blame for everything else."""

import errno
import os
import re
import ssl
from typing import Any

import aiohttp
from aiohttp.http_exceptions import ContentLengthError, TransferEncodingError

from genpipe.core.errors import AttemptError, FaultKind, PromptFault, ServerFault
from genpipe.edges import strict_json

CONNECT_TIMEOUT_S = 10.0
"""A server that does not take a connection within this time is away (seconds)."""

REPLY_BYTES_MAX = 256 << 20
"""A longer reply is none (bytes)."""

SIDE_BYTES_MAX = 16 << 20
"""What is read of a reply that is no answer (bytes): of an error, in which servers echo whole prompts."""

RID_HEAD_CHARS = 16
"""The part of a request's id that all requests of a process share (count)."""

BUSY = {429, 503}
_MISROUTED = {401, 402, 403, 404, 405, 407}
_RETRIED = {408, 425}


async def read_answer(response: aiohttp.ClientResponse, wire_s: float | None) -> bytes:
    """The whole body of a 200."""
    length = response.content_length
    if length is not None and length <= REPLY_BYTES_MAX and "Content-Encoding" not in response.headers:
        return await response.read()
    if length is None or length <= REPLY_BYTES_MAX:
        data = await beginning(response, REPLY_BYTES_MAX + 1)
        if len(data) <= REPLY_BYTES_MAX:
            return data
    message = f"200 with a body of more than {REPLY_BYTES_MAX} bytes"
    raise ServerFault(message, kind=FaultKind.BROKEN, status=200, wire_s=wire_s)


async def beginning(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The body of a reply, or as much of it as is wanted (bytes)."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) >= bytes_max:
            break
    return bytes(data[:bytes_max])


async def refusal(response: aiohttp.ClientResponse, wire_s: float | None) -> AttemptError:
    """What a status other than 200 means."""
    status = response.status
    try:
        text = await beginning(response, SIDE_BYTES_MAX)
    except aiohttp.ClientPayloadError:
        # The status has come, and says enough.
        text = b""
    try:
        message = message_of(strict_json.loads(text))
    except ValueError:
        message = one_line(text.decode("utf-8", "replace"))
    message = f"{status}: {message or one_line(response.reason or '') or 'no message'}"
    if status in BUSY:
        kind = FaultKind.BUSY
    elif status in _MISROUTED or 300 <= status < 400:
        kind = FaultKind.MISROUTED
    elif 400 <= status < 500 and status not in _RETRIED:
        return PromptFault(message, status=status, wire_s=wire_s)
    else:
        kind = FaultKind.BROKEN
    retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
    return ServerFault(message, kind=kind, status=status, wire_s=wire_s, retry_after_s=retry_after_s)


def _retry_after_s(value: str | None) -> float | None:
    """Seconds, where the header gives them; the form with a date is left alone."""
    if value is None or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value.strip()):
        return None
    return float(value)


def message_of(data: Any) -> str:
    """The message of an error body, in any of the shapes that servers use; empty where there is none."""
    if isinstance(data, dict):
        error = data.get("error")
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail")
        data = error or data.get("message") or data.get("detail")
    if data is None:
        return ""
    return one_line(data if isinstance(data, str) else strict_json.dumps(data).decode())


def one_line(text: str) -> str:
    """The beginning, since servers echo whole prompts in their errors; nothing in it moves a cursor."""
    shown = "".join(char if char.isprintable() else " " for char in text[:2000])
    return " ".join(shown.split())[:300]


def fault_of(error: aiohttp.ClientError, wire_s: float | None) -> ServerFault:
    """Who did not answer, or answered with something else than HTTP.

    ``UNREACHABLE`` where the request was not handed to the socket, ``LOST`` where the connection broke after
    that, in mid-reply too, and ``BROKEN`` where it stands and what came over it is damaged.
    """
    if wire_s is None:
        kind = FaultKind.UNREACHABLE
    elif isinstance(error, aiohttp.ClientConnectionError) or is_cut(error):
        kind = FaultKind.LOST
    else:
        kind = FaultKind.BROKEN
    # A body is read of a 200 only.
    status = 200 if is_cut(error) else None
    return ServerFault(words(error), kind=kind, status=status, wire_s=wire_s)


def is_cut(error: aiohttp.ClientError) -> bool:
    """Whether the connection ended before the body did; what cannot be unpacked is damaged instead."""
    return isinstance(error, aiohttp.ClientPayloadError) and isinstance(
        error.__cause__, ContentLengthError | TransferEncodingError
    )


def words(error: Exception) -> str:
    """What a library's error says, in one line for people."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"the name {error.host} cannot be resolved"
    if isinstance(error, aiohttp.ClientConnectorError):
        return one_line(f"cannot connect: {_reason(error.os_error)}")
    if isinstance(error, aiohttp.ServerTimeoutError):
        return f"cannot connect within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "closed the connection without a reply"
    if isinstance(error, OSError):
        return one_line(f"the connection broke: {_reason(error)}")
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the reply was cut short" if is_cut(error) else "the reply is damaged"
    if isinstance(error, aiohttp.ClientResponseError):
        return one_line(f"the reply is no HTTP: {error.message}")
    return one_line(f"{type(error).__name__}: {error}")


def _reason(error: OSError) -> str:
    """The system's own words; event loops put others in their place."""
    if error.errno is not None and error.errno in errno.errorcode and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return error.strerror or str(error)
