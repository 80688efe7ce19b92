"""The lease on a prefix: one driver at a time, and a clear word about who has it.

It is there so that a second driver is refused early; what keeps two from spoiling each other's work is the
log of commits. No clock is compared with another machine's: who wants the prefix watches the lease for as
long as its own monotonic clock says, and takes it over only where it did not change in all that time.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import orjson

from genpipe.core.errors import Fenced, ObjectStoreError, PreconditionFailed, TroubleKind
from genpipe.edges.owner import described
from genpipe.edges.s3.layout import LEASE
from genpipe.edges.s3.objects import TRIES, Fetched, Objects

LOOKS = 10
"""So often a watched lease is looked at in the time that it may be silent."""

SETTLE_S = 1.0
"""Shortest time until a claim is read back where the store ignores conditions (seconds)."""

TTL_MAX_S = 3600.0
"""No lease is waited for longer than this, whatever it says (seconds)."""

_CLAIM_TRIES = 5
_RENEW_TRIES = 2
_LOCK_WAIT_S = 1.0

Pause = Callable[[float], None]
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The lease as it stands; one that cannot be understood has no name."""

    etag: str
    epoch: int = 0
    nonce: str | None = None
    owner: Mapping[str, Any] = field(default_factory=dict)
    is_released: bool = False
    ttl_s: float = 0.0

    @classmethod
    def of(cls, fetched: Fetched) -> "_Found":
        try:
            fields = orjson.loads(fetched.data)
            epoch, nonce, owner = fields["epoch"], fields["nonce"], fields["owner"]
            is_released = fields["released"] is True
            ttl_s = min(float(fields.get("ttl_s", 0.0)), TTL_MAX_S)
        except (ValueError, KeyError, TypeError):
            return cls(etag=fetched.etag)
        if type(epoch) is not int or not isinstance(nonce, str) or not isinstance(owner, dict):
            return cls(etag=fetched.etag)
        return cls(
            etag=fetched.etag, epoch=epoch, nonce=nonce, owner=owner, is_released=is_released, ttl_s=ttl_s
        )


