"""The object port over boto3 when the store, the line to it, or the keys make trouble."""

import contextlib
import json
import re
import secrets
import socket
import sys
import threading
import time
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import md5
from unittest.mock import Mock

import pytest

from genpipe.core.errors import ConfigError, ObjectStoreError, PreconditionFailed, StoreError, TroubleKind
from genpipe.edges.s3 import boto
from genpipe.edges.s3.boto import BotoObjects
from genpipe.edges.s3.download import download, head
from genpipe.edges.s3.place import Place
from genpipe.edges.s3.troubles import Troubles
from tests.faults.soak import SOAK
from tests.s3.proxy import FaultProxy
from tests.s3.servers import BUCKET, KEY_ID, SECRET

NEW_KEY_ID = "AKIAGENPIPETESTS0002"


@pytest.fixture
def quick(monkeypatch):
    """Pauses between tries are short."""
    monkeypatch.setattr(boto, "PAUSE_S", 0.02)
    monkeypatch.setattr(boto, "PAUSE_MAX_S", 0.1)


@pytest.fixture
def proxy(moto, aws):
    aws(moto)
    with FaultProxy(moto.url) as found:
        yield found


@pytest.fixture
def make(moto, proxy):
    """Makes the port on a prefix of its own, by way of the proxy."""
    with contextlib.ExitStack() as stack:

        def objects(*, stop=None, **changes):
            settings = {"endpoint_url": proxy.url, **changes}
            found = BotoObjects(moto.place(secrets.token_hex(4), **settings), Troubles(), stop=stop)
            stack.callback(found.close)
            return found

        yield objects


def number_in(text, pattern):
    """The number that a pattern finds."""
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])


def failed(call, *args, **options):
    """The error that a step ends with, whose line can be shown to anybody."""
    with pytest.raises(ObjectStoreError) as caught:
        call(*args, **options)
    line = str(caught.value)
    assert "\n" not in line
    assert SECRET not in line
    assert KEY_ID not in line
    assert len(line) < 400
    return caught.value


# ---- what passes ----


def test_all_objects_arrive_where_three_puts_in_ten_are_told_to_slow_down(quick, make, proxy, moto):
    objects = make()
    fault = proxy.answer("SlowDown", method="PUT", share=0.3)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: objects.put(f"{number:03d}", b"x" * number, tries=12), range(100)))

    assert [(one.key, one.size_bytes) for one in objects.list("")] == [(f"{n:03d}", n) for n in range(100)]
    assert fault.hits > 15
    assert objects.troubles.counts() == {"slow_down": fault.hits}
    assert objects.troubles.total() == fault.hits
    assert "asks for fewer requests" in objects.troubles.last()


def test_a_put_that_is_reset_half_way_is_sent_again_whole(quick, make, proxy):
    objects, data = make(), secrets.token_bytes(3_000_000)
    proxy.reset(method="PUT", after_bytes=1_000_000, times=1)
    objects.put("a", data)

    assert objects.get("a").data == data
    assert proxy.count("PUT") == 2
    assert objects.troubles.counts() == {"unreachable": 1}


def test_a_put_whose_reply_is_lost_is_sent_again(quick, make, proxy):
    objects = make()
    proxy.drop_reply(method="PUT", times=1)
    objects.put("a", b"one")

    assert objects.get("a").data == b"one"
    assert objects.troubles.counts() == {"unreachable": 1}


