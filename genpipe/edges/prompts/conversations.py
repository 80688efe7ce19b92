"""Conversations as people have them, as the messages that a request carries."""

from typing import Any

from genpipe.edges.prompts.record_errors import RecordError, keys_of, kind_of, short
from genpipe.edges.strict_json import loads

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_NEEDS_CONTENT = frozenset({"user", "system", "developer", "tool"})


def objects_in(key: str, value: object) -> list[dict[str, Any]]:
    """``value``, or the list in a string that it is, once it is found to be a list of objects, one at least.

    Raises:
        RecordError: it is none.
    """
    if isinstance(value, str):
        value = _list_in(key, value)
    if not isinstance(value, list):
        raise RecordError(f"{key!r} is {kind_of(value)}")
    if not value:
        raise RecordError(f"{key!r} is an empty list")
    for place, item in enumerate(value):
        if type(item) is dict:
            continue
        if all(isinstance(other, str) for other in value):
            raise RecordError(
                f"{key!r} is a list of texts: give each its own line, or, if they are the turns of a "
                "conversation, set input.dialect=turns and input.field"
            )
        raise RecordError(f"{key}[{place}] is {kind_of(item)}, not an object")
    return value


def from_sharegpt(key: str, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns of ``from`` and ``value`` as messages; what else stands in a turn is left out.

    Raises:
        RecordError: a speaker is unknown, or a text is none.
    """
    messages = []
    for place, turn in enumerate(turns):
        who = turn.get("from", turn.get("role"))
        role = _ROLES.get(who.lower()) if isinstance(who, str) else None
        if role is None:
            raise RecordError(f"{key}[{place}]: unknown speaker {short(who)}")
        text = turn.get("value", turn.get("content"))
        if not isinstance(text, str):
            raise RecordError(f"{key}[{place}]: its value is {kind_of(text)}, not a string")
        if role == "user" and not text:
            raise RecordError(f"{key}[{place}]: the user's text is empty")
        messages.append({"role": role, "content": text})
    return messages


def asked(key: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation up to what the model is asked: its old answer at the end is left out.

    Raises:
        RecordError: nothing is asked.
    """
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if all(message["role"] == "system" for message in messages[:end]):
        raise RecordError(f"{key!r} holds nothing that asks for an answer")
    return messages[:end]


def checked(key: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as they are, once they are found to be messages.

    Raises:
        RecordError: one is none.
    """
    for place, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise RecordError(f"{key}[{place}] has no string 'role'; it has {keys_of(message)}")
        content = message.get("content")
        if content is None:
            if role in _NEEDS_CONTENT:
                what = "content null" if "content" in message else "no content"
                raise RecordError(f"{key}[{place}] has {what}, which a {role} message needs")
        elif not isinstance(content, str | list):
            raise RecordError(
                f"{key}[{place}]: its content is {kind_of(content)}, not a string or a list of parts"
            )
    return messages


def _list_in(key: str, text: str) -> object:
    """The list that some data sets store as a string of JSON."""
    try:
        return loads(text.encode())
    except ValueError:
        raise RecordError(f"{key!r} is a string, and no list of messages stands in it") from None
