"""The log of commits, at its end: what is put at the next place, and what was there before."""

from collections.abc import Iterable
from hashlib import md5

from genpipe.core.errors import Fenced, ObjectStoreError, PreconditionFailed, TroubleKind
from genpipe.edges.s3 import layout
from genpipe.edges.s3.commits import Commit
from genpipe.edges.s3.objects import Objects
from genpipe.edges.s3.packing import pack

_PLACE_TRIES = 5
_BATCHES_MAX = 20


class CommitLog:
    """The end of the log. One thread.

    Commits are put strictly one after the other, each only when the one before is known to be there: so two
    claims of the prefix always want the same next place, and whoever comes late finds it taken.

    Attributes:
        next_number: the first place that is not known to be taken.
    """

    def __init__(self, objects: Objects, next_number: int) -> None:
        self.next_number = next_number
        self._objects = objects

    def put(self, commit: Commit) -> Commit:
        """Put a commit at the next place, and return what stands there: this one, or another's.

        Raises:
            ObjectStoreError: it may stand there or not, now or later. The place may be given to another
                commit only once it is known what stands there.
        """
        assert commit.number == self.next_number
        key, data = layout.commit_key(commit.number), commit.encode()
        for _ in range(_PLACE_TRIES):
            if self._objects.is_conditional:
                there = self._put_if_none(key, data, commit)
            else:
                there = self._put_and_read_back(key, data)
            if there is not None:
                return there
        raise ObjectStoreError(
            f"{self._objects.name}/{key} vanishes or changes again and again: see who else writes there",
            kind=TroubleKind.BROKEN,
        )

    def has_object(self, commit: Commit) -> bool:
        """Whether the object that a commit names is there, in its length.

        Raises:
            ObjectStoreError: it cannot be looked for.
        """
        listed = next(self._objects.list(commit.key), None)
        return listed is not None and (listed.key, listed.size_bytes) == (commit.key, commit.object_bytes)

    def _put_if_none(self, key: str, data: bytes, commit: Commit) -> Commit | None:
        """One round; None where it told nothing."""
        try:
            etag = self._objects.put(key, data, if_none_match=True, verify=False)
        except PreconditionFailed:
            pass
        else:
            # Nearly every store answers with the MD5 of what it has, which spares a look at it: commits are
            # put one by one, so that each request for one counts.
            if etag == md5(data, usedforsecurity=False).hexdigest():
                return commit
        found = self._objects.get(key)
        if found is None:
            return None
        there = Commit.decode(found.data)
        if there is not None:
            return there
        # What does not agree with its own checksum commits nothing, and blocks the log for everybody.
        try:
            self._objects.put(key, data, if_match=found.etag)
        except PreconditionFailed:
            return None
        return commit

    def _put_and_read_back(self, key: str, data: bytes) -> Commit | None:
        """One round where conditions are ignored; None where it told nothing."""
        found = self._objects.get(key)
        there = Commit.decode(found.data) if found is not None else None
        if there is not None:
            return there
        self._objects.put(key, data)
        found = self._objects.get(key)
        return Commit.decode(found.data) if found is not None else None

    def fenced(self, there: Commit) -> Fenced:
        """What to say where another's commit stands at the next place."""
        return Fenced(
            f"{self._objects.name}/{layout.commit_key(self.next_number)} is another driver's (claim "
            f"{there.epoch}, {there.nonce}; run {there.run_id}, shard {there.entry.seq}): it has gone on "
            "with this run from the prefix. See that only one runs. The shards here that are not in S3 are "
            "kept: the same command says what is to be done about them"
        )


class Batches:
    """The objects that repeat full batches of commits, for new machines. One thread adds, one puts."""

    def __init__(self, next_number: int, known: Iterable[Commit]) -> None:
        """Begin with the commits that are in the log already.

        Args:
            next_number: the first place that is free.
            known: the commits before it; of those only the ones of the last batch are kept.
        """
        begun = next_number - next_number % layout.INDEX_COMMITS
        last = sorted((c for c in known if c.number >= begun), key=lambda commit: commit.number)
        self._lines = [commit.encode() for commit in last]
        self._due: dict[int, bytes] = {}

    def add(self, commit: Commit) -> bool:
        """Take the next commit; says whether a batch is full with it."""
        self._lines.append(commit.encode())
        batch, place = divmod(commit.number, layout.INDEX_COMMITS)
        if place < layout.INDEX_COMMITS - 1:
            return False
        lines, self._lines = self._lines, []
        # An index with holes, or none at all, only makes a new machine read more objects.
        if len(lines) == layout.INDEX_COMMITS and len(self._due) < _BATCHES_MAX:
            self._due[batch] = b"".join(lines)
        return bool(self._due)

    def put_due(self, objects: Objects) -> None:
        """Put the objects of full batches.

        Raises:
            ObjectStoreError: it did not work; the next call tries again.
        """
        for batch, data in list(self._due.items()):
            objects.put(layout.index_key(batch), pack(data))
            del self._due[batch]
