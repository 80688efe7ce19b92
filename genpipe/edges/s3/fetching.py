"""One shard's lines, as they are got from its object."""

from collections.abc import Mapping
from dataclasses import dataclass

from genpipe.core.errors import ObjectStoreError, TroubleKind
from genpipe.edges.s3 import packing
from genpipe.edges.s3.objects import Fetched, Objects
from genpipe.edges.shards import Entry

_OF_ONE_OBJECT = frozenset({TroubleKind.BROKEN, TroubleKind.SHORT, TroubleKind.REFUSED})
"""Troubles that one object may have while the others are well."""

THREADS = 8
"""So many shards are fetched at once: what is waited for is the way there and back, and not the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """An object as it was got.

    Attributes:
        data: what was packed in it.
        object_bytes: its own length.
        metadata: its own, with keys in lower case.
    """

    data: bytes
    object_bytes: int
    metadata: Mapping[str, str]


def fetch_whole(objects: Objects, key: str) -> Fetched:
    """Get an object as it is.

    Raises:
        ValueError: it is not there, or cannot be read; says what is wrong.
        ObjectStoreError: the store does not serve it, or anything.
    """
    try:
        fetched = objects.get(key)
    except ObjectStoreError as error:
        if error.kind not in _OF_ONE_OBJECT:
            raise
        raise ValueError(f"cannot be read: {error}") from error
    if fetched is None:
        raise ValueError("is gone")
    return fetched


def fetch(objects: Objects, key: str) -> Unpacked:
    """Get an object that was packed.

    Raises:
        ValueError: it is not there, cannot be read or is damaged; says what is wrong.
        ObjectStoreError: the store does not serve it, or anything.
    """
    fetched = fetch_whole(objects, key)
    data = packing.unpack(fetched.data)
    if data is None:
        raise ValueError("is damaged: it is not the whole of what was packed with zstd")
    return Unpacked(data=data, object_bytes=len(fetched.data), metadata=fetched.metadata)


def fetch_shard(objects: Objects, key: str, entry: Entry) -> bytes:
    """Get the lines of a shard, as they were sealed.

    Raises:
        ValueError: it is not there, is damaged, or is another; says what is wrong.
        ObjectStoreError: the store does not serve it, or anything.
    """
    try:
        data = fetch(objects, key).data
    except ValueError as error:
        raise ValueError(f"{error}, with {entry.count} records") from error
    if not entry.covers(data):
        raise ValueError(f"is not the shard that was committed, with {entry.count} records")
    return data
