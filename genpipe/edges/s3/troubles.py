"""What an object store's errors mean: the kind, one line for the operator, and a count of them all."""

import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from genpipe.core.errors import ObjectStoreError, TroubleKind
from genpipe.edges.s3.place import Place

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

PERMISSIONS = {
    "put": "s3:PutObject",
    "get": "s3:GetObject",
    "head": "s3:GetObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
}
"""What each step needs to be allowed."""

_OPERATIONS = {"PutObject", "GetObject", "HeadObject", "ListObjectsV2", "DeleteObject", "HeadBucket"}
_KEYS_NEXT = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, to keys of this store"
_WORDS_MAX = 200

_KINDS = {
    TroubleKind.NO_BUCKET: ("NoSuchBucket", "InvalidBucketName"),
    TroubleKind.REGION: (
        "PermanentRedirect", "TemporaryRedirect", "Redirect", "IllegalLocationConstraintException",
        "InvalidRegion", "301", "307",
    ),
    TroubleKind.CREDENTIALS: (
        "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "ExpiredTokenException",
        "InvalidToken", "TokenRefreshRequired", "InvalidSecurity", "InvalidClientTokenId",
        "UnrecognizedClientException", "AuthFailure", "AuthorizationHeaderMalformed",
        "MissingSecurityHeader", "Unauthorized", "401",
    ),
    TroubleKind.CLOCK: ("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"),
    TroubleKind.DENIED: (
        "AccessDenied", "AccountProblem", "AllAccessDisabled", "NotSignedUp", "InvalidPayer", "Forbidden",
        "MethodNotAllowed", "403",
    ),
    TroubleKind.SLOW_DOWN: (
        "SlowDown", "ServiceUnavailable", "Throttling", "ThrottlingException", "ThrottledException",
        "RequestThrottled", "RequestLimitExceeded", "BandwidthLimitExceeded", "TooManyRequests", "429", "503",
    ),
    TroubleKind.TIMEOUT: ("RequestTimeout", "RequestTimeoutException", "408"),
    TroubleKind.BROKEN: (
        "InternalError", "ConditionalRequestConflict", "OperationAborted", "BadDigest", "InvalidDigest",
        "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch",
    ),
}  # fmt: skip

_KIND_OF = {code: kind for kind, codes in _KINDS.items() for code in codes}

_KEY_WORDS = {
    "InvalidAccessKeyId": "does not know the access key",
    "InvalidClientTokenId": "does not know the access key",
    "SignatureDoesNotMatch": "says that the secret key is not the access key's",
}


class Troubles:
    """Counts the tries that failed, by kind. Any number of threads may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last: str | None = None

    def note(self, error: ObjectStoreError) -> None:
        """One try failed so."""
        with self._lock:
            self._counts[error.kind.value] += 1
            self._last = str(error)

    def counts(self) -> dict[str, int]:
        """The tries that failed, by kind; kinds that did not occur are left out."""
        with self._lock:
            return dict(self._counts)

    def last(self) -> str | None:
        """The latest error's line."""
        with self._lock:
            return self._last

    def total(self) -> int:
        """All tries that failed."""
        with self._lock:
            return self._counts.total()


def trouble_of(error: Exception, place: Place, step: str) -> ObjectStoreError:
    """What an error of the S3 library means.

    Args:
        error: as it was raised by botocore, or below it.
        place: where that was.
        step: one of ``PERMISSIONS``.
    """
    from botocore.exceptions import ClientError
    from botocore.parsers import ResponseParserError

    if isinstance(error, ObjectStoreError):
        return error
    if isinstance(error, ClientError):
        kind, words = _of_reply(error, place, step)
    elif isinstance(error, ResponseParserError):
        kind, words = TroubleKind.BROKEN, f"{_no_store(place)}: its reply to {step} is not S3's"
    else:
        kind, words = _without_reply(error, place)
    return ObjectStoreError(f"{place.uri}: {words}", kind=kind)


def store_of(place: Place) -> str:
    """What the store is called in messages."""
    return f"the store at {place.endpoint_url}" if place.endpoint_url else "AWS"


def is_web_page(error: "ClientError") -> bool:
    """Whether the reply was a page for people: of a proxy, a portal, or of something that is no store."""
    if error.operation_name.startswith("Head"):
        # It has no body, whatever it says of its type.
        return False
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return "html" in headers.get("content-type", "")


def _no_store(place: Place) -> str:
    return f"what answers at {place.endpoint_url or 'AWS'} is perhaps no S3 store; look at s3.endpoint_url"


