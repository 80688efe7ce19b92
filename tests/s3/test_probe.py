"""The probe at the start of a run: what a store can do, and what is wrong, in seconds and in one line."""

import contextlib
import secrets
import socket
import time

import pytest

from genpipe.core.errors import ConfigError
from genpipe.edges.s3 import probe as module
from genpipe.edges.s3.boto import BotoObjects
from genpipe.edges.s3.probe import probe
from genpipe.edges.s3.troubles import Troubles
from tests.s3.proxy import FaultProxy
from tests.s3.servers import KEY_ID, SECRET

CONDITIONS = {"if-none-match", "if-match"}


@pytest.fixture
def proxy(moto, aws):
    aws(moto)
    with FaultProxy(moto.url) as found:
        yield found


@pytest.fixture
def make():
    with contextlib.ExitStack() as stack:

        def objects(server, **changes):
            found = BotoObjects(server.place(secrets.token_hex(4), **changes), Troubles())
            stack.callback(found.close)
            return found

        yield objects


@pytest.fixture
def objects(make, moto, proxy):
    return make(moto, endpoint_url=proxy.url)


def complaint(objects, within_s=20.0):
    """The one line that a probe ends with."""
    began_s = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        probe(objects)
    assert time.monotonic() - began_s < within_s
    line = str(caught.value)
    assert line.startswith(f"{objects.name}: ")
    assert "\n" not in line
    assert SECRET not in line
    assert KEY_ID not in line
    assert objects.troubles.total() == 0
    return line


# ---- what a store can do ----


@pytest.mark.parametrize("tls", [False, True])
def test_a_store_that_keeps_every_promise_is_known_and_nothing_is_left_there(weed, aws, make, tls):
    objects = make(aws(weed), tls=tls)
    objects.is_conditional = False
    began_s = time.monotonic()
    probe(objects)

    assert time.monotonic() - began_s < 5
    assert (objects.is_conditional, objects.etag_is_md5) == (True, True)
    assert weed.keys(objects.place.prefix) == []


@pytest.mark.parametrize("tls", [False, True])
def test_a_store_that_ignores_conditions_is_known(rclone, aws, make, tls):
    objects = make(aws(rclone), tls=tls)
    probe(objects)

    assert (objects.is_conditional, objects.etag_is_md5) == (False, True)
    assert list(objects.list("")) == []


@pytest.mark.parametrize("ignored", [CONDITIONS, {"if-none-match"}, {"if-match"}])
def test_a_store_that_ignores_one_condition_heeds_none(objects, proxy, ignored):
    proxy.strip_headers("|".join(ignored), method="PUT")
    probe(objects)

    assert objects.is_conditional is False


@pytest.mark.parametrize("code", ["NotImplemented", "InvalidArgument"])
@pytest.mark.parametrize("refused", [CONDITIONS, {"if-match"}])
def test_a_store_that_refuses_conditions_is_used_without(objects, proxy, code, refused):
    proxy.answer(code, method="PUT", when=lambda request: bool(refused & set(request.headers)))
    probe(objects)
    objects.put("a", b"one", if_none_match=True)

    assert objects.is_conditional is False
    assert [found.key for found in objects.list("")] == ["a"]


def test_an_etag_that_is_no_md5_is_known(objects, proxy, monkeypatch):
    monkeypatch.setattr(module, "_md5", lambda data: "0" * 32)
    probe(objects)

    assert objects.etag_is_md5 is False


def test_replies_that_are_lost_do_not_mislead(objects, proxy, moto):
    proxy.drop_reply(method="PUT", times=1)
    proxy.drop_reply(method="DELETE", times=1)
    probe(objects)

    assert (objects.is_conditional, objects.etag_is_md5) == (True, True)
    assert moto.keys(objects.place.prefix) == []


def test_a_store_that_slows_three_requests_in_ten_down_is_started_on(objects, proxy):
    fault = proxy.answer("SlowDown", share=0.3)
    probe(objects)

    assert fault.hits > 0
    assert objects.is_conditional is True
    assert objects.troubles.total() == 0


# ---- what is wrong ----


@pytest.mark.parametrize(
    ("method", "permission"),
    [("PUT", "s3:PutObject"), ("HEAD", "s3:GetObject"), ("DELETE", "s3:DeleteObject")],
)
def test_a_permission_that_is_missing_is_named(objects, proxy, method, permission):
    proxy.answer("AccessDenied", method=method, body=b"" if method == "HEAD" else None)

    assert f"the keys do not allow {permission} there" in complaint(objects, within_s=3)