def test_a_conditional_put_whose_reply_is_lost_finds_its_own_object(quick, make, proxy):
    objects = make()
    proxy.drop_reply(method="PUT", times=1)
    with pytest.raises(PreconditionFailed):
        objects.put("a", b"ours", if_none_match=True)

    assert objects.get("a").data == b"ours"
    # The refusal itself is an answer, not trouble.
    assert objects.troubles.counts() == {"unreachable": 1}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ConditionalRequestConflict", "broken"),
        ("InternalError", "broken"),
        ("TooManyRequests", "slow_down"),
        ("BadDigest", "broken"),
        ("RequestTimeout", "timeout"),
        ("Overloaded", "slow_down"),
        ("OutOfOrder", "broken"),
    ],
)
def test_what_passes_by_itself_is_waited_for(quick, make, proxy, code, kind):
    objects = make()
    status = {"BadDigest": 400, "RequestTimeout": 400, "Overloaded": 503, "OutOfOrder": 507}.get(code)
    proxy.answer(code, status=status, method="PUT", times=2)
    objects.put("a", b"one", if_none_match=True)

    assert objects.troubles.counts() == {kind: 2}


def test_a_clock_that_is_off_is_waited_for_and_told_in_seconds(quick, make, proxy):
    objects = make()
    proxy.answer("RequestTimeTooSkewed", method="PUT", times=2, date=time.time() + 3600)
    objects.put("a", b"one")
    behind = objects.troubles.last()
    proxy.answer("RequestTimeTooSkewed", method="PUT", date=time.time() - 1200)
    ahead = str(failed(objects.put, "b", b"one", tries=1))

    assert objects.troubles.counts() == {"clock": 3}
    assert number_in(behind, r"clock is (\d+) s behind the store's") == pytest.approx(3600, abs=5)
    assert number_in(ahead, r"clock is (\d+) s ahead of the store's") == pytest.approx(1200, abs=5)


def test_a_reply_that_breaks_off_is_read_again(quick, make, proxy):
    objects, data = make(), secrets.token_bytes(300_000)
    objects.put("a", data)
    proxy.cut_reply(1000, method="GET", times=2)

    assert objects.get("a").data == data
    assert objects.troubles.counts() == {"unreachable": 2}


def test_a_page_of_a_listing_is_asked_for_again_and_no_name_comes_twice(quick, make, proxy):
    objects = make()
    names = [f"{number:06d}" for number in range(1100)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: objects.put(name, b"", verify=False), names))
    proxy.answer("SlowDown", times=2, when=lambda request: "start-after" in request.path)

    assert [found.key for found in objects.list("")] == names
    assert objects.troubles.counts() == {"slow_down": 2}


def test_a_store_that_was_away_is_found_again(quick, make, proxy):
    objects = make()
    objects.put("a", b"one")
    proxy.refuse()
    error = failed(objects.put, "a", b"two", tries=2)
    proxy.accept()
    objects.put("a", b"three")

    assert error.kind is TroubleKind.UNREACHABLE
    assert f"no connection to {proxy.url.removeprefix('http://')} (Connection refused)" in str(error)
    assert objects.troubles.counts() == {"unreachable": 2}
    assert objects.get("a").data == b"three"


@pytest.mark.parametrize(
    ("status", "headers", "body", "tries"),
    [
        # Where it is sent elsewhere the library itself asks a second time.
        (302, {"Location": "http://127.0.0.1:9/login"}, b"", 1),
        (200, {"ETag": '"abc"'}, b"abc", 2),
    ],
    ids=["sent elsewhere", "no time"],
)
def test_a_reply_that_is_none_of_a_stores_is_one_line_and_is_tried_again(
    quick, make, proxy, status, headers, body, tries
):
    objects = make()
    objects.put("a", b"one")
    proxy.answer("odd", status=status, headers=headers, body=body, method="GET", times=2)

    assert objects.get("a").data == b"one"
    assert objects.troubles.counts() == {"broken": tries}
    assert "\n" not in objects.troubles.last()


# ---- what does not pass ----