# ---- replies ----


def _of_reply(error: "ClientError", place: Place, step: str) -> tuple[TroubleKind, str]:
    fields: dict[str, Any] = dict(error.response.get("Error", {}))
    metadata: dict[str, Any] = dict(error.response.get("ResponseMetadata", {}))
    code, status = str(fields.get("Code", "")), int(metadata.get("HTTPStatusCode", 0))
    if error.operation_name not in _OPERATIONS:
        return TroubleKind.CREDENTIALS, f"keys cannot be fetched: {error.operation_name} gives {code}"
    kind = _KIND_OF.get(code) or _kind_of_status(status)
    if code == "400" and error.operation_name == "HeadObject":
        # Such a reply has no body: what a GET would tell is mostly that the keys have expired.
        kind = TroubleKind.CREDENTIALS
    region = _region_told(fields, metadata)
    if code == "AuthorizationHeaderMalformed" and region is not None:
        kind = TroubleKind.REGION
    if is_web_page(error) and kind not in (TroubleKind.SLOW_DOWN, TroubleKind.TIMEOUT):
        return TroubleKind.BROKEN, f"{_no_store(place)}: it answers {status} with a web page"
    store, said = store_of(place), _said(code, fields.get("Message"))
    words = {
        TroubleKind.NO_BUCKET: f"{store} has no bucket {place.bucket}: make it, or name another in s3.uri",
        TroubleKind.REGION: _region_words(place, region),
        TroubleKind.CREDENTIALS: _key_words(code, store),
        TroubleKind.CLOCK: _clock_words(metadata),
        TroubleKind.DENIED: (
            f"the keys do not allow {PERMISSIONS[step]} there ({said}): allow it, or use other keys"
        ),
        TroubleKind.SLOW_DOWN: f"{store} asks for fewer requests ({said})",
        TroubleKind.TIMEOUT: f"{store} lost patience with a request ({said})",
        TroubleKind.BROKEN: f"{store} failed at a {step} ({said})",
        TroubleKind.REFUSED: f"{store} refuses a {step} ({said}){_hint(place, step)}",
    }
    return kind, words[kind]


def _kind_of_status(status: int) -> TroubleKind:
    if status in (429, 503):
        return TroubleKind.SLOW_DOWN
    if status in (301, 307, 308):
        return TroubleKind.REGION
    # No store sends anybody elsewhere in this way: a portal or a proxy does, for a while.
    if status in (302, 303) or (status >= 500 and status != 501):
        return TroubleKind.BROKEN
    return TroubleKind.REFUSED


def _said(code: str, message: object) -> str:
    text = re.sub(r"\s+", " ", f"{code}: {message}" if message and message != code else code)
    return "".join(letter for letter in text if letter.isprintable()).strip()[:_WORDS_MAX]


def _region_told(fields: dict[str, Any], metadata: dict[str, Any]) -> str | None:
    told = fields.get("Region") or metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if not told and (found := re.search(r"expecting '([a-z0-9-]+)'", str(fields.get("Message")))):
        told = found[1]
    return str(told) if told and re.fullmatch(r"[A-Za-z0-9-]{1,40}", str(told)) else None


def _region_words(place: Place, region: str | None) -> str:
    if region is None:
        now = place.region or "the one in use"
        return f"bucket {place.bucket} is in another region than {now}: set s3.region"
    return f'bucket {place.bucket} is in region {region}: set s3.region = "{region}"'


def _key_words(code: str, store: str) -> str:
    if code.startswith(("ExpiredToken", "TokenRefresh")):
        return "the keys have expired: renew them where they come from, and they are read again"
    return f"{store} {_KEY_WORDS.get(code, 'does not take the keys')} ({code}): {_KEYS_NEXT}"


def _clock_words(metadata: dict[str, Any]) -> str:
    try:
        theirs_s = parsedate_to_datetime(metadata.get("HTTPHeaders", {}).get("date", "")).timestamp()
    except ValueError:
        return "this machine's clock is not the store's: set it right"
    ahead_s = round(time.time() - theirs_s)
    side = "ahead of" if ahead_s > 0 else "behind"
    return f"this machine's clock is {abs(ahead_s)} s {side} the store's: set it right"


def _hint(place: Place, step: str) -> str:
    if step in ("put", "get") and place.checksums == "when_supported":
        return ': s3.checksums = "when_required" helps with stores that do not know the newer checksums'
    return ""


# ---- no reply, or half of one ----


