"""The object port: the few steps on objects that a run in S3 is made of, and nothing else."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

TRIES = 5
"""How often a step is tried before its error is the caller's to deal with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One object as a listing shows it.

    Attributes:
        key: its name below the prefix.
        size_bytes: its length.
        etag: changes with its content; without quotes.
    """

    key: str
    size_bytes: int
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """One object as it was read.

    Attributes:
        data: its bytes.
        etag: changes with its content; without quotes.
        modified_at: when it was put, by the store's clock.
        metadata: its own metadata, with keys in lower case.
    """

    data: bytes
    etag: str
    modified_at: datetime
    metadata: Mapping[str, str] = field(default_factory=dict)


class Objects(Protocol):
    """The objects below one prefix of a bucket. Blocking; any number of threads may call.

    Every method tries again by itself what may help to be tried again, ``tries`` times in all, with pauses
    that grow and are jittered, and raises ``ObjectStoreError`` after that. A write that raised may have been
    carried out all the same, or may still be: also after this process has ended.

    Attributes:
        name: what is shown of the prefix, such as ``s3://bucket/run1``.
        is_conditional: whether conditions on a put are heeded; where they are not, the last put wins.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def is_conditional(self) -> bool: ...  # noqa: D102

    def put(
        self,
        key: str,
        data: bytes,
        *,
        metadata: Mapping[str, str] | None = None,
        if_none_match: bool = False,
        if_match: str | None = None,
        verify: bool = True,
        tries: int = TRIES,
    ) -> str:
        """Store an object whole, and return its ETag.

        Args:
            key: its name below the prefix.
            data: its bytes.
            metadata: kept beside it; keys in lower case.
            if_none_match: only if there is no object of this name.
            if_match: only if there is one with this ETag.
            verify: look afterwards whether the store has these very bytes.
            tries: how often it is tried.

        Raises:
            PreconditionFailed: the condition did not hold; perhaps because of an earlier try of this call.
            ObjectStoreError: it may be stored or not, now or later.
        """
        ...

    def get(self, key: str, *, tries: int = TRIES) -> Fetched | None:
        """Read an object whole; None where there is none.

        Raises:
            ObjectStoreError: it could not be read, or what was read is not what is stored.
        """
        ...

    def list(self, prefix: str, *, after: str = "", tries: int = TRIES) -> Iterator[Listed]:
        """All objects whose names begin so, by name, over however many pages.

        Args:
            prefix: what the names begin with.
            after: only names behind this one.
            tries: how often each page is tried.

        Raises:
            ObjectStoreError: a page could not be read.
        """
        ...

    def delete(self, key: str, *, tries: int = TRIES) -> None:
        """Remove an object; one that is not there is no error.

        Raises:
            ObjectStoreError: it may be there still.
        """
        ...