@pytest.mark.parametrize(
    ("code", "answer", "kind", "words"),
    [
        ("NoSuchBucket", {}, "no_bucket", "has no bucket runs: make it, or name another in s3.uri"),
        ("AccessDenied", {}, "denied", "do not allow s3:PutObject there"),
        ("PermanentRedirect", {}, "region", "in another region than us-east-1: set s3.region"),
        ("IllegalLocationConstraintException", {"status": 400}, "region", "set s3.region"),
        (
            "AuthorizationHeaderMalformed",
            {"fields": {"Region": "eu-west-3"}},
            "region",
            'bucket runs is in region eu-west-3: set s3.region = "eu-west-3"',
        ),
        ("InvalidAccessKeyId", {}, "credentials", "does not know the access key"),
        ("SignatureDoesNotMatch", {}, "credentials", "secret key is not the access key's"),
        ("ExpiredToken", {}, "credentials", "the keys have expired: renew them where they come from"),
        ("InvalidArgument", {}, "refused", 's3.checksums = "when_required" helps'),
        ("MissingContentLength", {}, "refused", 's3.checksums = "when_required" helps'),
        ("NotImplemented", {}, "refused", 's3.checksums = "when_required" helps'),
        ("Teapot", {"status": 418}, "refused", "refuses a put (Teapot: Teapot says the proxy)"),
    ],
)
def test_what_the_operator_must_mend_is_said_at_once(quick, make, proxy, code, answer, kind, words):
    objects = make()
    proxy.answer(code, **{"method": "PUT", **answer})
    error = failed(objects.put, "a", b"one")

    assert error.kind.value == kind
    assert words in str(error)
    assert str(error).startswith(f"{objects.name}: ")
    # Of a bucket in another region the library asks once more by itself.
    assert proxy.count("PUT") == (2 if kind == "region" else 1)
    assert objects.troubles.counts() == {kind: 1}


def test_a_missing_bucket_is_never_taken_for_a_missing_object(quick, make, proxy):
    objects = make()
    proxy.answer("NoSuchBucket", method="GET")

    assert failed(objects.get, "a").kind is TroubleKind.NO_BUCKET
    assert failed(lambda: list(objects.list(""))).kind is TroubleKind.NO_BUCKET


@pytest.mark.parametrize("text", [b"<html><p>lost</p></html>", b"<html><p>lost", b""])
def test_a_web_page_is_never_taken_for_a_missing_object(quick, make, proxy, text):
    objects, page = make(), {"headers": {"Content-Type": "text/html"}, "body": text}
    proxy.answer("Not Found", status=404, **page)
    for call in (lambda: objects.get("a", tries=2), lambda: list(objects.list("", tries=2))):
        error = failed(call)
        assert error.kind is TroubleKind.BROKEN
        assert "perhaps no S3 store; look at s3.endpoint_url: it answers 404 with a web page" in str(error)
    proxy.clear()
    proxy.answer("OK", status=200, **page)
    for call in (
        lambda: objects.put("a", b"", tries=2),
        lambda: objects.get("a", tries=2),
        lambda: list(objects.list("", tries=2)),
    ):
        error = failed(call)
        assert error.kind is TroubleKind.BROKEN
        assert "S3" in str(error)


def listing(*names, is_truncated):
    found = "".join(f"<Contents><Key>{name}</Key><Size>1</Size><ETag>0</ETag></Contents>" for name in names)
    flag = str(is_truncated).lower()
    return f"<ListBucketResult><IsTruncated>{flag}</IsTruncated>{found}</ListBucketResult>".encode()


@pytest.mark.parametrize(
    ("names", "is_truncated", "words"),
    [(["a", "c", "b"], False, "has b behind c"), (["a"], True, "has a behind a"), ([], True, "empty page")],
)
def test_a_listing_that_cannot_be_is_not_believed(quick, make, proxy, names, is_truncated, words):
    objects = make()
    body = listing(*(objects.place.prefix + name for name in names), is_truncated=is_truncated)
    proxy.answer("OK", status=200, when=lambda request: "list-type" in request.path, body=body)
    error = failed(lambda: list(objects.list("")))

    assert error.kind is TroubleKind.BROKEN
    assert words in str(error)


