"""The probe: small objects show, before the first prompt is sent, whether a run can be kept in a place."""

import contextlib
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from genpipe.core.errors import ConfigError, ObjectStoreError, PreconditionFailed, TroubleKind
from genpipe.edges.s3 import layout
from genpipe.edges.s3.boto import BotoObjects

if TYPE_CHECKING:
    from tenacity import RetryCallState

Result = TypeVar("Result")

TIMEOUT_S = 5.0
"""Limit of one wait for the store, where ``timeout_s`` is not less (seconds)."""

LIMIT_S = 15.0
"""Nothing is begun later than this (seconds)."""

_TRIES = {
    TroubleKind.SLOW_DOWN: 8,
    TroubleKind.BROKEN: 4,
    TroubleKind.UNREACHABLE: 2,
    TroubleKind.TIMEOUT: 2,
}
"""A store that is busy is asked again; one that is not there is told of soon."""

_AWAY = {TroubleKind.UNREACHABLE, TroubleKind.TIMEOUT}
_PASSING = {*_AWAY, TroubleKind.SLOW_DOWN, TroubleKind.BROKEN}
_OTHER_SETTINGS_MAY_HELP = {
    TroubleKind.REFUSED,
    TroubleKind.NO_BUCKET,
    TroubleKind.UNREACHABLE,
    TroubleKind.REGION,
    TroubleKind.BROKEN,
}


def probe(objects: BotoObjects) -> None:
    """Write, read, list and remove small objects; note what the store can do.

    Sets ``is_conditional`` and ``etag_is_md5`` of ``objects``. Takes some round trips, and at most some 20 s.

    Raises:
        ConfigError: it does not work; the message says what to set, or that the store is away.
    """
    quick = objects.like(timeout_s=min(TIMEOUT_S, objects.place.timeout_s))
    try:
        _Probe(quick).run()
    finally:
        quick.close()
    objects.is_conditional = quick.is_conditional
    objects.etag_is_md5 = quick.etag_is_md5


class _Probe:
    """One look at a place."""

    def __init__(self, objects: BotoObjects) -> None:
        self._objects = objects
        self._began_s = time.monotonic()
        self._key = layout.PROBE + secrets.token_hex(8)
        self._data = secrets.token_hex(512).encode()
        self._metadata = {"sha256": secrets.token_hex(32)}
        self._has_written = False

    def run(self) -> None:
        try:
            self._write()
            self._has_written = True
            self._read()
            self._condition()
            self._steadily(lambda: self._objects.delete(self._key, tries=1))
        except ObjectStoreError as error:
            if self._has_written or error.kind not in _AWAY:
                with contextlib.suppress(ObjectStoreError):
                    self._objects.delete(self._key, tries=1)
            raise ConfigError(self._advice(error)) from error

    def _write(self) -> None:
        """A first object; one that is not wanted with a condition is perhaps wanted without."""
        try:
            self._steadily(lambda: self._put(if_none_match=True))
        except PreconditionFailed:
            # An earlier try of this very put was carried out, and its reply was lost.
            return
        except ObjectStoreError as error:
            if error.kind is not TroubleKind.REFUSED:
                raise
            self._steadily(self._put)
            self._objects.is_conditional = False

    def _read(self) -> None:
        found = self._steadily(lambda: self._objects.get(self._key, tries=1))
        if found is None or found.data != self._data:
            raise self._odd("does not give back what was put there")
        self._objects.etag_is_md5 = found.etag == _md5(self._data)
        listed = self._steadily(lambda: list(self._objects.list(self._key, tries=1)))
        if [(one.key, one.size_bytes) for one in listed] != [(self._key, len(self._data))]:
            raise self._odd("does not list what was put there")

    def _condition(self) -> None:
        """Conditions count only if they are heeded: some stores take them and write all the same."""
        wrong_etag = _md5(b"another")
        for condition in ({"if_none_match": True}, {"if_match": wrong_etag}):
            if self._objects.is_conditional and not self._is_heeded(condition):
                self._objects.is_conditional = False

    def _is_heeded(self, condition: dict[str, Any]) -> bool:
        try:
            self._steadily(lambda: self._put(**condition))
        except PreconditionFailed:
            return True
        except ObjectStoreError as error:
            if error.kind is not TroubleKind.REFUSED:
                raise
        return False

    def _put(self, **condition: Any) -> str:
        return self._objects.put(self._key, self._data, metadata=self._metadata, tries=1, **condition)

    def _steadily(self, step: Callable[[], Result]) -> Result:
        """One step, tried again as long as that may help and there is time."""
        import tenacity

        def is_worth_it(error: BaseException) -> bool:
            return isinstance(error, ObjectStoreError) and not isinstance(error, PreconditionFailed)

        def is_enough(state: "RetryCallState") -> bool:
            error = state.outcome.exception() if state.outcome else None
            kind = error.kind if isinstance(error, ObjectStoreError) else TroubleKind.REFUSED
            return state.attempt_number >= _TRIES.get(kind, 1) or self._is_late()

        if self._is_late():
            raise self._odd("takes too long", TroubleKind.TIMEOUT)
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_worth_it),
            stop=is_enough,
            wait=tenacity.wait_random_exponential(multiplier=0.25, max=2.0),
            reraise=True,
        )(step)

    def _is_late(self) -> bool:
        return time.monotonic() - self._began_s > LIMIT_S

    def _odd(self, words: str, kind: TroubleKind = TroubleKind.SHORT) -> ObjectStoreError:
        return ObjectStoreError(f"{self._objects.name}: the store {words}", kind=kind)

    # ---- what to change ----

    def _advice(self, error: ObjectStoreError) -> str:
        in_doubt = error.kind in _OTHER_SETTINGS_MAY_HELP and not self._has_written
        if (in_doubt or error.kind is TroubleKind.REFUSED) and (setting := self._what_works()) is not None:
            return f"{self._objects.name}: the store takes writes with other settings only: set {setting}"
        if error.kind in _PASSING:
            return f"{error}; see to it, or start without --s3: a later start with it uploads everything"
        return str(error)

    def _what_works(self) -> str | None:
        """The settings with which an object can be put and read, found by trying."""
        place = self._objects.place
        checksums = {"checksums": "when_required"} if place.checksums == "when_supported" else {}
        # As the library decides, the bucket of an address of one's own stands in the path.
        style = {"path_style": place.path_style is False} if place.endpoint_url else {}
        for changes in (checksums, style, {**checksums, **style}):
            if changes and self._works_with(changes):
                return " and ".join(f"s3.{name} = {_toml(value)}" for name, value in changes.items())
        return None

    def _works_with(self, changes: dict[str, Any]) -> bool:
        if self._is_late():
            return False
        other = self._objects.like(**changes)
        other.is_conditional = False
        try:
            other.put(self._key, self._data, metadata=self._metadata, tries=1)
            found = other.get(self._key, tries=1)
            other.delete(self._key, tries=1)
        except ObjectStoreError:
            return False
        finally:
            other.close()
        return found is not None and found.data == self._data


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def _md5(data: bytes) -> str:
    import hashlib

    return hashlib.md5(data, usedforsecurity=False).hexdigest()
