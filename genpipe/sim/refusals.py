"""How SGLang 0.5.11 says no: the envelopes of its endpoints."""

from enum import Enum
from typing import Any

import orjson


class Api(Enum):
    """Which of the three ways of asking; its value is the limit of an answer that names none (tokens)."""

    CHAT = None
    COMPLETIONS = 16
    GENERATE = 128


class Refusal(Exception):
    """The server says no.

    Attributes:
        status: HTTP status.
        body: the reply's body.
        headers: further reply headers.
        plain: the body is text, not JSON.
    """

    def __init__(
        self, status: int, body: bytes, *, headers: dict[str, str] | None = None, plain: bool = False
    ) -> None:
        super().__init__(f"{status} {body[:200]!r}")
        self.status = status
        self.body = body
        self.headers = headers or {}
        self.plain = plain


def flat_error(status: int, message: str, type_: str) -> bytes:
    """The error object of the OpenAI endpoints, which is not nested under ``error``."""
    return orjson.dumps({"object": "error", "message": message, "type": type_, "param": None, "code": status})


def refuse(api: Api, message: str, *, status: int = 400, type_: str = "BadRequestError") -> Refusal:
    """A refusal in the envelope of that endpoint."""
    if api is Api.GENERATE and status == 400:
        return Refusal(400, orjson.dumps({"error": {"message": message}}))
    return Refusal(status, flat_error(status, message, type_))


def invalid(errors: list[dict[str, Any]]) -> Refusal:
    """What the validation layer says: the list of faults as Python prints it."""
    return Refusal(400, flat_error(400, encodable(str(errors))[:4000], "Bad Request"))


def encodable(text: str) -> str:
    """The text, with a question mark for each lone surrogate."""
    return text.encode("utf-8", "replace").decode()