def test_an_address_that_is_none_or_a_profile_that_is_none_is_the_operators(moto, aws, monkeypatch):
    aws(moto)
    with pytest.raises(ConfigError, match="is no address"):
        BotoObjects(Place(uri="s3://runs/a", endpoint_url="nonsense"), Troubles())
    monkeypatch.setenv("AWS_PROFILE", "elsewhere")
    with pytest.raises(ConfigError, match=r"s3://runs/a: keys cannot be read.*elsewhere"):
        BotoObjects(moto.place("a"), Troubles())


def test_no_keys_at_all_are_told_before_anything_is_sent(quick, make, proxy, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    objects = make()
    error = failed(objects.put, "a", b"one")

    assert error.kind is TroubleKind.CREDENTIALS
    assert "no keys are found: set AWS_PROFILE" in str(error)
    assert proxy.count() == 0


# ---- time ----


@pytest.mark.parametrize("size", [10, 8_000_000])
def test_a_store_that_never_answers_costs_its_timeout_for_each_try(quick, make, proxy, size):
    objects = make(timeout_s=1.0)
    proxy.black_hole(method="PUT")
    began_s = time.monotonic()
    error = failed(objects.put, "a", bytes(size), tries=2)
    took_s = time.monotonic() - began_s

    assert error.kind is TroubleKind.TIMEOUT
    assert "does not go on within 1 s" in str(error)
    # The library waits another second for leave to send the body.
    assert 2.0 <= took_s < 5.0
    assert objects.troubles.counts() == {"timeout": 2}


def test_a_store_that_takes_no_more_bytes_costs_its_timeout(quick, moto, aws):
    aws(moto)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        objects = BotoObjects(moto.place("a", endpoint_url=url, timeout_s=1.0), Troubles())
        began_s = time.monotonic()
        error = failed(objects.put, "a", bytes(40_000_000), tries=1)
        took_s = time.monotonic() - began_s
        objects.close()

    assert error.kind is TroubleKind.TIMEOUT
    assert took_s < 4.0


def test_a_slow_line_that_keeps_moving_is_no_timeout(quick, make, proxy):
    objects, data = make(timeout_s=2.5), bytes(30_000_000)
    proxy.rate_bytes_per_s = 8_000_000
    proxy.answer("OK", status=200, method="PUT", headers={"ETag": '"0"'}, body=b"")
    began_s = time.monotonic()
    objects.put("a", data, tries=1, verify=False)

    assert time.monotonic() - began_s > 3.0
    assert objects.troubles.total() == 0


def test_a_stop_ends_the_pause_and_nothing_is_tried_again(make, proxy, monkeypatch):
    monkeypatch.setattr(boto, "PAUSE_S", 1e6)
    monkeypatch.setattr(boto, "PAUSE_MAX_S", 1e6)
    stop = threading.Event()
    objects = make(stop=stop)
    proxy.answer("SlowDown")
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    began_s = time.monotonic()
    error = failed(objects.put, "a", b"one")
    took_s = time.monotonic() - began_s
    timer.join()

    assert error.kind is TroubleKind.SLOW_DOWN
    assert 0.2 < took_s < 2.0
    assert proxy.count("PUT") == 1
    assert objects.troubles.total() == 1


# ---- what is stored is what was sent ----


def test_a_put_is_signed_for_the_region_and_carries_the_md5_of_its_bytes(quick, make, proxy):
    make(region="eu-west-3").put("a", b"one")
    (put,) = proxy.seen("PUT")

    assert "/eu-west-3/s3/aws4_request" in put.headers["authorization"]
    assert put.headers["content-md5"] == b64encode(md5(b"one").digest()).decode()


@pytest.mark.parametrize("is_md5", [False, True])
def test_a_put_that_was_confirmed_and_is_short_is_sent_again(quick, make, proxy, is_md5):
    objects = make()
    objects.etag_is_md5 = is_md5
    proxy.truncate(10, method="PUT", times=2)
    objects.put("a", b"x" * 5000)

    assert objects.get("a").data == b"x" * 5000
    assert objects.troubles.counts() == {"short": 2}
    assert "confirmed a, and 10 of 5000 bytes are there" in objects.troubles.last()


def test_other_bytes_of_the_same_length_are_seen_where_the_etag_tells_them(quick, make, proxy):
    objects = make()
    objects.etag_is_md5 = True
    proxy.corrupt(method="PUT", times=1)
    objects.put("a", b"x" * 5000)

    assert objects.get("a").data == b"x" * 5000
    assert objects.troubles.counts() == {"short": 1}


def test_metadata_that_does_not_arrive_is_seen(quick, make, proxy):
    objects = make()
    proxy.strip_headers("x-amz-meta-.*", method="PUT", times=1)
    objects.put("a", b"one", metadata={"sha256": "ab"})

    assert objects.get("a").metadata == {"sha256": "ab"}
    assert objects.troubles.counts() == {"short": 1}


def test_a_store_that_loses_what_it_confirmed_is_told_of(quick, make, proxy):
    objects = make()
    proxy.answer("NoSuchKey", status=404, method="HEAD", body=b"")
    error = failed(objects.put, "a", b"one", tries=2)

    assert error.kind is TroubleKind.SHORT
    assert "confirmed a, and nothing is there" in str(error)
    assert objects.troubles.counts() == {"short": 2}


def test_a_look_that_fails_is_repeated_and_the_object_is_not_sent_again(quick, make, proxy):
    objects = make()
    proxy.answer("SlowDown", method="HEAD", times=2)
    objects.put("a", b"one", if_none_match=True)

    assert proxy.count("PUT") == 1
    assert objects.troubles.counts() == {"slow_down": 2}


def test_a_short_object_that_may_only_be_created_is_left_to_the_caller(quick, make, proxy):
    objects = make()
    proxy.truncate(10, method="PUT", times=1)
    with pytest.raises(PreconditionFailed):
        objects.put("a", b"x" * 5000, if_none_match=True)

    assert objects.troubles.counts() == {"short": 1}


def test_conditions_are_not_sent_to_a_store_that_does_not_know_them(quick, make, proxy):
    objects = make()
    objects.is_conditional = False
    conditions = {"if-none-match", "if-match"}
    proxy.answer("NotImplemented", when=lambda request: bool(conditions & set(request.headers)))
    objects.put("a", b"one", if_none_match=True)
    objects.put("a", b"two", if_match="0" * 32)

    assert objects.get("a").data == b"two"


# ---- keys that expire ----


def replace_file(path, text):
    """At once: nobody reads half of it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def keys_from_a_process(folder, monkeypatch):
    """Keys come from a command, which reads them from a file."""
    keys, config = folder / "keys.json", folder / "config"
    script = folder / "fetch.py"
    script.write_text(f"import sys\nsys.stdout.write(open({str(keys)!r}).read())\n")
    config.write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))

    def write(key_id):
        told = {"Version": 1, "AccessKeyId": key_id, "SecretAccessKey": SECRET, "SessionToken": "t"}
        replace_file(keys, json.dumps(told))

    return write


def keys_from_a_file(folder, monkeypatch):
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))

    def write(key_id):
        lines = ["[default]", f"aws_access_key_id = {key_id}", f"aws_secret_access_key = {SECRET}", ""]
        replace_file(folder / "credentials", "\n".join(lines))

    return write


@pytest.fixture(params=[keys_from_a_process, keys_from_a_file])
def keys(request, tmp_path, monkeypatch, proxy):
    """Gives a function that says which keys there are from now on."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    write = request.param(tmp_path, monkeypatch)
    write(KEY_ID)
    return write


@pytest.mark.parametrize(
    "code", ["ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"]
)
def test_keys_that_expire_are_fetched_anew(quick, make, proxy, keys, code):
    objects = make()
    objects.put("a", b"one")
    refused = proxy.answer(code, when=lambda request: request.access_key == KEY_ID)
    # The new ones are there some tries later only.
    issuer = threading.Thread(target=act_after, args=[lambda: refused.hits >= 2, lambda: keys(NEW_KEY_ID)])
    issuer.start()
    objects.put("b", b"two", tries=40)
    issuer.join()

    assert objects.get("b").data == b"two"
    assert {request.access_key for request in proxy.seen()} == {KEY_ID, NEW_KEY_ID}
    assert objects.troubles.counts() == {"credentials": refused.hits}
    assert refused.hits >= 2


def act_after(condition, action):
    deadline_s = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    action()


def test_eight_uploads_whose_keys_expire_at_once_all_arrive(quick, make, proxy, keys, monkeypatch):
    connected = Mock(wraps=boto._connect)
    monkeypatch.setattr(boto, "_connect", connected)
    objects = make()
    objects.put("a", b"one")
    keys(NEW_KEY_ID)
    proxy.answer("ExpiredToken", when=lambda request: request.access_key == KEY_ID)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: objects.put(f"b{number}", b"two"), range(16)))

    assert len(list(objects.list("b"))) == 16
    assert 1 <= objects.troubles.counts()["credentials"] <= 8
    # At the start, and once for all.
    assert connected.call_count == 2


