"""A store knows neither the newer checksums nor buckets as host names: it works, or one is told how."""

import contextlib
import secrets
import time

import pytest

from genpipe.core.errors import ConfigError
from genpipe.edges.s3.boto import BotoObjects
from genpipe.edges.s3.probe import probe
from genpipe.edges.s3.troubles import Troubles
from tests.s3.proxy import FaultProxy
from tests.s3.servers import BUCKET, KEY_ID, SECRET

SECONDS = 10.0
"""Time in which the operator must have been told."""


@pytest.fixture
def old_store(moto, aws):
    """Path style only; refuses ``x-amz-checksum-*`` headers and aws-chunked bodies."""
    aws(moto)
    with FaultProxy(moto.url) as proxy:
        yield proxy


@pytest.fixture
def make():
    with contextlib.ExitStack() as stack:

        def objects(server, prefix=None, **changes):
            found = BotoObjects(server.place(prefix or secrets.token_hex(4), **changes), Troubles())
            stack.callback(found.close)
            return found

        yield objects


def refuse_checksums(proxy, code="InvalidArgument"):
    return proxy.answer(code, when=lambda request: request.has_checksum)


def refuse_host_names(proxy):
    return proxy.answer("NoSuchBucket", when=lambda request: request.headers["host"].startswith(BUCKET))


def complaint(objects):
    began_s = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        probe(objects)
    line = str(caught.value)
    assert time.monotonic() - began_s < SECONDS
    assert "\n" not in line
    assert SECRET not in line
    assert KEY_ID not in line
    return line


def test_it_works_with_the_address_and_one_setting(old_store, moto, make):
    refused = refuse_checksums(old_store)
    refuse_host_names(old_store)
    address = old_store.url.replace("127.0.0.1", "localhost")
    objects = make(moto, endpoint_url=address, checksums="when_required")
    probe(objects)
    objects.put("w00/a", b"x" * 100_000, metadata={"sha256": "00"}, if_none_match=True)

    assert objects.get("w00/a").data == b"x" * 100_000
    assert [found.key for found in objects.list("w00/")] == ["w00/a"]
    assert (refused.hits, objects.troubles.total()) == (0, 0)


@pytest.mark.parametrize("code", ["InvalidArgument", "MissingContentLength", "NotImplemented"])
def test_the_setting_for_checksums_is_named_before_the_first_prompt(old_store, moto, make, code):
    refuse_checksums(old_store, code)
    objects = make(moto, endpoint_url=old_store.url)

    assert complaint(objects).endswith('set s3.checksums = "when_required"')
    assert moto.keys(objects.place.prefix) == []


def test_the_setting_for_checksums_is_named_by_a_real_store_over_tls(rclone, aws, make):
    objects = make(aws(rclone), tls=True, checksums="when_supported")

    assert complaint(objects).endswith('set s3.checksums = "when_required"')


def test_the_setting_for_the_path_is_named(old_store, moto, make):
    refuse_host_names(old_store)
    address = old_store.url.replace("127.0.0.1", "localhost")
    probe(make(moto, endpoint_url=address))
    objects = make(moto, endpoint_url=address, path_style=False)

    assert complaint(objects).endswith("set s3.path_style = true")


def test_both_settings_are_named_where_both_are_needed(old_store, moto, make):
    refuse_host_names(old_store)
    refuse_checksums(old_store)
    address = old_store.url.replace("127.0.0.1", "localhost")
    line = complaint(make(moto, endpoint_url=address, path_style=False))

    assert line.endswith('set s3.checksums = "when_required" and s3.path_style = true')


def test_wrong_keys_are_told_of(weed, aws, make, monkeypatch):
    aws(weed)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODYKNOWSTHIS1")
    unknown = complaint(make(weed))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x" * 40)
    wrong = complaint(make(weed))

    assert "does not know the access key (InvalidAccessKeyId): set AWS_PROFILE" in unknown
    assert "secret key is not the access key's (SignatureDoesNotMatch)" in wrong


def test_a_wrong_bucket_is_told_of(weed, rclone, aws, make):
    for server in (weed, rclone):
        line = complaint(make(aws(server), bucket="no-such-bucket"))

        assert "has no bucket no-such-bucket: make it, or name another in s3.uri" in line


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("PermanentRedirect", {"headers": {"x-amz-bucket-region": "eu-west-3"}}),
        ("AuthorizationHeaderMalformed", {"fields": {"Region": "eu-west-3"}}),
        ("IllegalLocationConstraintException", {"status": 400, "fields": {"Region": "eu-west-3"}}),
    ],
)
def test_a_wrong_region_is_told_of_with_the_right_one(old_store, moto, make, code, answer):
    old_store.answer(code, **answer)

    line = complaint(make(moto, endpoint_url=old_store.url))
    assert line.endswith('bucket runs is in region eu-west-3: set s3.region = "eu-west-3"')
