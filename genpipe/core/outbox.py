"""What has ended and is not yet durable: formed into groups, and made durable in order, with a bound."""

import itertools
from collections import deque
from collections.abc import Iterator

from genpipe.core.settings import FlowSettings
from genpipe.core.values import BadLine, Finished, GivenUp, Group

COMMITS_MAX = 2
"""Groups under way at once: while one is written, the next can be encoded (count)."""


class Outbox:
    """Ended prompts on their way to disk.

    Attributes:
        size: prompts that ended and are not durable.
        size_bytes: what their answers take, roughly.
        paused: there is so much of it that nothing more may be sent or read.
    """

    def __init__(self, settings: FlowSettings) -> None:
        self.size = 0
        self.size_bytes = 0
        self.paused = False
        self._settings = settings
        self._held: deque[Finished | GivenUp] = deque()
        self._held_bytes = 0
        self._committing: dict[int, Group] = {}
        self._refused: deque[Group] = deque()
        self._last_commit_s = -settings.group_interval_s
        self._numbers = itertools.count(1)

    @property
    def committing(self) -> int:
        """Groups that are being made durable."""
        return len(self._committing)

    def hold(self, ended: Finished | GivenUp) -> int:
        """A prompt has ended: what it takes (bytes)."""
        self._held.append(ended)
        size_bytes = size_bytes_of(ended)
        self._held_bytes += size_bytes
        self.size_bytes += size_bytes
        self.size += 1
        self._weigh()
        return size_bytes

    def due(self, now_s: float, *, last: bool) -> Group | None:
        """The group to be committed now; with ``last``, nothing is worth waiting for.

        A group that was refused comes before all others. A second one is begun beside one under way only
        where it is full: on a slow disk, few large groups cost less than many small ones.
        """
        if self._refused:
            return self._begin(self._refused.popleft()) if not self._committing else None
        if not self._held or len(self._committing) >= COMMITS_MAX:
            return None
        settings = self._settings
        full = len(self._held) >= settings.group_records_max or self._held_bytes >= settings.group_bytes_max
        if not full:
            if self._committing:
                return None
            if not last and now_s < self._last_commit_s + settings.group_interval_s:
                return None
        return self._form(now_s)

    def next_timer_s(self) -> float | None:
        """When a group is due though nothing happens, or None."""
        if self._committing or self._refused or not self._held:
            return None
        return self._last_commit_s + self._settings.group_interval_s

    def committed(self, number: int) -> Group:
        """The group under way that has this number is durable."""
        group = self._take(number)
        self.size_bytes -= sum(map(size_bytes_of, group.finished)) + sum(map(size_bytes_of, group.given_up))
        self.size -= len(group.finished) + len(group.given_up)
        self._weigh()
        return group

    def refused(self, number: int) -> None:
        """The disk had no room for the group under way that has this number: it is to come again."""
        self._refused.append(self._take(number))

    def remains(self, now_s: float) -> Iterator[Group]:
        """All that is not durable, group by group; each must be committed before the next is asked for."""
        yield from list(self._committing.values())
        while self._refused:
            yield self._begin(self._refused.popleft())
        while self._held:
            yield self._form(now_s)

    def _weigh(self) -> None:
        settings = self._settings
        self.paused = (
            self.size >= settings.backlog_records_max or self.size_bytes >= settings.backlog_bytes_max
        )

    def _take(self, number: int) -> Group:
        assert number in self._committing, f"group {number} is not under way"
        return self._committing.pop(number)

    def _begin(self, group: Group) -> Group:
        self._committing[group.number] = group
        return group

    def _form(self, now_s: float) -> Group:
        settings = self._settings
        finished: list[Finished] = []
        given_up: list[GivenUp] = []
        size_bytes = 0
        while self._held and len(finished) + len(given_up) < settings.group_records_max:
            if size_bytes >= settings.group_bytes_max:
                break
            ended = self._held.popleft()
            size_bytes += size_bytes_of(ended)
            if isinstance(ended, Finished):
                finished.append(ended)
            else:
                given_up.append(ended)
        self._held_bytes -= size_bytes
        self._last_commit_s = now_s
        return self._begin(
            Group(number=next(self._numbers), finished=tuple(finished), given_up=tuple(given_up))
        )


def size_bytes_of(ended: Finished | GivenUp) -> int:
    """What an ended prompt takes in memory and on disk, roughly."""
    if isinstance(ended, Finished):
        return ended.answer.size_bytes + len(ended.prompt.payload)
    return len(ended.message) + len(ended.made_json)


def bad_line(bad: BadLine) -> GivenUp:
    """A record that cannot be sent, as one that has ended."""
    return GivenUp(
        index=bad.index,
        tries=0,
        error_class="BadLine",
        message=f"{bad.file}:{bad.line}: {bad.reason}",
        last_status=None,
        for_good=True,
    )