def test_keys_that_expire_between_a_put_and_the_look_at_it_are_fetched_anew(quick, make, proxy, keys):
    objects = make()
    objects.put("a", b"one")
    keys(NEW_KEY_ID)
    proxy.answer("ExpiredToken", method="HEAD", body=b"", when=lambda request: request.access_key == KEY_ID)
    objects.put("b", b"two", if_none_match=True)

    assert objects.troubles.counts() == {"credentials": 1}


def test_keys_that_stay_expired_are_told_of_after_the_last_try(quick, make, proxy, keys):
    objects = make()
    objects.put("a", b"one")
    proxy.answer("ExpiredToken")
    error = failed(objects.put, "b", b"two", tries=3)

    assert error.kind is TroubleKind.CREDENTIALS
    assert objects.troubles.counts() == {"credentials": 3}


def test_a_command_for_keys_that_fails_is_told_of_without_what_it_said(make, proxy, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    write = keys_from_a_process(tmp_path, monkeypatch)
    write(KEY_ID)
    (tmp_path / "fetch.py").write_text(f"raise SystemExit({SECRET!r})")
    with pytest.raises(ConfigError) as caught:
        make()

    assert "credential_process fails: run it by hand to see why" in str(caught.value)
    assert SECRET not in str(caught.value)


# ---- threads ----


def test_cold_starts_with_eight_threads_all_upload(quick, make, proxy, moto):
    for start in range(50 if SOAK > 1 else 15):
        objects = make(endpoint_url=moto.url)
        gate = threading.Barrier(8, timeout=10)

        def upload(number, objects=objects, gate=gate):
            gate.wait()
            objects.put(f"{number}", b"x", verify=False, tries=1)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(upload, range(8)))
        assert objects.troubles.total() == 0, start


