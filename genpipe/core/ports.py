"""What the driver needs of the world, as Protocols. The contract is in the docstrings."""

from collections.abc import Sequence
from typing import Protocol

from genpipe.core.values import Answer, Checkup, Chunk, Group, Inquire, Probe, Reply, Space, Start, Vitals


class Clock(Protocol):
    """The run's clock: monotonic seconds, the same for every instant that is passed around."""

    def now_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...


class Source(Protocol):
    """Where prompts come from."""

    @property
    def total(self) -> int | None:
        """Records in the whole input, done ones and bad ones included; None until it is counted."""
        ...

    async def read(self, count: int) -> Chunk:
        """The next prompts that are not done, in input order: at most ``count``, perhaps fewer.

        May be empty without being exhausted. Called by one task at a time, never after ``exhausted``.

        Raises:
            ConfigError: the input cannot be read.
            ResumeMismatch: the input is not what this run began with.
        """
        ...


class Transport(Protocol):
    """How a prompt reaches a server."""

    @property
    def reconnects(self) -> Sequence[int]:
        """By server: requests sent twice, since an idle connection was closed as they went out."""
        ...

    async def generate(self, start: Start) -> Reply:
        """Send one prompt to one server and wait for the whole reply.

        A cancel closes the connection at once, for the server to notice.

        Raises:
            ServerFault: the server did not give a 200 reply in full.
            PromptFault: the server refused this very prompt, or its time limit passed.
        """
        ...

    def examine(self, start: Start, reply: Reply) -> Answer:
        """Look whether a 200 is an answer to what was sent. Never blocks, and changes nothing.

        An answer may be a step of a conversation, and say what is to be asked next (``more``). The same step
        may be examined twice, of two attempts; only one of them is gone on from.

        Raises:
            ServerFault: it is none (abort, no choices, not JSON, an error object).
            PromptFault: it is a good one, and the conversation cannot go on from it.
        """
        ...

    async def probe(self, probe: Probe) -> Checkup:
        """Ask a server whether it is well and serves the run's model.

        With ``probe.ask``, health alone is not enough: one token is generated too. Takes a few seconds.
        """
        ...

    async def inquire(self, inquire: Inquire) -> Vitals:
        """Ask a silent server what it is doing, in ``inquire.timeout_s`` at most; asks for no token."""
        ...


class Store(Protocol):
    """Where records become durable."""

    async def commit(self, group: Group) -> Space | None:
        """Make ``group`` durable and mark its indices done, in that order.

        Returns the room that is left, or None where that cannot be told.

        Several commits may be under way; they are carried out in the order in which they were begun.
        Blocking work is done in a thread.

        Raises:
            DiskFull: there was no room for all of it. The same group may be committed again.
            StoreError: nothing may be assumed durable of this group; the run ends.
        """
        ...

    async def space(self) -> Space:
        """The room on the disk.

        Raises:
            StoreError: it cannot be told; the run ends.
        """
        ...
