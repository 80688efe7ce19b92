"""The error tree. A class says who is to blame; a message says what, which, and what to do next."""

from enum import StrEnum


class GenpipeError(Exception):
    """Base of every error that genpipe raises on purpose.

    Attributes:
        exit_code: the process's exit code where this error ends the run.
    """

    exit_code = 70


class ConfigError(GenpipeError):
    """The operator must change something: config, input, address or folder."""

    exit_code = 2


class ResumeMismatch(ConfigError):
    """This run folder belongs to another job; the message names the difference."""


class StoreError(GenpipeError):
    """A group is not durable and nothing may be assumed about it; the run ends."""

    exit_code = 74


class DiskFull(StoreError):
    """No space is left for the next group."""

    exit_code = 73


class Fenced(StoreError):
    """Another driver owns the run."""

    exit_code = 75


class TroubleKind(StrEnum):
    """What kind of trouble an object store made, by what helps against it."""

    UNREACHABLE = "unreachable"
    """Refused, reset, no name, no TLS."""

    TIMEOUT = "timeout"
    """It did not answer, or took no more bytes, in time."""

    SLOW_DOWN = "slow_down"
    """It asks for fewer requests (SlowDown, 503, 429)."""

    BROKEN = "broken"
    """It failed (another 5xx), or its reply was none."""

    SHORT = "short"
    """It said that it stored an object, and has other bytes than were sent."""

    CREDENTIALS = "credentials"
    """The keys are missing, unknown, wrong or expired."""

    CLOCK = "clock"
    """This machine's clock and the store's are too far apart."""

    DENIED = "denied"
    """The keys are good, and do not allow this."""

    NO_BUCKET = "no_bucket"
    """There is no such bucket."""

    REGION = "region"
    """The bucket is in another region."""

    REFUSED = "refused"
    """It does not understand the request, or does not want it."""


class ObjectStoreError(StoreError):
    """An object store did not do what was asked. What is on the local disk is not touched by that.

    Attributes:
        kind: what helps against it.
    """

    def __init__(self, message: str, *, kind: TroubleKind) -> None:
        super().__init__(message)
        self.kind = kind


class PreconditionFailed(ObjectStoreError):
    """An object is there where none, or another, was expected: a conditional put wrote nothing.

    It may be our own: of an earlier try whose reply was lost.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, kind=TroubleKind.REFUSED)


class FaultKind(StrEnum):
    """What kind of server fault it was, by what the scheduler does about it."""

    UNREACHABLE = "unreachable"
    """Refused, no name, connect timeout, broken before the request was sent: never charged to the prompt."""

    LOST = "lost"
    """The connection broke once the request was sent; the server may have died of it. Charged as BROKEN is
    where the reply had begun (it has a status), and never else."""

    STALLED = "stalled"
    """Given up by us, for its server showed no life; it may be what hung the server. Charged as BROKEN is."""

    OVERDUE = "overdue"
    """Given up by us though its server lives: it has it no more, or it is too old. Charged as BROKEN is."""

    BUSY = "busy"
    """429 or 503: never charged, does not count towards benching, cuts the server's limit."""

    MISROUTED = "misrouted"
    """401, 403, 404: wrong key or wrong route; benches the server at once, never charged."""

    BROKEN = "broken"
    """5xx, abort, or an answer that is none: charged once the server has answered somebody else."""


class AttemptError(GenpipeError):
    """One attempt failed. Never leaves the driver.

    Attributes:
        status: HTTP status, or None where none came.
        wire_s: when the request was handed to the socket, or None if it never was (seconds, run clock).
        retry_after_s: the server's own wish for a pause, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        wire_s: float | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.wire_s = wire_s
        self.retry_after_s = retry_after_s


class ServerFault(AttemptError):
    """The server is to blame: the prompt goes elsewhere.

    Attributes:
        kind: what the scheduler does about it.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: FaultKind,
        status: int | None = None,
        wire_s: float | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status=status, wire_s=wire_s, retry_after_s=retry_after_s)
        self.kind = kind


class PromptFault(AttemptError):
    """The prompt is to blame: 400, 413, 422, or its own time limit. The same again would fail the same.

    So is a conversation that cannot go on from a good answer.

    Attributes:
        made_json: what such a conversation made, that answer included, as JSON members without braces; empty
            for all others.
    """

    made_json: bytes = b""


class Poison(PromptFault):
    """Servers died with this prompt in flight, one after the other: it is sent to no more of them."""
