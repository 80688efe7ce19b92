"""Bodies of requests, put together from JSON that was encoded once."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from genpipe.core.errors import ConfigError, PromptFault
from genpipe.core.values import OWN_BODY_KEYS, ApiName, Prompt
from genpipe.edges import strict_json
from genpipe.edges.known_options import OTHER_NAMES, PATHS, Option, ignored, refused_sampling

TAILS_KEPT = 256
"""Of prompts with options of their own, so many kinds are remembered (count)."""

_KEPT_BYTES_MAX = 16 << 10

Members = dict[str, bytes]


class _Tail(NamedTuple):
    """What follows the payload in a body.

    Attributes:
        before_rid: up to the request's id and the end of the body.
        alone: all of it, where no id is sent.
        samples: answers that are asked for (count).
    """

    before_rid: bytes
    alone: bytes
    samples: int


class Bodies:
    """What requests carry: their payload, what all of a run share, and what a record adds of its own.

    A record's own sampling parameters and members stand in place of the run's of the same name; no name
    stands twice.

    Attributes:
        api: how servers are asked.
        path: the endpoint.
        model: the model's name as it is sent.
        wants_ids: token ids are asked for.
    """

    def __init__(
        self,
        *,
        model: str,
        api: ApiName = "chat",
        sampling: Mapping[str, Any] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        token_ids: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Encode what is the same for all requests.

        Args:
            model: sent as ``model``, but for ``generate``, which has no such member.
            api: how servers are asked.
            sampling: the run's sampling parameters.
            extra_body: further members of the run's bodies.
            token_ids: ask for the ids of prompt and answer.
            warn: told once of each option of a record that SGLang is not known to read; None: nobody is.
        """
        self.api = api
        self.path = PATHS[api]
        self.model = model
        self.wants_ids = token_ids
        self._sampling = _members(sampling or {})
        self._body = _members(extra_body or {})
        self._warn = warn
        self._seen: set[str] = set()
        self._heads: dict[str, bytes] = {}
        self._tail = lru_cache(maxsize=TAILS_KEPT)(self._make_tail)

    def encode(self, prompt: Prompt, rid: str | None) -> bytes:
        """The body of one request; an id stands at its very end.

        Raises:
            PromptFault: the record has an option of its own that cannot be sent.
        """
        head = self._heads.get(prompt.member)
        if head is None:
            head = self._heads[prompt.member] = b'{"%s":' % prompt.member.encode()
        tail = self._tail_of(prompt)
        if rid is None:
            return b"".join((head, prompt.payload, tail.alone))
        return b"".join((head, prompt.payload, tail.before_rid, rid.encode(), b'"}'))

    def samples_of(self, prompt: Prompt) -> int:
        """Answers that a request for this prompt asks for (count, >= 1)."""
        return self._tail_of(prompt).samples

    def _tail_of(self, prompt: Prompt) -> _Tail:
        if len(prompt.sampling_json) + len(prompt.body_json) > _KEPT_BYTES_MAX:
            return self._make_tail(prompt.member, prompt.sampling_json, prompt.body_json)
        return self._tail(prompt.member, prompt.sampling_json, prompt.body_json)

    def _make_tail(self, member: str, sampling_json: bytes, body_json: bytes) -> _Tail:
        own_sampling = self._own(sampling_json, "sampling") if sampling_json else {}
        own_body = self._own(body_json, "body") if body_json else {}
        if self.api == "generate":
            sampling = self._sampling | own_sampling
            members = {"sampling_params": b"{%s}" % _joined(sampling)} | self._asking(member) | self._body
            counted = sampling
        else:
            members = {"model": strict_json.dumps(self.model)} | self._asking(member)
            members |= self._sampling | self._body | own_sampling
            counted = members | own_body
        tail = b"," + _joined(members | own_body)
        return _Tail(tail + b',"rid":"', tail + b"}", _samples(counted.get("n")))

    def _asking(self, member: str) -> Members:
        """What asks for token ids; those of a prompt that was sent as ids are known."""
        if not self.wants_ids or (self.api == "generate" and member == "input_ids"):
            return {}
        return {"return_prompt_token_ids" if self.api == "generate" else "return_token_ids": b"true"}

    def _own(self, json: bytes, section: str) -> Members:
        """A record's own members, each value as it was written."""
        line = b"{%s}" % json
        try:
            given = strict_json.loads(line)
            members = {name: strict_json.raw_member(line, given, name) for name in given}
        except ValueError as error:
            raise PromptFault(f"the record's own {section} cannot be sent: {error}") from None
        for name in members:
            if name in OWN_BODY_KEYS:
                raise PromptFault(f"the record's own {section}.{name} is set by genpipe itself; remove it")
            if name not in self._seen and self._warn is not None:
                self._seen.add(name)
                option = Option(f"a record's own {section}.{name}", name, is_sampling=section == "sampling")
                if text := ignored(self.api, option):
                    self._warn(text)
        return members


def demand_names(api: ApiName, sampling: Iterable[str]) -> None:
    """Refuse a run's sampling parameters that the endpoint has under another name.

    Raises:
        ConfigError: there is one.
    """
    for name in sampling:
        if api == "generate" and name in OTHER_NAMES:
            raise ConfigError(f"request.sampling.{name}: {refused_sampling(name)}")


def _members(values: Mapping[str, Any]) -> Members:
    return {name: strict_json.dumps(value) for name, value in values.items()}


def _joined(members: Members) -> bytes:
    return b",".join(strict_json.dumps(name) + b":" + value for name, value in members.items())


def _samples(given: bytes | None) -> int:
    """What ``n`` asks for; servers refuse what is no such count."""
    count = orjson.loads(given) if given is not None else 1
    return count if isinstance(count, int) and count > 1 else 1
