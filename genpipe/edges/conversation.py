"""Conversations whose turns are asked one by one, each with the new answers before it and no old one.

Of the original, what its users said is asked in order, each message of theirs is a turn of its own, and
system messages stay where they stand. Its answers are dropped. Results of tools go in where the new answer
calls the same functions as the old one did, by name and in order, with the ids of the new calls; where it
calls none, they are left out. An answer that calls others ends the conversation where it is the last turn;
before that nothing honest can follow, so that the conversation fails there, with what it made.

An answer that is empty, or was cut off, is gone on from: it is flagged, and whether such a conversation is
good for anything is for the guards of the run and the filters of the export to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from genpipe.core import thoughts
from genpipe.core.errors import PromptFault
from genpipe.core.quality import FLAGS
from genpipe.core.values import Answer, Reply, Start
from genpipe.edges.strict_json import dumps, loads

_TOOL_ROLES = frozenset({"tool", "function"})

_Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tools:
    """Calls of tools in an original answer, and what came of them.

    Attributes:
        names: the functions, in order.
        results: messages with the results, each with the place of its call among the calls, as JSON up to
            where the call's id goes in; None where the original does not have one for each call.
        between: system messages behind them, as JSON.
    """

    names: tuple[str, ...]
    results: tuple[tuple[int, bytes], ...] | None
    between: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One message of the user's.

    Attributes:
        asked: what goes into the history before the answer, as JSON: the user's message, with the system
            messages around it.
        tools: what the original's answer did before its text.
    """

    asked: tuple[bytes, ...]
    tools: tuple[_Tools, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """How far a conversation has come. Never changed: one step may be followed twice, from two answers.

    Attributes:
        turns: all of the original.
        turn: the one that is asked now, from 0.
        call: how many of its calls of tools have their results in the history.
        steps_json: what each answered request gave, as JSON: token ids take a tenth of the memory so.
        usage: the sum over them; None where one of them has none.
        output_tokens: likewise.
        flags: those that any of them has, in the order of :data:`FLAGS`.
        size_bytes: size of their replies on the wire.
    """

    turns: tuple[_Turn, ...]
    turn: int = 0
    call: int = 0
    steps_json: tuple[bytes, ...] = ()
    usage: dict[str, Any] | None = None
    output_tokens: int | None = None
    flags: tuple[str, ...] = ()
    size_bytes: int = 0


# ---- the original ----


def begin(messages: Sequence[_Message]) -> tuple[bytes, Conversation]:
    """The messages of the first request, as a JSON array, and the conversation before it.

    Args:
        messages: the original, in OpenAI's form. Of what is in them only roles, names of functions and ids of
            calls are looked at.

    Raises:
        ValueError: no user says anything.
    """
    starts = [place for place, message in enumerate(messages) if _role(message) == "user"]
    if not starts:
        raise ValueError("no message of a user, so that there is nothing to ask")
    # What was answered before the first question is no answer of the new model's.
    ahead = [dumps(message) for message in messages[: starts[0]] if _stays(message)]
    turns: list[_Turn] = []
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        turn, ahead = _take_apart(messages[start:end], ahead, is_last=end == len(messages))
        turns.append(turn)
    return _array(turns[0].asked), Conversation(turns=tuple(turns))


def _take_apart(
    messages: Sequence[_Message], ahead: list[bytes], *, is_last: bool
) -> tuple[_Turn, list[bytes]]:
    """One turn, and the system messages that stand before the next one.

    Args:
        messages: a user's, and all up to the next user's.
        ahead: system messages before it.
        is_last: no user's message follows.
    """
    end = next((at for at, message in enumerate(messages[1:], 1) if not _stays(message)), len(messages))
    near = [dumps(message) for message in messages[1:end]]
    asked, behind = [*ahead, dumps(messages[0])], list[bytes]()
    # They are before the answer, if there is one.
    (asked if is_last or end < len(messages) else behind).extend(near)
    tools: list[_Tools] = []
    while end < len(messages):
        end, found = _next_tools(messages, end, behind)
        tools += found
    return _Turn(asked=tuple(asked), tools=tuple(tools)), behind


def _next_tools(messages: Sequence[_Message], at: int, behind: list[bytes]) -> tuple[int, list[_Tools]]:
    """Go over one message of an old answer, with the results of the tools that it calls."""
    message = messages[at]
    at += 1
    if _stays(message):
        behind.append(dumps(message))
    calls = message.get("tool_calls") if _role(message) == "assistant" else None
    names = _names(calls)
    if not calls or names is None:
        return at, []
    results: list[_Message] = []
    while at < len(messages) and _role(messages[at]) in _TOOL_ROLES:
        results.append(messages[at])
        at += 1
    between: list[bytes] = []
    while results and at < len(messages) and _stays(messages[at]):
        between.append(dumps(messages[at]))
        at += 1
    return at, [_Tools(names=names, results=_paired(calls, results), between=tuple(between))]


def _paired(calls: Sequence[Any], results: Sequence[_Message]) -> tuple[tuple[int, bytes], ...] | None:
    """Each result with the place of its call: by id, or in order where there are none to go by."""
    if len(calls) != len(results):
        return None
    ids = [each for call in calls if isinstance(each := call.get("id"), str)]
    given = [each for message in results if isinstance(each := message.get("tool_call_id"), str)]
    places = list(range(len(calls)))
    if len(set(ids)) == len(given) == len(calls):
        if sorted(given) != sorted(ids):
            return None
        places = [ids.index(each) for each in given]
    heads = []
    for message in results:
        rest = {key: value for key, value in message.items() if key != "tool_call_id"}
        heads.append(dumps(rest)[:-1] + b',"tool_call_id":')
    return tuple(zip(places, heads, strict=True))


def _role(message: _Message) -> str:
    role = message.get("role")
    return role.lower() if isinstance(role, str) else ""


def _stays(message: _Message) -> bool:
    """Whether it stands in the new conversation as it did in the old one, though no user says it."""
    return _role(message) not in ("user", "assistant", *_TOOL_ROLES)


def _names(calls: Any) -> tuple[str, ...] | None:
    """The functions that are called; None where that cannot be told."""
    if not isinstance(calls, list):
        return None
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    names = [function.get("name") if isinstance(function, dict) else None for function in functions]
    known = tuple(name for name in names if isinstance(name, str))
    return known if len(known) == len(names) else None


# ---- from one step to the next ----


def follow(start: Start, reply: Reply, answer: Answer, *, server: str, keep_reasoning: bool) -> Answer:
    """What an answer makes of its conversation: a step with what is to be asked next, or all of it.

    The cost of a step is that of joining the bytes of the history once or twice; what was encoded stays so.

    Args:
        start: the attempt; its prompt has a conversation.
        reply: what came.
        answer: what was found in it.
        server: the address of who answered.
        keep_reasoning: answers stand in the history with their reasoning.

    Raises:
        PromptFault: the conversation cannot go on from here.
    """
    prompt = start.prompt
    if isinstance(answer.response, list):
        raise PromptFault(
            f"a conversation goes on from one answer, and the reply holds {len(answer.response)}",
            wire_s=reply.wire_s,
        )
    now = _with_step(prompt.conversation, start, reply, answer, server)
    turn, is_last = now.turns[now.turn], now.turn == len(now.turns) - 1
    calls = answer.response.get("tool_calls")
    if calls:
        # Servers that parse calls out of a text may give anything here.
        names = _names(calls)
        tools = turn.tools[now.call] if now.call < len(turn.tools) else None
        if tools is not None and tools.results is not None and tools.names == names:
            ids = [_id(call, f"call_{len(now.steps_json)}_{place}") for place, call in enumerate(calls)]
            results = [head + dumps(ids[place]) + b"}" for place, head in tools.results]
            said = _said(answer.response, ids, keep_reasoning=keep_reasoning)
            return _go_on(start, answer, replace(now, call=now.call + 1), [said, *results, *tools.between])
        if not is_last:
            what = (
                "in a form that is not known" if names is None else "whose results the original does not have"
            )
            fault = PromptFault(f"turn {now.turn + 1} calls tools {what}", wire_s=reply.wire_s)
            fault.made_json = _made_json(prompt.payload, now)
            raise fault
    if is_last:
        return replace(
            answer,
            usage=now.usage,
            output_tokens=now.output_tokens,
            flags=now.flags,
            size_bytes=now.size_bytes,
            token_ids=None,
            steps=[loads(step_json) for step_json in now.steps_json],
        )
    said = _said(answer.response, [], keep_reasoning=keep_reasoning)
    between = [message for tools in turn.tools[now.call :] for message in tools.between]
    asked = now.turns[now.turn + 1].asked
    return _go_on(start, answer, replace(now, turn=now.turn + 1, call=0), [said, *between, *asked])


def _go_on(start: Start, answer: Answer, now: Conversation, behind: Sequence[bytes]) -> Answer:
    """The answer, with a next request that has these messages behind the history."""
    prompt = start.prompt
    payload = b"".join((memoryview(prompt.payload)[:-1], b",", b",".join(behind), b"]"))
    made = partial(_made_json, payload, now)
    return replace(answer, more=replace(prompt, payload=payload, conversation=now, made=made))


def _with_step(past: Conversation, start: Start, reply: Reply, answer: Answer, server: str) -> Conversation:
    step = {
        "response": answer.response,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "flags": list(answer.flags),
        "server": server,
        "latency_s": round(reply.last_s - start.started_s, 3),
    }
    if answer.rid is not None:
        step["rid"] = answer.rid
    if answer.token_ids is not None:
        step["token_ids"] = answer.token_ids
    usage, tokens = answer.usage, answer.output_tokens
    if past.steps_json:
        usage = None if usage is None or past.usage is None else _sum(past.usage, usage)
        tokens = None if tokens is None or past.output_tokens is None else past.output_tokens + tokens
    return replace(
        past,
        # Encoded two levels down, as it stands in a record, so that what is nested too deeply for one is
        # found here.
        steps_json=(*past.steps_json, dumps({"steps": [step]})[len(b'{"steps":[') : -len(b"]}")]),
        usage=usage,
        output_tokens=tokens,
        flags=tuple(flag for flag in FLAGS if flag in past.flags or flag in answer.flags),
        size_bytes=past.size_bytes + answer.size_bytes,
    )


def _made_json(payload: bytes, now: Conversation) -> bytes:
    parts = [b'"messages":', payload, b',"steps":[']
    for step_json in now.steps_json:
        parts += (step_json, b",")
    return b"".join((*parts[:-1], b"]"))


def _array(members: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(members) + b"]"


def _said(response: dict[str, Any], ids: Sequence[str], *, keep_reasoning: bool) -> bytes:
    """A new answer as a message of the history, with these ids for the tools that it calls."""
    content, reasoning = response.get("content"), response.get("reasoning_content")
    if isinstance(content, str) and not keep_reasoning:
        content = thoughts.split(content).said
    # Servers take null beside calls only.
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if ids else "")}
    if keep_reasoning and reasoning:
        message["reasoning_content"] = reasoning
    if ids:
        calls = zip(ids, response["tool_calls"], strict=True)
        # What else stands there, such as the call's place, is of replies alone.
        message["tool_calls"] = [
            {"id": each, "type": "function", "function": call["function"]} for each, call in calls
        ]
    return dumps(message)


def _id(call: Any, otherwise: str) -> str:
    given = call.get("id") if isinstance(call, dict) else None
    return given if isinstance(given, str) and given else otherwise


def _sum(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two usage objects as one; a number that one of them lacks is not known, and what is no number is none.

    Numbers stand in them or in their details, such as ``prompt_tokens_details``; nothing deeper is looked at.
    """
    total: dict[str, Any] = {}
    for key in dict.fromkeys((*first, *second)):
        one, other = first.get(key), second.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            names = dict.fromkeys((*one, *other))
            total[key] = {name: _plus(one.get(name), other.get(name)) for name in names}
        elif details := next((each for each in (one, other) if isinstance(each, dict)), None):
            # Servers give null for details that are all zero.
            total[key] = {name: _plus(value, 0) for name, value in details.items()}
        else:
            total[key] = _plus(one, other)
    return total


def _plus(one: Any, other: Any) -> Any:
    return one + other if type(one) in (int, float) and type(other) in (int, float) else None
