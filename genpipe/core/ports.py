"""What the driver needs of the world, as Protocols. The contract is in the docstrings."""

from typing import Protocol

from genpipe.core.values import Answer, Chunk, Group, Reply, Space, Start


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

    async def generate(self, start: Start) -> Reply:
        """Send one prompt to one server and wait for the whole reply.

        Raises:
            ServerFault: the server did not give a 200 reply in full.
            PromptFault: the server refused this very prompt, or its time limit passed.
        """
        ...

    def examine(self, reply: Reply) -> Answer:
        """Look whether a 200 is an answer. Pure; never blocks.

        Raises:
            ServerFault: it is none (abort, no choices, not JSON, an error object).
        """
        ...

    async def probe(self, server: int, *, ask: bool) -> str | None:
        """Ask a benched server whether it is well; None if it is, else why not, in one line.

        With ``ask``, health alone is not enough: one token is generated too. Takes a few seconds at most.
        """
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
