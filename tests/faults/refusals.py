"""What the system can refuse a store, in which place, and how that must end."""

from dataclasses import dataclass
from pathlib import Path

SEALED = ("shards/part-000000.jsonl", "shards/part-000001.jsonl")
OPEN = tuple(f"shards/part-{number:06d}.jsonl.open" for number in range(9))
LIST = (".done_indices", ".done_indices.tmp")
MANIFEST = ("manifest.jsonl", "manifest.jsonl.tmp")
FAILED = ("failed.jsonl", "failed.jsonl.tmp")
FULL, BROKEN = 73, 74


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What the system refuses, and how the driver's run must end.

    Attributes:
        call: the system call.
        error: the error that it returns.
        when: which of the calls on these paths, in strace's notation.
        paths: below the run folder.
        code: the driver's exit code.
        full: how often it must have waited for room.
        also: another call that fails as soon as it is made.
    """

    call: str
    error: str
    when: str
    paths: tuple[str, ...]
    code: int
    full: int = 0
    also: str | None = None

    def __str__(self) -> str:
        also = f" and {self.also}" if self.also else ""
        return f"{self.error} on {self.call}{also} {self.when} of {self.paths[0]}"

    def strace(self, folder: Path) -> list[str]:
        """Options that make it so."""
        options = ["-o", "/dev/null", "-e", f"inject={self.call}:error={self.error}:when={self.when}"]
        if self.also is not None:
            options += ["-e", f"inject={self.also}:error=EIO"]
        for path in self.paths:
            options += ["-P", str(folder / path)]
        return options


def refusal(call: str, error: str, when: str, paths: tuple[str, ...], code: int, **more) -> Refusal:
    return Refusal(call=call, error=error, when=when, paths=paths, code=code, **more)


REFUSALS = [
    refusal("write", "EIO", "2", OPEN, 0),
    refusal("write", "EIO", "2..3", OPEN, BROKEN),
    refusal("write", "EIO", "2+", OPEN, BROKEN),
    refusal("write", "EINTR", "2", OPEN, 0),
    refusal("write", "ENOSPC", "2", OPEN, 0, full=1),
    refusal("write", "EDQUOT", "1..3", OPEN, 0, full=3),
    refusal("write", "ENOSPC", "2+", OPEN, FULL, full=5),
    refusal("write", "ENOSPC", "2", OPEN, BROKEN, also="fstat,newfstatat,statx,ftruncate"),
    refusal("fdatasync", "EIO", "1", OPEN, 0),
    refusal("fdatasync", "EIO", "2", OPEN, 0),
    refusal("fdatasync", "EIO", "2..3", OPEN, BROKEN),
    refusal("fdatasync", "EIO", "1+", OPEN, BROKEN),
    refusal("fdatasync", "EIO", "2", OPEN, BROKEN, also="ftruncate"),
    refusal("fdatasync", "ENOSPC", "2", OPEN, 0, full=1),
    refusal("fdatasync", "EDQUOT", "2+", OPEN, FULL, full=5),
    refusal("rename", "EIO", "1", OPEN, BROKEN),
    refusal("rename", "EROFS", "1+", OPEN, BROKEN),
    refusal("rename", "ENOSPC", "1", OPEN, 0, full=1),
    refusal("rename", "ENOSPC", "1+", OPEN, FULL, full=5),
    refusal("openat", "ENOSPC", "2", OPEN, 0, full=1),
    refusal("openat", "EIO", "2", OPEN, BROKEN),
    refusal("openat", "EMFILE", "2+", OPEN, BROKEN),
    refusal("close", "EIO", "1", SEALED, BROKEN),
    refusal("fsync", "EIO", "1", ("shards",), BROKEN),
    refusal("fsync", "EIO", "2", ("shards",), BROKEN),
    refusal("fsync", "EIO", "2+", ("shards",), BROKEN),
    refusal("fsync", "ENOSPC", "2", ("shards",), BROKEN),
    refusal("chmod,fchmodat", "EPERM", "1+", SEALED, 0),
    refusal("write", "EIO", "2", LIST, 0),
    refusal("write", "EIO", "2+", LIST, BROKEN),
    refusal("write", "ENOSPC", "1..4", LIST, 0),
    refusal("write", "ENOSPC", "2+", LIST, 0),
    refusal("fdatasync", "EIO", "2", LIST, 0),
    refusal("fdatasync", "EIO", "2+", LIST, BROKEN),
    refusal("write", "EIO", "1", MANIFEST, 0),
    refusal("write", "EIO", "1+", MANIFEST, BROKEN),
    refusal("write", "ENOSPC", "1..2", MANIFEST, 0),
    refusal("write", "ENOSPC", "1+", MANIFEST, FULL),
    refusal("fdatasync", "EIO", "1", MANIFEST, 0),
    refusal("fdatasync", "EIO", "1+", MANIFEST, BROKEN),
    refusal("write", "EIO", "1", FAILED, 0),
    refusal("write", "EIO", "1+", FAILED, BROKEN),
    refusal("write", "ENOSPC", "1..2", FAILED, 0, full=2),
    refusal("write", "ENOSPC", "1+", FAILED, FULL, full=5),
    refusal("fdatasync", "EIO", "1", FAILED, 0),
    refusal("fdatasync", "EIO", "1+", FAILED, BROKEN),
]