def test_clients_that_are_made_by_many_threads_at_once_all_work(make, moto, proxy):
    gate = threading.Barrier(8, timeout=30)

    def begin(number):
        gate.wait()
        objects = make(endpoint_url=moto.url)
        objects.put("a", b"x", tries=1)
        return objects.get("a").data

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(begin, range(8))) == [b"x"] * 8


# ---- checksums over TLS ----


def test_a_checksum_that_follows_the_body_is_kept_with_the_object(weed, aws):
    aws(weed)
    objects = BotoObjects(weed.place(secrets.token_hex(4), tls=True), Troubles())
    objects.put("a", b"x" * 200_000)
    found = weed.client().head_object(Bucket=BUCKET, Key=f"{objects.place.prefix}a", ChecksumMode="ENABLED")
    objects.close()

    assert found["ChecksumCRC32"]


def test_a_store_without_the_newer_checksums_takes_objects_over_tls_with_the_setting(rclone, aws):
    aws(rclone)
    place = rclone.place(secrets.token_hex(4), tls=True, checksums="when_supported")
    refused = BotoObjects(place, Troubles())
    error = failed(refused.put, "a", b"one")
    objects = refused.like(checksums="when_required")
    objects.put("a", b"one", metadata={"sha256": "ab"})
    found = objects.get("a")
    refused.close()
    objects.close()
    assert found is not None

    assert error.kind is TroubleKind.REFUSED
    assert 's3.checksums = "when_required"' in str(error)
    assert (found.data, found.metadata) == (b"one", {"sha256": "ab"})