def test_reading_and_listing_are_told_apart(objects, proxy):
    proxy.answer("AccessDenied", method="GET", when=lambda request: "list-type" in request.path)
    listing = complaint(objects, within_s=3)
    proxy.clear()
    proxy.answer("AccessDenied", method="GET", when=lambda request: "list-type" not in request.path)

    assert "do not allow s3:ListBucket there" in listing
    assert "do not allow s3:GetObject there" in complaint(objects, within_s=3)


def test_a_probe_that_fails_leaves_nothing_behind(objects, proxy, moto):
    proxy.answer("AccessDenied", method="GET")
    complaint(objects)

    assert moto.keys(objects.place.prefix) == []


def test_a_clock_that_is_off_is_told_in_seconds(objects, proxy):
    proxy.answer("RequestTimeTooSkewed", date=time.time() + 1000)

    assert "s behind the store's: set it right" in complaint(objects, within_s=3)


def test_a_store_that_gives_back_other_bytes_is_refused(objects, proxy):
    proxy.answer(
        "OK",
        status=200,
        method="GET",
        when=lambda request: "list-type" not in request.path,
        headers={"ETag": '"0"', "Last-Modified": "Mon, 30 Nov 2026 10:00:00 GMT"},
        body=b"other",
    )

    assert "the store does not give back what was put there" in complaint(objects)


def test_a_store_that_keeps_half_is_refused(objects, proxy):
    proxy.truncate(100, method="PUT")

    assert "and 100 of 1024 bytes are there" in complaint(objects)


def test_a_store_that_shows_an_empty_listing_is_refused(objects, proxy):
    body = b"<ListBucketResult><Name>runs</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
    proxy.answer("OK", status=200, method="GET", when=lambda request: "list-type" in request.path, body=body)

    assert "the store does not list what was put there" in complaint(objects)


def test_a_listing_that_fails_is_not_blamed_on_the_settings(objects, proxy):
    proxy.answer("InternalError", method="GET", when=lambda request: "list-type" in request.path)

    assert "failed at a list (InternalError" in complaint(objects)


def test_something_that_is_no_store_is_told_of(objects, proxy):
    proxy.answer(
        "Not Found", status=404, headers={"Content-Type": "text/html"}, body=b"<html><p>nothing</html>"
    )

    assert "perhaps no S3 store; look at s3.endpoint_url" in complaint(objects)


# ---- a store that is away ----


def test_a_store_that_refuses_connections_is_told_of_in_seconds(objects, proxy):
    proxy.refuse()
    line = complaint(objects, within_s=5)

    assert f"no connection to {proxy.url.removeprefix('http://')} (Connection refused)" in line
    assert "or start without --s3: a later start with it uploads everything" in line


def test_a_store_that_never_answers_is_told_of_in_time_whatever_the_timeout(make, moto, proxy):
    objects = make(moto, endpoint_url=proxy.url, timeout_s=600.0)
    proxy.black_hole()
    line = complaint(objects, within_s=16)

    assert "does not go on within 5 s" in line
    assert "start without --s3" in line


def test_a_store_that_is_always_busy_is_told_of_in_time(objects, proxy, monkeypatch):
    monkeypatch.setattr(module, "LIMIT_S", 0.3)
    proxy.answer("SlowDown")
    line = complaint(objects, within_s=5)

    # There would be eight tries if there were time.
    assert proxy.count("PUT") < 8
    assert "asks for fewer requests (SlowDown" in line
    assert "start without --s3" in line


def test_a_store_that_is_very_slow_is_told_of_in_time(objects, proxy, monkeypatch):
    monkeypatch.setattr(module, "LIMIT_S", 1.0)
    proxy.latency_s = 0.7

    assert "the store takes too long" in complaint(objects, within_s=6)


def test_a_host_that_has_no_name_is_told_of(make, moto, aws):
    objects = make(aws(moto), endpoint_url="http://store.invalid:9000", path_style=True)

    assert "no connection to store.invalid" in complaint(objects, within_s=15)


def test_a_port_where_nobody_is_any_more(make, moto, aws):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    line = complaint(make(aws(moto), endpoint_url=url), within_s=5)

    assert "Connection refused" in line
