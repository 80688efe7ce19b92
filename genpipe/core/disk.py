"""Whether the disk has room for what is under way, when to look again, and when to give up."""

from genpipe.core import wording
from genpipe.core.settings import FlowSettings
from genpipe.core.values import Space


class Disk:
    """The room on the run's disk. While it is short nothing is sent; what has come is kept in memory.

    Attributes:
        trouble: what is wrong, in one line, while there is not room enough; else None.
        refused: a commit met a full disk, and none has succeeded since.
        gave_up: it was short for too long.
    """

    def __init__(self, settings: FlowSettings) -> None:
        self.trouble: str | None = None
        self.refused = False
        self.gave_up = False
        self._settings = settings
        self._short_since_s = 0.0
        self._look_s = 0.0
        self._answers = self._bytes = self._bytes_max = 0

    @property
    def give_up_s(self) -> float:
        """When it will have been short for too long."""
        return self._short_since_s + self._settings.disk_wait_s

    def refuse(self, trouble: str, now_s: float) -> None:
        """A commit met a full disk: the system says so, whatever it says of its room."""
        self.refused = True
        self._be_short(trouble, now_s)

    def accept(self) -> None:
        """A commit succeeded."""
        if self.refused:
            self.refused = False
            self.trouble = None

    def weigh(self, size_bytes: int) -> None:
        """An answer of this size came: others will be like it."""
        self._answers += 1
        self._bytes += size_bytes
        self._bytes_max = max(self._bytes_max, size_bytes)

    def measure(self, space: Space, under_way: int, now_s: float) -> None:
        """Hold the room that there is against what is needed for the answers under way.

        That is nearly always more than what comes; and one huge answer does not stop a run for good.

        Args:
            space: the room on the disk.
            under_way: answers that are to be expected (count).
            now_s: the run's clock.
        """
        mean_bytes = self._bytes / self._answers if self._answers else 0.0
        needed_bytes = 2 * mean_bytes * under_way + self._bytes_max
        if self.refused:
            self._look_s = now_s + self._settings.disk_look_s
            return
        reserve_bytes = min(self._settings.disk_reserve_bytes, space.total_bytes // 20)
        # Some file systems do not tell their size: there, a write that is refused must do.
        if space.free_bytes >= needed_bytes + reserve_bytes or space.total_bytes == 0:
            self.trouble = None
            return
        self._be_short(
            f"the disk of the run folder has {wording.size(space.free_bytes)} left, and "
            f"{wording.size(needed_bytes + reserve_bytes)} are to be free before more is sent; free some "
            "space there",
            now_s,
        )

    def look_due(self, now_s: float) -> bool:
        """Whether to look at the disk now; gives up where it was short for too long."""
        if self.trouble is None:
            return False
        self.gave_up |= now_s >= self.give_up_s
        if self.gave_up or now_s < self._look_s:
            return False
        self._look_s = now_s + self._settings.disk_look_s
        return True

    def next_timer_s(self) -> float | None:
        """When :meth:`look_due` is to be asked again, or None."""
        return None if self.trouble is None or self.gave_up else min(self._look_s, self.give_up_s)

    def _be_short(self, trouble: str, now_s: float) -> None:
        if self.trouble is None:
            self._short_since_s = now_s
        self.trouble = trouble
        self._look_s = now_s + self._settings.disk_look_s