def test_a_certificate_that_is_not_trusted_is_told_of(quick, weed, aws, monkeypatch):
    aws(weed)
    monkeypatch.delenv("AWS_CA_BUNDLE")
    objects = BotoObjects(weed.place("a", tls=True), Troubles())
    error = failed(objects.put, "a", b"one", tries=1)
    objects.close()
    plain = BotoObjects(weed.place("a", endpoint_url=weed.url.replace("http:", "https:")), Troubles())
    other = failed(plain.put, "a", b"one", tries=1)
    plain.close()

    assert error.kind is TroubleKind.UNREACHABLE
    assert re.search(
        r"certificate that is not trusted \(self.signed certificate\): AWS_CA_BUNDLE", str(error)
    )
    assert "does not speak TLS as it should: is it http:// instead of https://?" in str(other)


# ---- whole objects into files ----


@pytest.fixture
def ranges(monkeypatch):
    monkeypatch.setattr("genpipe.edges.s3.download.RANGE_BYTES", 1_000_000)
    monkeypatch.setattr("genpipe.edges.s3.download.BLOCK_BYTES", 50_000)
    monkeypatch.setattr("genpipe.edges.s3.download.PAUSE_S", 0.02)
    monkeypatch.setattr("genpipe.edges.s3.download.PAUSE_MAX_S", 0.1)


def object_of(moto, proxy, data):
    key = secrets.token_hex(4) + "/in.jsonl"
    moto.write(key, data)
    return moto.place(key, endpoint_url=proxy.url)


