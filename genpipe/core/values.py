"""Frozen records that are passed around: prompts, attempts, answers, groups, and what is due."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

ApiName = Literal["chat", "completions", "generate"]
"""How a server is asked: the two endpoints of OpenAI's API, or SGLang's own."""

OWN_BODY_KEYS = frozenset(
    {"messages", "prompt", "text", "input_ids", "model", "rid", "stream", "sampling_params"}
)
"""Members of a request that are set here, and by nobody's settings or records."""

DialectName = Literal[
    "auto", "messages", "sharegpt", "turns", "alpaca", "prompt", "question", "text", "input_ids"
]
"""How input records look; ``auto`` looks at each record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One input record, ready to be sent; its JSON was encoded once, when it was read.

    Attributes:
        index: 0-based place among the records of the input.
        payload: JSON value that the request carries as ``member``, UTF-8.
        member: ``messages``, ``prompt``, ``text`` or ``input_ids``: what the payload is called in a request,
            and in the record.
        id_json: the user's own id as JSON, digit for digit; empty where the record has none.
        keep_json: input fields to be copied into the record, as JSON members without braces.
        sampling_json: sampling parameters of this prompt alone, which stand over the run's, as JSON members
            without braces; empty for nearly all.
        body_json: likewise further members of its requests.
        conversation: of a conversation whose turns are asked one by one, what is still to be asked and what
            was made so far; None for others. Only the edge that made it looks into it.
        made: of such a conversation, gives what was made so far, as JSON members without braces; it is asked
            only where the conversation fails. None: nothing was made.
    """

    index: int
    payload: bytes
    member: str = "messages"
    id_json: bytes = b""
    keep_json: bytes = b""
    sampling_json: bytes = b""
    body_json: bytes = b""
    conversation: Any = None
    made: Callable[[], bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """One input record that cannot become a prompt.

    Attributes:
        index: 0-based place among the records of the input.
        file: path of the input file, as given.
        line: 1-based physical line in that file.
        reason: what is wrong with it, in one line.
    """

    index: int
    file: str
    line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one read of the input gave.

    Attributes:
        prompts: in input order, none of them done before.
        bad: records that cannot be sent.
        exhausted: nothing comes after this chunk.
    """

    prompts: tuple[Prompt, ...]
    bad: tuple[BadLine, ...] = ()
    exhausted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Due: send one prompt to one server.

    Attributes:
        attempt: unique number of this attempt in this process, from 1.
        prompt: what to send.
        server: position of the server in the run's list.
        tries: how many times this prompt has been sent in this process, this one included; of a conversation,
            over all its turns.
        started_s: when the slot was taken (seconds, run clock).
    """

    attempt: int
    prompt: Prompt
    server: int
    tries: int
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Due: give up the attempt with this number and close its connection."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Due: find out whether a server is well, and serves the run's model.

    Attributes:
        server: position of the server in the run's list.
        ask: health alone is not enough, also ask one token of our own.
    """

    server: int
    ask: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What a probe found.

    Attributes:
        trouble: what is wrong with the server, in one line; None if it is well.
        refused: nobody listens at its address: where a server was, its process has ended.
        alien: it serves another model than the run's.
        asked: it made a token when it was asked to.
    """

    trouble: str | None = None
    refused: bool = False
    alien: bool = False
    asked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inquire:
    """Due: ask a silent server what it is doing, without any work for it.

    Attributes:
        server: position of the server in the run's list.
        timeout_s: limit of the whole inquiry (seconds).
    """

    server: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What a silent server said of itself; a reply alone is no sign of life, its content may be old.

    Attributes:
        trouble: why it said nothing, in one line; None where it spoke.
        known: requests that it has, running and waiting; None where it does not say.
        age_s: how old that is, by the server's own clock (seconds).
        mark: changes with each step of its work, so that the same one twice means that nothing went on; None
            where it cannot be told.
    """

    trouble: str | None = None
    known: int | None = None
    age_s: float = 0.0
    mark: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Due: read up to ``count`` more prompts."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back on the wire with status 200, not yet looked at.

    Attributes:
        body: the whole body.
        wire_s: when the request was handed to the socket (seconds, run clock).
        last_s: when the last byte had come (seconds, run clock).
        rid: the id that the request carried, where the server gives it back as the reply's, else None.
    """

    body: bytes
    wire_s: float
    last_s: float
    rid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply that was looked at and found good.

    Attributes:
        response: JSON-ready ``{"content", "reasoning_content", "tool_calls"}``, or a list of them.
        finish_reason: as the server gave it, or None.
        usage: the server's usage object, or None.
        output_tokens: tokens that the server says it made, or None where it does not say.
        flags: what is odd about it, as :mod:`genpipe.core.quality` says.
        model: the model's name in the reply, or None.
        size_bytes: size of the reply on the wire.
        rid: the id that its request carried, or None.
        token_ids: JSON-ready ``{"prompt": [...] or None, "output": [...]}`` (``output`` is a list of lists
            where several samples were asked for), or None where the server told none.
        steps: of a finished conversation, JSON-ready: what each of its requests gave; None for others.
        more: what is to be asked next, where this answer is a step of a conversation that goes on; the
            prompt has not ended then, and nothing of this answer is saved but what ``more`` carries.
    """

    response: Any
    finish_reason: str | None
    usage: dict[str, Any] | None
    output_tokens: int | None
    flags: tuple[str, ...] = ()
    model: str | None
    size_bytes: int
    rid: str | None = None
    token_ids: dict[str, Any] | None = None
    steps: list[dict[str, Any]] | None = None
    more: Prompt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One answered prompt on its way to disk.

    Attributes:
        prompt: the question.
        answer: the answer.
        server: the answering server's address.
        tries: attempts that it took in this process.
        started_s: when the answering attempt took its slot (seconds, run clock); of a conversation, the one
            that answered its first turn.
        latency_s: from then to the last byte.
    """

    prompt: Prompt
    answer: Answer
    server: str
    tries: int
    started_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """One prompt that ended without an answer.

    Attributes:
        index: 0-based place among the records of the input.
        tries: attempts made in this process.
        error_class: class of the last error: ``PromptFault``, ``ServerFault`` or ``BadLine``.
        message: the last error in one line.
        last_status: the last HTTP status, or None.
        for_good: the same again would fail the same; asked again only with ``--retry-failed``.
        made_json: what the earlier turns of a conversation made, as JSON members without braces.
    """

    index: int
    tries: int
    error_class: str
    message: str
    last_status: int | None
    for_good: bool
    made_json: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Records made durable together.

    Attributes:
        number: from 1, in this process.
        finished: answered prompts.
        given_up: prompts that ended without an answer.
    """

    number: int
    finished: tuple[Finished, ...]
    given_up: tuple[GivenUp, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The room on the disk of a run.

    Attributes:
        free_bytes: what is left for us.
        total_bytes: what there is, full or not.
    """

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Due: make this group durable."""

    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Look how much room the disk has."""


Action = Start | Cancel | Probe | Inquire | Read | Commit | Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server as the scheduler sees it.

    Attributes:
        url: base address without a trailing slash; its name everywhere.
        limit: requests open at once (count, >= 1).
    """

    url: str
    limit: int

    def __post_init__(self) -> None:
        assert self.limit >= 1, self


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What some input files hold.

    Attributes:
        records: records, bad ones included.
        blank_lines: lines that are no records.
        input_bytes: size of all files.
        shapes: good records by shape, by the names of dialects: ``prompt``, ``messages``, ``sharegpt`` …
        bad_count: records that cannot become prompts, all of them.
        bad_lines: the first of them.
        payload_bytes_min: shortest payload, or None where there is none.
        payload_bytes_max: longest payload, or None where there is none.
        several_turns: good records in which the user speaks more than once.
        ends_in_answer: good records that end in the model's words, which are sent with them.
        hints: settings with which bad records could be read, and how many, the most first.
    """

    records: int
    blank_lines: int
    input_bytes: int
    shapes: dict[str, int]
    bad_count: int
    bad_lines: tuple[BadLine, ...]
    payload_bytes_min: int | None
    payload_bytes_max: int | None
    several_turns: int = 0
    ends_in_answer: int = 0
    hints: tuple[tuple[str, int], ...] = ()
