"""Whole objects of any size into files: prompts that are kept in an object store."""

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from genpipe.core.errors import ConfigError, ObjectStoreError, StoreError, TroubleKind
from genpipe.edges.files import blaming
from genpipe.edges.s3.boto import PAUSE_MAX_S, PAUSE_S, connect, unless_missing
from genpipe.edges.s3.objects import TRIES
from genpipe.edges.s3.place import Place
from genpipe.edges.s3.troubles import trouble_of

if TYPE_CHECKING:
    import tenacity

RANGE_BYTES = 64 << 20
"""Asked for at once (bytes)."""

BLOCK_BYTES = 1 << 20
"""Held in memory (bytes)."""

BROKEN_PAUSE_S = 0.1
"""After a connection that broke, and had brought something (seconds)."""

LOOK_S, LOOK_TRIES = 5.0, 2
"""Of an object that is only looked at: limit of one wait (seconds), and how often it is tried."""

_MAY_HELP = {
    TroubleKind.UNREACHABLE,
    TroubleKind.TIMEOUT,
    TroubleKind.SLOW_DOWN,
    TroubleKind.BROKEN,
    TroubleKind.CLOCK,
}


class Head(NamedTuple):
    """What an object is, without its bytes.

    Attributes:
        size_bytes: its length.
        etag: changes with its content; without quotes.
    """

    size_bytes: int
    etag: str


def head(place: Place, *, stop: threading.Event) -> Head:
    """Look at an object, whose address is ``place.uri``; within some ten seconds, whatever is set.

    Args:
        place: of which ``uri`` is the object's own address.
        stop: once set, nothing is tried again.

    Raises:
        ConfigError: there is none, or the store does not say.
    """
    place = replace(place, timeout_s=min(place.timeout_s, LOOK_S))
    with closing(_client(place)) as client:
        return _Object(place, client, stop, tries=LOOK_TRIES).head()


def download(place: Place, path: Path, *, stop: threading.Event | None = None) -> Head:
    """Copy an object into a file, which is there, whole and durable, on return; an older one is replaced.

    Goes on where it was where a connection breaks, as long as bytes keep coming. Memory: a block.

    Args:
        place: of which ``uri`` is the object's own address.
        path: the file; ``.part`` is added to its name until it is whole.
        stop: once set, the copy is given up.

    Raises:
        ConfigError: there is no such object, it changes meanwhile, or the store does not give it.
        StoreError: the file cannot be written, or ``stop`` was set.
    """
    part = path.with_name(path.name + ".part")
    with closing(_client(place)) as client:
        source = _Object(place, client, stop or threading.Event())
        found = source.head()
        with blaming(part, "write"):
            try:
                with open(part, "wb") as file:
                    source.copy(found, file)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise
    return found


def _client(place: Place) -> Any:
    try:
        # The checksum that a store sends is of the whole object, and ranges do not have it.
        return connect(place, response_checksum_validation="when_required")
    except Exception as error:  # the library raises more than its own errors
        raise ConfigError(str(trouble_of(error, place, "get"))) from error


class _Object:
    """One object of a store."""

    def __init__(self, place: Place, client: Any, stop: threading.Event, *, tries: int = TRIES) -> None:
        self._place = place
        self._client = client
        self._stop = stop
        self._tries = tries
        self._at = {"Bucket": place.bucket, "Key": place.prefix.removesuffix("/")}

    def head(self) -> Head:
        try:
            found: Head | None = self._retrying()(self._head_once)
        except ObjectStoreError as error:
            raise ConfigError(f"{error}; the input cannot be read") from error
        if found is None:
            raise ConfigError(f"{self._place.uri}: there is no such object: see [input].paths, or --prompts")
        return found

    def copy(self, found: Head, file: BinaryIO) -> None:
        """Write all of it, however many requests that takes, as long as bytes keep coming."""
        while file.tell() < found.size_bytes:
            try:
                self._retrying()(self._copy_some, found, file)
            except ObjectStoreError as error:
                raise ConfigError(f"{error}; the input cannot be read") from error
            if self._stop.is_set():
                raise StoreError(f"{self._place.uri}: the copy was stopped")

    def _retrying(self) -> "tenacity.Retrying":
        import tenacity

        def is_worth_it(error: BaseException) -> bool:
            return isinstance(error, ObjectStoreError) and error.kind in _MAY_HELP

        return tenacity.Retrying(
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(self._tries), tenacity.stop_when_event_set(self._stop)
            ),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_S, max=PAUSE_MAX_S),
            retry=tenacity.retry_if_exception(is_worth_it),
            sleep=tenacity.sleep_using_event(self._stop),
            reraise=True,
        )

    def _head_once(self) -> Head | None:
        try:
            reply = unless_missing(self._client.head_object, **self._at)
        except Exception as error:  # the library raises more than its own errors
            raise trouble_of(error, self._place, "head") from error
        if reply is None:
            return None
        if not reply.get("ETag"):
            raise self._odd("its reply has no ETag, so perhaps it is no S3 store")
        return Head(size_bytes=int(reply["ContentLength"]), etag=str(reply["ETag"]).strip('"'))

    def _copy_some(self, found: Head, file: BinaryIO) -> None:
        """What one request gives; it is a failure only if that is nothing."""
        offset = file.tell()
        try:
            file.writelines(self._blocks(found, offset))
        except ObjectStoreError:
            if file.tell() == offset:
                raise
            self._stop.wait(BROKEN_PAUSE_S)

    def _blocks(self, found: Head, offset: int) -> Iterator[bytes]:
        last = min(offset + RANGE_BYTES, found.size_bytes) - 1
        try:
            reply = self._client.get_object(
                **self._at, Range=f"bytes={offset}-{last}", IfMatch=f'"{found.etag}"'
            )
            with closing(reply["Body"]) as body:
                self._demand_same(reply, found, offset)
                left = last + 1 - offset
                while left > 0 and (block := body.read(min(left, BLOCK_BYTES))):
                    left -= len(block)
                    yield block
                    if self._stop.is_set():
                        return
        except ConfigError:
            raise
        except Exception as error:  # the library raises more than its own errors
            # Of an error without a reply, the library's attribute is there, and None.
            reply = getattr(error, "response", None) or {}
            if reply.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
                raise self._changed() from error
            raise trouble_of(error, self._place, "get") from error
        if left > 0:
            raise self._odd(f"{left} bytes of a range did not come")

    def _demand_same(self, reply: dict[str, Any], found: Head, offset: int) -> None:
        """Some stores heed neither conditions nor ranges."""
        if str(reply.get("ETag", "")).strip('"') != found.etag:
            raise self._changed()
        begins_there = str(reply.get("ContentRange", "")).startswith(f"bytes {offset}-")
        if not begins_there and (offset > 0 or reply["ContentLength"] != found.size_bytes):
            raise ObjectStoreError(f"{self._place.uri}: the store gives no ranges", kind=TroubleKind.REFUSED)

    def _changed(self) -> ConfigError:
        return ConfigError(f"{self._place.uri} was replaced while it was copied: start again")

    def _odd(self, words: str) -> ObjectStoreError:
        return ObjectStoreError(f"{self._place.uri}: {words}", kind=TroubleKind.BROKEN)
