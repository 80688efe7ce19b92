"""The object port over boto3: S3, and whatever speaks its language."""

import hashlib
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from genpipe.core.errors import ConfigError, ObjectStoreError, PreconditionFailed, TroubleKind
from genpipe.edges.s3.objects import TRIES, Fetched, Listed
from genpipe.edges.s3.place import Place
from genpipe.edges.s3.troubles import Troubles, is_web_page, store_of, trouble_of

if TYPE_CHECKING:
    import tenacity

Result = TypeVar("Result")

CONNECT_TIMEOUT_S = 10.0
"""Limit of connecting, and of writing one block, where ``timeout_s`` is not less (seconds)."""

CONNECTIONS = 32
"""Kept open at most (count)."""

PAUSE_S, PAUSE_MAX_S = 0.5, 10.0
"""Pauses between tries are drawn from 0 to this, doubled each time, up to the second (seconds)."""

_HOPELESS = {TroubleKind.NO_BUCKET, TroubleKind.DENIED, TroubleKind.REFUSED, TroubleKind.REGION}

_SESSIONS = threading.Lock()
"""Making sessions and clients is not thread-safe in the library; using them is."""


class BotoObjects:
    """The objects below a prefix; see ``Objects`` for what its methods do.

    A try ends by itself: connecting, and each block of 16 KiB written (a slow line is no dead one), within
    the lesser of 10 s and ``timeout_s``; the store's leave to send within 1 s; each wait for the reply within
    ``timeout_s``. Keys that expire are renewed by the library; where the store no longer takes keys that it
    took before, they are fetched anew from where they came from.

    Attributes:
        place: where it is.
        troubles: has every try that failed.
        is_conditional: whether conditions on a put are heeded; they are not sent if not.
        etag_is_md5: whether ETags are the MD5 of the bytes, as the probe saw.
    """

    def __init__(
        self, place: Place, troubles: Troubles, *, stop: threading.Event | None = None, session: Any = None
    ) -> None:
        """Read the keys and make the client.

        Args:
            place: where it is.
            troubles: told of every try that fails.
            stop: once set, nothing is tried again.
            session: a boto3 session to use; a new one if None.

        Raises:
            ConfigError: keys, profile or endpoint are not to be used.
        """
        self.place = place
        self.troubles = troubles
        self.is_conditional = True
        self.etag_is_md5 = False
        self._stop = stop or threading.Event()
        self._renewing = threading.Lock()
        self._has_worked = False
        try:
            self._session, self._client = _connect(place, session)
        except Exception as error:  # the library raises more than its own errors
            raise ConfigError(str(trouble_of(error, place, "put"))) from error

    @property
    def name(self) -> str:
        """The prefix, as it is shown."""
        return self.place.uri

    def like(self, *, stop: threading.Event | None = None, **changes: Any) -> "BotoObjects":
        """The same with the same keys, but for these fields of its place, and with a count of its own."""
        return BotoObjects(replace(self.place, **changes), Troubles(), stop=stop, session=self._session)

    def close(self) -> None:
        """Close idle connections. No method may be called afterwards."""
        self._client.close()

    # ---- the port ----

    def put(  # noqa: D102
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
        md5 = hashlib.md5(data, usedforsecurity=False)
        request: dict[str, Any] = {**self._at(key), "ContentMD5": b64encode(md5.digest()).decode()}
        if metadata:
            request["Metadata"] = dict(metadata)
        if if_none_match and self.is_conditional:
            request["IfNoneMatch"] = "*"
        if if_match is not None and self.is_conditional:
            request["IfMatch"] = f'"{if_match}"'

        def send(client: Any) -> str:
            with self._conditions(key, is_matching="IfMatch" in request):
                reply = client.put_object(Body=data, **request)
            return self._etag(reply, "put")

        def store() -> str:
            etag = self._try("put", send, tries)
            if verify:
                expected = md5.hexdigest() if self.etag_is_md5 else etag
                self._verify(key, len(data), expected, metadata or {}, tries)
            return etag

        return self._retrying(tries, lambda error: error.kind is TroubleKind.SHORT)(store)

    def get(self, key: str, *, tries: int = TRIES) -> Fetched | None:  # noqa: D102
        def read(client: Any) -> Fetched | None:
            reply = unless_missing(client.get_object, **self._at(key))
            if reply is None:
                return None
            with closing(reply["Body"]) as body:
                # The library sees to it that so many bytes come as the reply's head promises.
                data = bytes(body.read())
            return Fetched(
                data=data,
                etag=self._etag(reply, "get"),
                modified_at=reply["LastModified"],
                metadata=_lowered(reply.get("Metadata", {})),
            )

        return self._try("get", read, tries)

    def list(self, prefix: str, *, after: str = "", tries: int = TRIES) -> Iterator[Listed]:  # noqa: D102
        head = self.place.prefix
        while True:
            request = {"Bucket": self.place.bucket, "Prefix": head + prefix}
            if after:
                request["StartAfter"] = head + after
            page = self._try("list", _list_call(request), tries)
            if "IsTruncated" not in page:
                raise self._broken("its reply to list is not S3's")
            for found in page.get("Contents", []):
                key = str(found["Key"]).removeprefix(head)
                if key <= after:
                    raise self._broken(f"its listing has {key} behind {after}")
                yield Listed(key=key, size_bytes=int(found["Size"]), etag=str(found["ETag"]).strip('"'))
                after = key
            if not page["IsTruncated"]:
                return
            if not page.get("Contents"):
                raise self._broken("its listing has an empty page that is not the last")

    def delete(self, key: str, *, tries: int = TRIES) -> None:  # noqa: D102
        self._try("delete", lambda client: unless_missing(client.delete_object, **self._at(key)), tries)

    # ---- inside ----

    def _at(self, key: str) -> dict[str, str]:
        return {"Bucket": self.place.bucket, "Key": self.place.prefix + key}

    def _verify(self, key: str, size: int, etag: str, metadata: Mapping[str, str], tries: int) -> None:
        """See to it that the store has what was sent."""
        found = self._try("head", lambda client: unless_missing(client.head_object, **self._at(key)), tries)
        there = _lowered(found.get("Metadata", {})) if found else {}
        if found is None:
            wrong = "nothing is there"
        elif found["ContentLength"] != size:
            wrong = f"{found['ContentLength']} of {size} bytes are there"
        elif self._etag(found, "head") != etag:
            wrong = "other bytes are there"
        elif any(there.get(name.lower()) != value for name, value in metadata.items()):
            wrong = "its metadata is not there"
        else:
            return
        error = ObjectStoreError(
            f"{self.name}: {store_of(self.place)} confirmed {key}, and {wrong}", kind=TroubleKind.SHORT
        )
        self.troubles.note(error)
        raise error

    def _etag(self, reply: Mapping[str, Any], step: str) -> str:
        if not reply.get("ETag"):
            raise self._broken(f"its reply to {step} has no ETag, so perhaps it is no S3 store")
        return str(reply["ETag"]).strip('"')

    def _broken(self, words: str) -> ObjectStoreError:
        return ObjectStoreError(f"{self.name}: {store_of(self.place)}: {words}", kind=TroubleKind.BROKEN)

    def _conditions(self, key: str, *, is_matching: bool) -> "_Conditions":
        return _Conditions(f"{self.name}/{key} is there already, or has changed", is_matching)

    def _try(self, step: str, call: Callable[[Any], Result], tries: int) -> Result:
        """One step with whichever client is in use, noted and tried again."""
        last: ObjectStoreError | None = None

        def once() -> Result:
            nonlocal last
            if last is not None and self._stop.is_set():
                raise last
            client = self._client
            try:
                result = call(client)
            except PreconditionFailed:
                self._has_worked = True
                raise
            except Exception as error:  # the library raises more than its own errors
                last = trouble_of(error, self.place, step)
                self.troubles.note(last)
                if last.kind is TroubleKind.CREDENTIALS and self._has_worked:
                    self._renew(client)
                raise last from error
            self._has_worked = True
            return result

        return self._retrying(tries, self._may_help)(once)

    def _may_help(self, error: ObjectStoreError) -> bool:
        if isinstance(error, PreconditionFailed) or error.kind in _HOPELESS:
            return False
        return error.kind is not TroubleKind.CREDENTIALS or self._has_worked

    def _retrying(self, tries: int, helps: Callable[[ObjectStoreError], bool]) -> "tenacity.Retrying":
        import tenacity

        def is_worth_it(error: BaseException) -> bool:
            return isinstance(error, ObjectStoreError) and helps(error)

        return tenacity.Retrying(
            stop=tenacity.stop_any(
                tenacity.stop_after_attempt(tries), tenacity.stop_when_event_set(self._stop)
            ),
            wait=tenacity.wait_random_exponential(multiplier=PAUSE_S, max=PAUSE_MAX_S),
            retry=tenacity.retry_if_exception(is_worth_it),
            sleep=tenacity.sleep_using_event(self._stop),
            reraise=True,
        )

    def _renew(self, refused: Any) -> None:
        """Fetch the keys anew, unless another thread has done so since this client was refused."""
        with self._renewing:
            if self._client is not refused:
                return
            try:
                # Other threads may still be in a request of the old client: it is left to them.
                self._session, self._client = _connect(self.place, None)
            except Exception as error:  # the library raises more than its own errors
                self.troubles.note(trouble_of(error, self.place, "put"))


class _Conditions:
    """Turns what a store says of a condition that does not hold into the port's own error."""

    def __init__(self, words: str, is_matching: bool) -> None:
        self._words = words
        self._is_matching = is_matching

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from botocore.exceptions import ClientError

        if not isinstance(error, ClientError):
            return
        code, status = _code_of(error)
        # An object that is to have an ETag and is not there: some say 412, some 404.
        if status == 412 or (self._is_matching and code == "NoSuchKey"):
            raise PreconditionFailed(self._words) from error


def client_config(place: Place, **changes: Any) -> Any:
    """How the library is to behave, for everything that speaks to this place.

    Retries are the caller's; ``changes`` go to ``botocore.config.Config``.
    """
    from botocore.config import Config

    style = {None: "auto", True: "path", False: "virtual"}[place.path_style]
    settings: dict[str, Any] = {
        "connect_timeout": min(CONNECT_TIMEOUT_S, place.timeout_s),
        "read_timeout": place.timeout_s,
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": CONNECTIONS,
        "s3": {"addressing_style": style},
        "request_checksum_calculation": place.checksums,
        "response_checksum_validation": place.checksums,
        "tcp_keepalive": True,
    }
    return Config(**{**settings, **changes})


def connect(place: Place, **changes: Any) -> Any:
    """A client with keys read just now; may be shared by threads. ``changes`` as in :func:`client_config`.

    Raises:
        BotoCoreError: keys, profile or endpoint are not to be used.
    """
    return _connect(place, None, **changes)[1]


def _connect(place: Place, session: Any, **changes: Any) -> tuple[Any, Any]:
    import boto3

    with _SESSIONS:
        session = session or boto3.session.Session()
        return session, session.client(
            "s3",
            region_name=place.region,
            endpoint_url=place.endpoint_url,
            config=client_config(place, **changes),
        )


def unless_missing(call: Callable[..., dict[str, Any]], **request: Any) -> dict[str, Any] | None:
    """The reply to a request for an object, or None where there is no such object."""
    from botocore.exceptions import ClientError

    try:
        return call(**request)
    except ClientError as error:
        code, _ = _code_of(error)
        if code in ("NoSuchKey", "NotFound", "404") and not is_web_page(error):
            return None
        raise


def _list_call(request: dict[str, str]) -> Callable[[Any], dict[str, Any]]:
    return lambda client: client.list_objects_v2(**request)


def _code_of(error: Any) -> tuple[str, int]:
    code = error.response.get("Error", {}).get("Code", "")
    return str(code), int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _lowered(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in metadata.items()}