@pytest.mark.parametrize("size", [0, 1, 1_000_000, 2_345_678])
def test_an_object_is_copied_into_a_file_range_by_range(ranges, moto, proxy, tmp_path, size):
    data = secrets.token_bytes(size)
    place = object_of(moto, proxy, data)
    (tmp_path / "in.jsonl").write_bytes(b"older")
    found = download(place, tmp_path / "in.jsonl")

    assert found == head(place, stop=threading.Event()) == (size, found.etag)
    assert (tmp_path / "in.jsonl").read_bytes() == data
    assert not (tmp_path / "in.jsonl.part").exists()
    assert proxy.count("GET") == -(-size // 1_000_000)


def test_a_copy_goes_on_where_the_connection_broke(ranges, moto, proxy, tmp_path):
    data = secrets.token_bytes(2_345_678)
    place = object_of(moto, proxy, data)
    proxy.cut_reply(300_000, method="GET", times=7)
    download(place, tmp_path / "in.jsonl")

    assert (tmp_path / "in.jsonl").read_bytes() == data
    begins = [number_in(one.headers["range"], r"bytes=(\d+)-") for one in proxy.seen("GET")]
    assert begins == sorted(begins)
    assert begins[1] > 0


@pytest.mark.parametrize("fault", ["reset", "drop_reply", "black_hole"])
def test_a_copy_whose_connection_gives_nothing_is_tried_again(ranges, moto, proxy, tmp_path, fault):
    data = secrets.token_bytes(1_500_000)
    place = replace(object_of(moto, proxy, data), timeout_s=0.5)
    getattr(proxy, fault)(method="GET", times=1)
    download(place, tmp_path / "in.jsonl")

    assert (tmp_path / "in.jsonl").read_bytes() == data


def test_a_copy_that_brings_nothing_more_ends(ranges, moto, proxy, tmp_path):
    place = object_of(moto, proxy, secrets.token_bytes(1_500_000))
    proxy.answer("SlowDown", method="GET", skip=1)
    with pytest.raises(ConfigError, match=r"asks for fewer requests.*the input cannot be read"):
        download(place, tmp_path / "in.jsonl")

    assert proxy.count("GET") == 1 + 5
    assert not (tmp_path / "in.jsonl").exists()
    assert not (tmp_path / "in.jsonl.part").exists()


def replaced_at_the_second_read(moto, proxy, place):
    """Says yes to all requests, and has the object replaced once its second range is asked for."""

    def look(request):
        if proxy.count("GET") == 2:
            moto.write(place.prefix.removesuffix("/"), bytes(1_500_000))
        return True

    return look


def test_an_object_that_is_replaced_during_the_copy_is_told_of(ranges, moto, proxy, tmp_path):
    place = object_of(moto, proxy, secrets.token_bytes(1_500_000))
    proxy.delay(0, method="GET", when=replaced_at_the_second_read(moto, proxy, place))
    with pytest.raises(ConfigError, match="was replaced while it was copied: start again"):
        download(place, tmp_path / "in.jsonl")


def test_a_replaced_object_is_also_told_of_where_conditions_are_ignored(ranges, moto, proxy, tmp_path):
    place = object_of(moto, proxy, secrets.token_bytes(1_500_000))
    proxy.strip_headers("if-match", method="GET", when=replaced_at_the_second_read(moto, proxy, place))
    with pytest.raises(ConfigError, match="was replaced while it was copied: start again"):
        download(place, tmp_path / "in.jsonl")

    assert proxy.count("GET") == 2


@pytest.mark.parametrize(
    ("status", "begin", "words"),
    [(206, 1_000_000, "500000 bytes of a range did not come"), (200, 0, "no ranges")],
)
def test_a_store_that_does_not_give_the_range_is_told_of(ranges, moto, proxy, tmp_path, status, begin, words):
    place = object_of(moto, proxy, secrets.token_bytes(1_500_000))
    etag = head(place, stop=threading.Event()).etag
    headers = {"ETag": f'"{etag}"', "Content-Range": f"bytes {begin}-1499999/1500000"}
    proxy.answer("OK", status=status, method="GET", skip=1, headers=headers, body=b"")
    with pytest.raises(ConfigError, match=words):
        download(place, tmp_path / "in.jsonl")


def test_an_object_that_is_not_there_is_the_operators(moto, proxy, tmp_path):
    place = moto.place("nothing/in.jsonl", endpoint_url=proxy.url)
    with pytest.raises(ConfigError, match=r"s3://runs/nothing/in.jsonl: there is no such object"):
        head(place, stop=threading.Event())
    with pytest.raises(ConfigError, match="there is no such object"):
        download(place, tmp_path / "in.jsonl")


def test_a_copy_can_be_stopped(ranges, moto, proxy, tmp_path):
    place, stop = object_of(moto, proxy, secrets.token_bytes(3_000_000)), threading.Event()

    def is_second(request):
        stop.set()
        return True

    proxy.delay(0, method="GET", skip=1, when=is_second)
    with pytest.raises(StoreError, match="the copy was stopped"):
        download(place, tmp_path / "in.jsonl", stop=stop)

    assert proxy.count("GET") <= 2
    assert list(tmp_path.glob("in*")) == []


def test_ranges_are_read_from_a_store_that_sends_checksums_of_the_whole(rclone, aws, ranges, tmp_path):
    aws(rclone)
    data = secrets.token_bytes(2_345_678)
    objects = BotoObjects(rclone.place("copies", checksums="when_supported"), Troubles())
    objects.put("in.jsonl", data)
    download(rclone.place("copies/in.jsonl", checksums="when_supported"), tmp_path / "in.jsonl")
    objects.close()

    assert (tmp_path / "in.jsonl").read_bytes() == data
