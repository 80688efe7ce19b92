"""What the settings say of a store, and what the environment adds."""

import pytest

from genpipe.config import S3
from genpipe.core.errors import ConfigError
from genpipe.offsite import place_of, reading_place

URI = "s3://bucket/run1"


def test_the_librarys_own_variables_name_the_store_where_no_setting_does(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://all:1")
    general = place_of(S3(uri=URI), URI)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:2/")
    special = place_of(S3(uri=URI), URI)
    given = place_of(S3(uri=URI, endpoint_url="http://mine:3"), URI)

    assert [place.endpoint_url for place in (general, special, given)] == [
        "http://all:1",
        "http://s3:2",
        "http://mine:3",
    ]


def test_a_password_in_such_a_variable_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://me:hidden@store")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL_S3 must be an address") as caught:
        place_of(S3(uri=URI), URI)

    assert "hidden" not in str(caught.value)


def test_how_a_place_is_read_is_set_as_for_a_run():
    place = reading_place("s3://bucket/a/b", ["s3.region=eu-west-1", "s3.path_style=true"])

    assert (place.bucket, place.prefix, place.region, place.path_style) == (
        "bucket",
        "a/b/",
        "eu-west-1",
        True,
    )
    with pytest.raises(ConfigError, match=r"s3\.regoin; did you mean region"):
        reading_place(URI, ["s3.regoin=x"])
