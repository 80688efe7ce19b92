"""What has ended and is not yet durable: formed into groups, one commit at a time, with a bound."""

import itertools
from collections import deque
from collections.abc import Iterator

from genpipe.core.settings import FlowSettings
from genpipe.core.values import BadLine, Finished, GivenUp, Group


class Outbox:
    """Ended prompts on their way to disk.

    Attributes:
        size: prompts that ended and are not durable.
        paused: so many of them that nothing more may be sent or read.
        committing: the group that is being made durable, or None.
    """

    def __init__(self, settings: FlowSettings) -> None:
        self.size = 0
        self.paused = False
        self.committing: Group | None = None
        self._settings = settings
        self._held: deque[Finished | GivenUp] = deque()
        self._held_bytes = 0
        self._committing_bytes = 0
        self._last_commit_s = -settings.group_interval_s
        self._numbers = itertools.count(1)

    def hold(self, ended: Finished | GivenUp) -> None:
        """A prompt has ended."""
        self._held.append(ended)
        self._held_bytes += _size_bytes(ended)
        self.size += 1
        self._weigh()

    def due(self, now_s: float, *, last: bool) -> Group | None:
        """The group to be committed now; with ``last``, nothing is worth waiting for."""
        if self.committing is not None or not self._held:
            return None
        settings = self._settings
        full = (
            last
            or len(self._held) >= settings.group_records_max
            or self._held_bytes >= settings.group_bytes_max
        )
        if not full and now_s < self._last_commit_s + settings.group_interval_s:
            return None
        return self._form(now_s)

    def next_timer_s(self) -> float | None:
        """When a group is due though nothing happens, or None."""
        if self.committing is not None or not self._held:
            return None
        return self._last_commit_s + self._settings.group_interval_s

    def committed(self, number: int) -> Group:
        """The group in progress, which has this number, is durable."""
        group = self.committing
        assert group is not None, number
        assert group.number == number, (group.number, number)
        self.committing = None
        self._committing_bytes = 0
        self.size -= len(group.finished) + len(group.given_up)
        self._weigh()
        return group

    def remains(self, now_s: float) -> Iterator[Group]:
        """All that is not durable, group by group; each must be committed before the next is asked for."""
        if self.committing is not None:
            yield self.committing
        while self._held:
            yield self._form(now_s)

    def _weigh(self) -> None:
        self.paused = (
            self.size >= self._settings.backlog_records_max
            or self._held_bytes + self._committing_bytes >= self._settings.backlog_bytes_max
        )

    def _form(self, now_s: float) -> Group:
        settings = self._settings
        finished: list[Finished] = []
        given_up: list[GivenUp] = []
        size_bytes = 0
        while self._held and len(finished) + len(given_up) < settings.group_records_max:
            if size_bytes >= settings.group_bytes_max:
                break
            ended = self._held.popleft()
            size_bytes += _size_bytes(ended)
            if isinstance(ended, Finished):
                finished.append(ended)
            else:
                given_up.append(ended)
        self._held_bytes -= size_bytes
        self._committing_bytes = size_bytes
        self._last_commit_s = now_s
        self.committing = Group(
            number=next(self._numbers), finished=tuple(finished), given_up=tuple(given_up)
        )
        return self.committing


def _size_bytes(ended: Finished | GivenUp) -> int:
    if isinstance(ended, Finished):
        return ended.answer.size_bytes + len(ended.prompt.payload)
    return len(ended.message)


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
