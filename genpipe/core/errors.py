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


class FaultKind(StrEnum):
    """What kind of server fault it was, by what the scheduler does about it."""

    UNREACHABLE = "unreachable"
    """Refused, reset, no name, connect timeout: never charged to the prompt."""

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
    """The prompt is to blame: 400, 413, 422, or its own time limit. The same again would fail the same."""