class Lease:
    """A claim of a prefix, which lasts as long as it is renewed. Blocking; any number of threads may call.

    Attributes:
        epoch: number of this claim of the prefix, from 1; higher than that of any claim before it.
        nonce: this claim's own name.
    """

    def __init__(
        self,
        objects: Objects,
        *,
        owner: Mapping[str, Any],
        nonce: str,
        previous_nonce: str | None,
        ttl_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self.epoch = 0
        self.nonce = nonce
        self._objects = objects
        self._owner = {"start": _now(), **owner}
        self._previous_nonce = previous_nonce
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._lock = threading.Lock()
        self._etag: str | None = None
        self._beat = 0
        self._epoch_seen = 0
        # Since when at least the store's last good word is true: the moment before it was asked.
        self._good_s = 0.0
        self._fenced: str | None = None
        self._is_released = False

    @classmethod
    def claim(
        cls,
        objects: Objects,
        *,
        owner: Mapping[str, Any],
        nonce: str,
        previous_nonce: str | None,
        epoch_min: int,
        ttl_s: float,
        pause: Pause,
        warn: Warn,
        now_s: Callable[[], float] = time.monotonic,
    ) -> "Lease":
        """Claim the prefix: at once where nobody has it, else after as long as its lease may be silent.

        Args:
            objects: the prefix.
            owner: this process, as :func:`genpipe.edges.owner.signature` gives it.
            nonce: this claim's own name; never used before.
            previous_nonce: the name of the claim that this run folder held before, whose process has ended.
            epoch_min: the lowest number that this claim may have.
            ttl_s: a lease that does not change for so long belongs to nobody (seconds).
            pause: waits for some seconds.
            warn: told, in one line each, what is waited for and what is odd.
            now_s: the clock by which all of that is measured (seconds); never goes back.

        Raises:
            Fenced: another driver has it; the message names its host and process.
            ObjectStoreError: the store did not answer.
        """
        lease = cls(
            objects, owner=owner, nonce=nonce, previous_nonce=previous_nonce, ttl_s=ttl_s, now_s=now_s
        )
        if not objects.is_conditional:
            warn(
                f"{objects.name}: this store ignores conditions on writes (If-None-Match, If-Match), so that "
                "only one driver may ever use it at a time: a second one is refused while the first is seen "
                "to live, but two that start, or go on, in one instant may spoil each other's objects"
            )
        found = lease._look()
        if found is not None and not lease._is_free(found):
            found = lease._watch(found, pause, warn)
        lease._take(found, epoch_min)
        if not objects.is_conditional:
            pause(max(SETTLE_S, ttl_s / LOOKS))
            lease._read_back()
        return lease

    def renew(self) -> None:
        """Let the lease change, as a sign of life; does nothing after :meth:`release`.

        Raises:
            Fenced: another driver has it.
            ObjectStoreError: the store did not answer.
        """
        with self._lock:
            self._renew()

    def check(self, max_age_s: float) -> None:
        """Make sure that the prefix was ours a moment ago.

        Args:
            max_age_s: the store is asked if its last good word is older than this (seconds).

        Raises:
            Fenced: another driver has it.
            ObjectStoreError: the store did not answer.
        """
        with self._lock:
            self._raise_if_fenced()
            if self._now_s() - self._good_s > max_age_s:
                self._renew()

    def release(self) -> None:
        """Let the next driver have the prefix at once. One try; raises nothing, and may be called twice.

        The lease stays, so that the next claim knows which number comes next.
        """
        # A renewal that hangs in the store is not waited for: the lease then runs out by itself.
        if not self._lock.acquire(timeout=_LOCK_WAIT_S):
            return
        try:
            if self._is_released or self._fenced is not None:
                return
            self._is_released = True
            with contextlib.suppress(ObjectStoreError, Fenced):
                if not self._objects.is_conditional:
                    self._heed(self._look(tries=1))
                if self._etag is not None:
                    self._put(if_match=self._etag, tries=1)
        finally:
            self._lock.release()

    def _is_free(self, found: _Found) -> bool:
        """Whether its holder has ended, as far as can be told without waiting."""
        return found.is_released or (self._previous_nonce is not None and found.nonce == self._previous_nonce)

    def _watch(self, found: _Found, pause: Pause, warn: Warn) -> _Found | None:
        """Wait for another's lease to run out; returns what stands there then.

        Raises:
            Fenced: its owner lives.
        """
        # Its holder renews it as often as its own settings say.
        name, ttl_s = self._objects.name, max(self._ttl_s, found.ttl_s)
        warn(
            f"{name} was claimed by another driver ({described(found.owner)}): waiting {ttl_s:g} s to see "
            "whether it still renews its lease"
        )
        since_s = self._now_s()
        while True:
            pause(ttl_s / LOOKS)
            # The look comes after the clock: a holder that renewed until this moment is seen.
            is_last = self._now_s() - since_s >= ttl_s
            now = self._look()
            if now is None or self._is_free(now):
                return now
            if now.etag != found.etag:
                raise self._in_use(now)
            if is_last:
                warn(f"{name} was silent for {ttl_s:g} s: taking it over from {described(found.owner)}")
                return now

    def _take(self, found: _Found | None, epoch_min: int) -> None:
        for _ in range(_CLAIM_TRIES):
            self.epoch = max(1, epoch_min, self._epoch_seen + 1)
            self._etag = found.etag if found is not None else None
            self._good_s = self._now_s()
            try:
                self._put(if_match=self._etag, tries=TRIES)
            except PreconditionFailed:
                pass
            else:
                return
            self._good_s = self._now_s()
            found = self._look()
            if found is not None and found.nonce == self.nonce:
                # It is our own put, whose reply was lost.
                self._etag = found.etag
                return
            # A renewal that a dead driver had sent before it died may land as late as this.
            if found is not None and not self._is_free(found):
                raise self._in_use(found)
        raise Fenced(
            f"the lease of {self._objects.name} changes hands again and again: see that only one driver "
            "uses it"
        )

    def _read_back(self) -> None:
        """Where the last put wins: see which one that was."""
        self._good_s = self._now_s()
        found = self._look()
        if found is None or found.nonce != self.nonce:
            raise self._in_use(found or _Found(etag=""))
        self._etag = found.etag

    def _renew(self) -> None:
        self._raise_if_fenced()
        if self._is_released:
            return
        for _ in range(_RENEW_TRIES):
            asked_s = self._now_s()
            if not self._objects.is_conditional:
                self._heed(self._look(tries=_RENEW_TRIES))
            try:
                self._put(if_match=self._etag, tries=_RENEW_TRIES)
            except PreconditionFailed:
                asked_s = self._now_s()
                found = self._look(tries=_RENEW_TRIES)
                self._heed(found)
                if found is None or found.nonce != self.nonce:
                    continue
                # An earlier put of ours, whose reply was lost, has landed: that is a sign of life as well.
            self._good_s = asked_s
            return
        raise ObjectStoreError(
            f"{self._objects.name}/{LEASE} could not be renewed: it was removed or damaged again and again",
            kind=TroubleKind.BROKEN,
        )

    def _heed(self, found: _Found | None) -> None:
        """Go on from what stands there, unless it is another's.

        One that was removed, or cannot be understood, is nobody's: it is written anew.
        """
        if found is not None and found.nonce not in (self.nonce, None):
            self._fenced = (
                f"{self._objects.name} was taken over by another driver ({described(found.owner)}, since "
                f"{found.owner.get('start', 'unknown')}) while this one was suspended or cut off. See "
                "that only one runs; what is on the local disk is kept"
            )
            raise Fenced(self._fenced)
        self._etag = found.etag if found is not None else None

    def _raise_if_fenced(self) -> None:
        if self._fenced is not None:
            raise Fenced(self._fenced)

    def _look(self, *, tries: int = TRIES) -> _Found | None:
        fetched = self._objects.get(LEASE, tries=tries)
        if fetched is None:
            return None
        found = _Found.of(fetched)
        self._epoch_seen = max(self._epoch_seen, found.epoch)
        return found

    def _put(self, *, if_match: str | None, tries: int) -> None:
        """Write the lease over the one with this ETag, or where there is none."""
        # The count makes every put another object: an ETag never comes back.
        self._beat += 1
        fields = {
            "epoch": self.epoch,
            "nonce": self.nonce,
            "owner": self._owner,
            "beat": self._beat,
            "renewed_at": _now(),
            "released": self._is_released,
            "ttl_s": self._ttl_s,
        }
        self._etag = self._objects.put(
            LEASE,
            orjson.dumps(fields),
            if_none_match=if_match is None,
            if_match=if_match,
            verify=False,
            tries=tries,
        )

    def _in_use(self, found: _Found) -> Fenced:
        return Fenced(
            f"{self._objects.name} is in use by another driver ({described(found.owner)}, since "
            f"{found.owner.get('start', 'unknown')}); wait for it, stop it, or give another prefix with --s3"
        )


def _now() -> str:
    """The present moment, for people."""
    return datetime.now(UTC).isoformat(timespec="seconds")
