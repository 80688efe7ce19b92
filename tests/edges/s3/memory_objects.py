"""An object store in memory: the fake behind the object port. It passes the port's contract suite."""

import threading
from datetime import UTC, datetime
from hashlib import md5

from genpipe.core.errors import PreconditionFailed
from genpipe.edges.s3.objects import TRIES, Fetched, Listed


class MemoryObjects:
    """Objects below one prefix.

    Attributes:
        trouble: called with the step's name and key before each step; what it raises is what the step raises.
        after: likewise, once the step is done: what a lost reply looks like.
        calls: the steps so far.
    """

    name = "s3://memory/run"

    def __init__(self, *, is_conditional=True):
        self.is_conditional = is_conditional
        self.trouble = self.after = lambda step, key: None
        self.calls = []
        self._objects = {}
        self._lock = threading.Lock()

    def put(self, key, data, *, metadata=None, if_none_match=False, if_match=None, verify=True, tries=TRIES):
        self._come("put", key)
        with self._lock:
            there = self._objects.get(key)
            if self.is_conditional and (
                (if_none_match and there is not None)
                or (if_match is not None and (there is None or there.etag != if_match))
            ):
                raise PreconditionFailed(f"{self.name}/{key} is there already, or has changed")
            etag = md5(data).hexdigest()
            self._objects[key] = Fetched(
                data=bytes(data),
                etag=etag,
                modified_at=datetime.now(UTC),
                metadata={name.lower(): value for name, value in (metadata or {}).items()},
            )
        self.after("put", key)
        return etag

    def get(self, key, *, tries=TRIES):
        self._come("get", key)
        with self._lock:
            return self._objects.get(key)

    def list(self, prefix, *, after="", tries=TRIES):
        self._come("list", prefix)
        with self._lock:
            found = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
            listed = [
                Listed(key=key, size_bytes=len(self._objects[key].data), etag=self._objects[key].etag)
                for key in found
            ]
        yield from listed

    def delete(self, key, *, tries=TRIES):
        self._come("delete", key)
        with self._lock:
            self._objects.pop(key, None)
        self.after("delete", key)

    def keys(self, prefix=""):
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def _come(self, step, key):
        self.calls.append((step, key))
        self.trouble(step, key)
