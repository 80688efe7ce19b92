"""The prefix as an uploader sees it: nothing more is written there once it is known to be another's."""

import threading
from collections.abc import Callable, Iterator, Mapping

from genpipe.core.errors import Fenced
from genpipe.edges.s3.objects import TRIES, Fetched, Listed, Objects


class Fence:
    """An object port that puts and deletes until it is told that another claim has the prefix.

    Attributes:
        name: as the port behind it.
        is_conditional: likewise.
    """

    def __init__(self, objects: Objects, on_fenced: Callable[[Fenced], None]) -> None:
        """Stand before ``objects``.

        Args:
            objects: the port.
            on_fenced: called once, by whatever thread finds out.
        """
        self.name = objects.name
        self.is_conditional = objects.is_conditional
        self._objects = objects
        self._on_fenced = on_fenced
        self._lock = threading.Lock()
        self._error: Fenced | None = None

    @property
    def is_shut(self) -> bool:
        """Whether the prefix is another's."""
        return self._error is not None

    def shut(self, error: Fenced) -> None:
        """Let nothing more be written; the first call counts."""
        with self._lock:
            is_first = self._error is None
            self._error = self._error or error
        if is_first:
            self._on_fenced(error)

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
        """As the port behind it.

        Raises:
            Fenced: the prefix is another's.
        """
        self._check()
        return self._objects.put(
            key,
            data,
            metadata=metadata,
            if_none_match=if_none_match,
            if_match=if_match,
            verify=verify,
            tries=tries,
        )

    def get(self, key: str, *, tries: int = TRIES) -> Fetched | None:
        """As the port behind it."""
        return self._objects.get(key, tries=tries)

    def list(self, prefix: str, *, after: str = "", tries: int = TRIES) -> Iterator[Listed]:
        """As the port behind it."""
        return self._objects.list(prefix, after=after, tries=tries)

    def delete(self, key: str, *, tries: int = TRIES) -> None:
        """As the port behind it.

        Raises:
            Fenced: the prefix is another's.
        """
        self._check()
        self._objects.delete(key, tries=tries)

    def _check(self) -> None:
        if self._error is not None:
            raise Fenced(str(self._error))
