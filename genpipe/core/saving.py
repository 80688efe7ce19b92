"""What has ended on its way to disk: groups to be made durable, the room on the disk, and the totals."""

from collections.abc import Iterator

from genpipe.core.disk import Disk
from genpipe.core.outbox import Outbox
from genpipe.core.settings import FlowSettings
from genpipe.core.sums import Sums
from genpipe.core.timers import earlier
from genpipe.core.values import Commit, Finished, GivenUp, Group, Space


class Saving:
    """The outbox and the disk behind it.

    Attributes:
        done: prompts durable since this process began.
        gave_up: prompts given up, and bad lines, durable as such since this process began.
        sums: totals over the answers since this process began.
        outbox: what has ended and is not durable.
        disk: the room on the run's disk.
    """

    def __init__(self, settings: FlowSettings) -> None:
        self.done = self.gave_up = 0
        self.sums = Sums()
        self.outbox = Outbox(settings)
        self.disk = Disk(settings)
        self._bytes_max = 2 * settings.backlog_bytes_max

    @property
    def paused(self) -> bool:
        """Whether nothing may be sent: the writer is too far behind, or the disk is short of room."""
        return self.outbox.paused or self.disk.trouble is not None

    @property
    def overflows(self) -> bool:
        """Whether more of what comes would only fill the memory, since the disk takes none of it."""
        return self.disk.refused and self.outbox.size_bytes >= self._bytes_max

    def hold(self, ended: Finished | GivenUp) -> None:
        """A prompt has ended."""
        size_bytes = self.outbox.hold(ended)
        if isinstance(ended, Finished):
            self.disk.weigh(size_bytes)

    def committed(self, number: int) -> Group:
        """A group is durable: only now are its prompts done."""
        self.disk.accept()
        group = self.outbox.committed(number)
        self.done += len(group.finished)
        self.gave_up += len(group.given_up)
        for finished in group.finished:
            self.sums.add(finished.answer.output_tokens, finished.answer.flags)
        return group

    def refused(self, number: int, trouble: str, now_s: float) -> None:
        """The disk had no room for a group; it is committed again once there may be some."""
        self.outbox.refused(number)
        self.disk.refuse(trouble, now_s)

    def measured(self, space: Space, under_way: int, now_s: float) -> None:
        """The disk was looked at, with so many answers to be expected (count)."""
        self.disk.measure(space, under_way, now_s)

    def due(self, now_s: float, *, last: bool, looking: bool) -> Iterator[Commit]:
        """Groups to be committed now; with ``last``, nothing is worth waiting for.

        Args:
            now_s: the run's clock.
            last: nothing more will end.
            looking: a disk that had no room is to be tried again.
        """
        while not self.disk.refused or looking:
            group = self.outbox.due(now_s, last=last)
            if group is None:
                return
            yield Commit(group=group)

    def next_timer_s(self) -> float | None:
        """When something is due though nothing has happened, or None."""
        disk_s = self.disk.next_timer_s()
        return disk_s if self.disk.refused else earlier(disk_s, self.outbox.next_timer_s())