def _without_reply(error: Exception, place: Place) -> tuple[TroubleKind, str]:
    from botocore import exceptions as boto

    store = store_of(place)
    if (words := _about_keys(error)) is not None:
        return TroubleKind.CREDENTIALS, words
    if isinstance(error, boto.ConnectTimeoutError):
        return TroubleKind.TIMEOUT, f"{store} takes no connection"
    if isinstance(error, boto.ProxyConnectionError):
        return (
            TroubleKind.UNREACHABLE,
            f"the HTTP proxy on the way to {store} fails: look at HTTPS_PROXY and NO_PROXY",
        )
    if isinstance(error, boto.SSLError):
        return TroubleKind.UNREACHABLE, _tls_words(error, store)
    if isinstance(error, boto.FlexibleChecksumError):
        words = (
            f'{store} sends a checksum that its bytes do not have; s3.checksums = "when_required" ignores it'
        )
        return TroubleKind.BROKEN, words
    causes = list(_causes(error))
    if isinstance(error, boto.ReadTimeoutError) or any(isinstance(cause, TimeoutError) for cause in causes):
        return TroubleKind.TIMEOUT, f"{store} does not go on within {place.timeout_s:g} s"
    if isinstance(error, boto.EndpointConnectionError):
        return TroubleKind.UNREACHABLE, _unconnected_words(error, causes, place)
    if isinstance(error, boto.HTTPClientError | boto.IncompleteReadError | OSError):
        reason = _reason(causes)
        return TroubleKind.UNREACHABLE, f"{store} closes the connection too early" + (
            f" ({reason})" if reason else ""
        )
    if isinstance(error, ValueError) and str(error).startswith("Invalid endpoint"):
        return TroubleKind.REFUSED, f"{place.endpoint_url} is no address: see s3.endpoint_url"
    if not isinstance(error, boto.BotoCoreError):
        return TroubleKind.BROKEN, f"the S3 library fails ({type(error).__name__})"
    return TroubleKind.REFUSED, _said(type(error).__name__, error)


def _about_keys(error: Exception) -> str | None:
    from botocore import exceptions as boto

    if isinstance(error, RuntimeError) and "credentials are still expired" in str(error):
        return (
            "the keys have expired, and so have those fetched anew: see to where they come from, and to this "
            "machine's clock"
        )
    if isinstance(error, boto.NoCredentialsError):
        return f"no keys are found: {_KEYS_NEXT}"
    if isinstance(error, boto.CredentialRetrievalError):
        # What such a command prints may hold anything.
        provider = getattr(error, "kwargs", {}).get("provider", "")
        if provider == "custom-process":
            return "the command of credential_process fails: run it by hand to see why"
        return f"keys cannot be fetched from {provider or 'where they come from'}: see to it, or {_KEYS_NEXT}"
    told = (
        boto.PartialCredentialsError, boto.ProfileNotFound, boto.SSOError, boto.TokenRetrievalError,
        boto.NoAuthTokenError, boto.UnknownCredentialError, boto.MetadataRetrievalError,
        boto.ConfigParseError, boto.ConfigNotFound, boto.InvalidConfigError,
        getattr(boto, "LoginError", boto.SSOError),
    )  # fmt: skip
    return _said("keys cannot be read", error) if isinstance(error, told) else None


def _tls_words(error: Exception, store: str) -> str:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return (
                f"{store} shows a certificate that is not trusted ({cause.verify_message}): "
                "AWS_CA_BUNDLE names the file to trust"
            )
    return f"{store} does not speak TLS as it should: is it http:// instead of https://?"


def _unconnected_words(error: Exception, causes: list[BaseException], place: Place) -> str:
    from urllib.parse import urlsplit

    host = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url", ""))).netloc.rpartition("@")[2]
    hint = ""
    if place.endpoint_url and host.startswith(f"{place.bucket}."):
        hint = ": s3.path_style = true helps with stores that take the bucket in the path"
    return f"no connection to {host or store_of(place)} ({_reason(causes) or 'refused'}){hint}"


def _reason(causes: list[BaseException]) -> str:
    return next((cause.strerror for cause in causes if isinstance(cause, OSError) and cause.strerror), "")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what is inside it, however it is kept there."""
    seen: set[int] = set()
    open_ones: list[BaseException] = [error]
    while open_ones:
        cause = open_ones.pop(0)
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        inside = [cause.__cause__, cause.__context__, getattr(cause, "kwargs", {}).get("error"), *cause.args]
        open_ones += [other for other in inside if isinstance(other, BaseException)]
