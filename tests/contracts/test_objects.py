"""What every object store must do: the one in memory, and real servers behind the library."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import md5

import pytest

from genpipe.core.errors import PreconditionFailed
from genpipe.edges.s3.boto import BotoObjects
from genpipe.edges.s3.objects import Fetched, Listed
from genpipe.edges.s3.probe import probe
from genpipe.edges.s3.troubles import Troubles
from tests.edges.s3.memory_objects import MemoryObjects

SLOW = pytest.mark.slow
PREFIX = "a run/with ü=1+2"
"""What all keys begin with: letters that have to be quoted in one way or another."""


@pytest.fixture(
    params=[
        "memory",
        "memory without conditions",
        "moto",
        pytest.param("weed", marks=SLOW),
        pytest.param("weed with TLS", marks=SLOW),
        pytest.param("rclone", marks=SLOW),
        pytest.param("rclone with TLS", marks=SLOW),
    ]
)
def objects(request, aws):
    name, _, rest = request.param.partition(" ")
    if name == "memory":
        yield MemoryObjects(is_conditional=not rest)
        return
    server = aws(request.getfixturevalue(name))
    place = server.place(f"{PREFIX}/{secrets.token_hex(4)}", tls="TLS" in rest)
    found = BotoObjects(place, Troubles())
    probe(found)
    assert found.is_conditional is (name != "rclone")
    yield found
    found.close()
    # rclone fails now and then where many put one object at once.
    assert found.troubles.total() == 0 or name == "rclone", found.troubles.last()


def keys(objects, prefix="", **options):
    return [found.key for found in objects.list(prefix, **options)]


def test_an_object_comes_back_as_it_was_put(objects):
    began = datetime.now(UTC)
    etag = objects.put("w00/a.json", b"one", metadata={"sha256": "ab12", "Run-Id": "x"})
    found = objects.get("w00/a.json")

    assert isinstance(found, Fetched)
    assert (found.data, found.etag) == (b"one", etag)
    assert '"' not in etag
    assert dict(found.metadata) == {"sha256": "ab12", "run-id": "x"}
    assert abs(found.modified_at - began) < timedelta(seconds=30)


def test_what_was_never_put_is_not_there(objects):
    assert objects.get("w00/none") is None
    assert keys(objects) == []


@pytest.mark.parametrize("size", [0, 1, 6_000_000])
def test_objects_of_any_size_come_back_whole(objects, size):
    data = secrets.token_bytes(size)
    etag = objects.put("a", data, metadata={"sha256": "00"})

    assert objects.get("a").data == data
    assert list(objects.list("a")) == [Listed(key="a", size_bytes=size, etag=etag)]


def test_a_put_replaces_the_object_and_its_etag_and_its_metadata(objects):
    first = objects.put("a", b"one", metadata={"n": "1"})
    second = objects.put("a", b"two")
    found = objects.get("a")

    assert first != second
    assert (found.data, found.etag, dict(found.metadata)) == (b"two", second, {})
    assert [one.etag for one in objects.list("a")] == [second]


def test_a_listing_is_by_name_and_of_what_begins_so(objects):
    for key in ("b", "w/2", "w/10", "w/1", "wa/1", "w/1.zst", "w/sub/1"):
        objects.put(key, key.encode())

    assert keys(objects, "w/") == ["w/1", "w/1.zst", "w/10", "w/2", "w/sub/1"]
    assert keys(objects, "w/1") == ["w/1", "w/1.zst", "w/10"]
    assert keys(objects, "w") == ["w/1", "w/1.zst", "w/10", "w/2", "w/sub/1", "wa/1"]
    assert keys(objects) == ["b", "w/1", "w/1.zst", "w/10", "w/2", "w/sub/1", "wa/1"]
    assert keys(objects, "x") == []


def test_a_listing_goes_on_behind_any_name(objects):
    for number in range(6):
        objects.put(f"w/{number:06d}", b"")

    assert keys(objects, "w/", after="w/000003") == ["w/000004", "w/000005"]
    assert keys(objects, "w/", after="w/000003x") == ["w/000004", "w/000005"]
    assert keys(objects, "w/", after="a") == [f"w/{number:06d}" for number in range(6)]
    assert keys(objects, "w/", after="w/000005") == []
    assert keys(objects, "w/", after="x") == []


@pytest.mark.slow
def test_a_listing_has_all_of_many_pages(objects):
    # A server's page is 1,000 names.
    names = [f"w00/commits/{number:06d}.json" for number in range(1_100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: objects.put(name, name.encode(), verify=False), names))
    objects.put("w00/commitsx", b"")

    assert keys(objects, "w00/commits/") == names
    assert keys(objects, "w00/commits/", after=names[999]) == names[1000:]


def test_removing_is_done_once_and_may_be_said_twice(objects):
    objects.put("w/a", b"1")
    objects.put("w/ab", b"2")
    objects.delete("w/a")
    objects.delete("w/a")
    objects.delete("never")

    assert objects.get("w/a") is None
    assert keys(objects) == ["w/ab"]


def test_of_two_that_may_only_create_the_first_wins(objects):
    objects.put("a", b"first", if_none_match=True)
    if objects.is_conditional:
        with pytest.raises(PreconditionFailed, match="is there already"):
            objects.put("a", b"second", if_none_match=True)
    else:
        objects.put("a", b"second", if_none_match=True)

    assert objects.get("a").data == (b"first" if objects.is_conditional else b"second")


def test_an_object_is_replaced_only_if_it_is_the_one_that_was_seen(objects):
    first = objects.put("a", b"one")
    second = objects.put("a", b"two", if_match=first)
    outcomes = []
    for key, etag in (("a", first), ("a", md5(b"another").hexdigest()), ("missing", second)):
        try:
            objects.put(key, b"three", if_match=etag)
            outcomes.append("put")
        except PreconditionFailed:
            outcomes.append("refused")

    assert outcomes == (["refused"] * 3 if objects.is_conditional else ["put"] * 3)
    assert objects.get("a").data == (b"two" if objects.is_conditional else b"three")


def test_of_twenty_that_create_at_once_one_wins(objects):
    def create(number):
        try:
            objects.put("race", f"{number}".encode(), if_none_match=True, verify=objects.is_conditional)
        except PreconditionFailed:
            return None
        return number

    with ThreadPoolExecutor(20) as pool:
        winners = [number for number in pool.map(create, range(20)) if number is not None]

    assert len(winners) == (1 if objects.is_conditional else 20)
    assert int(objects.get("race").data) in winners
