"""The conversation of a record as messages, with the thoughts where they are wished for."""

from typing import Any

from genpipe.core import thoughts

Message = dict[str, Any]


def answer(response: dict[str, Any], reasoning: str, *, finish_reason: str | None, is_text: bool) -> Message:
    """What the model said, as a message.

    Args:
        response: ``content``, ``reasoning_content`` and ``tool_calls``, of which any may be null, or anything
            else that a server has sent.
        reasoning: ``field``, ``think`` or ``drop``.
        finish_reason: ``length`` where it was cut off.
        is_text: it goes on with a text, so that a thought in it stays there unless it is dropped.
    """
    message = {"role": "assistant", **_voiced(response, reasoning, finish_reason, is_text=is_text)}
    if response.get("tool_calls"):
        message["tool_calls"] = response["tool_calls"]
    return message


def history(record: dict[str, Any], messages: list[Message], reasoning: str) -> list[Message]:
    """What was said before the last answer: as it was sent, but for the thoughts behind new answers in it.

    The steps of a record before its last are the last messages of the assistant in what was sent last.

    Args:
        record: the record.
        messages: what was sent last; not changed.
        reasoning: ``field``, ``think`` or ``drop``.
    """
    before = (record.get("steps") or ())[:-1]
    if not before:
        return messages
    places = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    told = list(messages)
    # Where the input's own examples come first, there are more of them than steps.
    for place, step in zip(reversed(places), reversed(before), strict=False):
        sent = {key: value for key, value in messages[place].items() if key != "reasoning_content"}
        voiced = _voiced(step["response"], reasoning, step.get("finish_reason"), is_text=False)
        if not voiced["content"]:
            voiced["content"] = None if sent.get("tool_calls") else ""
        told[place] = {**sent, **voiced}
    return told


def _voiced(response: dict[str, Any], reasoning: str, finish_reason: str | None, *, is_text: bool) -> Message:
    """Content and thought as they are wished for, wherever the server has put them."""
    content, thought = response.get("content"), response.get("reasoning_content")
    marked = content
    if not thought and isinstance(content, str) and (not is_text or reasoning == "drop"):
        thought, said, is_marked = thoughts.split(content)
        if thought is not None:
            marked, content = (content if is_marked else f"{thoughts.OPEN}\n{content}"), said
    elif thought and reasoning == "think":
        if not isinstance(thought, str) or not isinstance(content, str | None):
            # Marks can be put around texts only.
            return {"content": content, "reasoning_content": thought}
        is_open = finish_reason == "length" and not content and not response.get("tool_calls")
        marked = _think(thought, content or "", is_open=is_open)
    if reasoning == "think":
        return {"content": marked}
    return (
        {"content": content, "reasoning_content": thought}
        if thought and reasoning == "field"
        else {"content": content}
    )


def _think(thought: str, content: str, *, is_open: bool) -> str:
    """As the chat templates of Qwen3 write it.

    A thought that was cut off is not ended: the model has not ended it either.
    """
    newline = "\n"
    if is_open:
        return f"{thoughts.OPEN}\n{thought.lstrip(newline)}"
    return f"{thoughts.OPEN}\n{thought.strip(newline)}\n{thoughts.CLOSE}\n\n{content.lstrip(newline)}"
