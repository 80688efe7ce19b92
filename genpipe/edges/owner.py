"""Who holds a run folder: how a driver signs, and whether the process that signed is still there."""

import os
import socket
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

_PROC = Path("/proc")


class Standing(StrEnum):
    """What can be known of the process that signed."""

    ALIVE = "alive"
    """It runs, or is suspended."""

    GONE = "gone"
    """It has ended; a process that has its number now is another one."""

    UNKNOWN = "unknown"
    """It ran where this process cannot look: on another machine, before a restart, in another container."""


def signature(*, started_at: str, nonce: str) -> dict[str, Any]:
    """This process, JSON-ready.

    Args:
        started_at: the present moment, as text.
        nonce: the claim's own name.
    """
    return {
        "pid": os.getpid(),
        "pid_start": _start_of(os.getpid()),
        "host": socket.gethostname(),
        "start": started_at,
        "nonce": nonce,
        **_surroundings(),
    }


def standing(owner: Mapping[str, Any]) -> Standing:
    """What has become of the process that signed with ``owner``; never raises for what stands in it."""
    pid = owner.get("pid")
    if not isinstance(pid, int) or owner.get("host") != socket.gethostname():
        return Standing.UNKNOWN
    if any(owner.get(key) != value for key, value in _surroundings().items()):
        return Standing.UNKNOWN
    if not _exists(pid):
        return Standing.GONE
    start = _start_of(pid)
    if start is None or owner.get("pid_start") is None:
        return Standing.UNKNOWN
    # Numbers of processes are used again, in a small container soon.
    return Standing.ALIVE if start == owner["pid_start"] else Standing.GONE


def described(owner: Mapping[str, Any]) -> str:
    """The owner in a few words."""
    return f"host {owner.get('host', 'unknown')}, pid {owner.get('pid', 'unknown')}"


def _surroundings() -> dict[str, str | None]:
    """Within what a number means the same process: this run of the kernel, and this namespace of numbers."""
    return {"boot_id": _boot_id(), "pid_namespace": _pid_namespace()}


def _boot_id() -> str | None:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return None


def _exists(pid: int) -> bool:
    if pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return not _is_remains(pid)


def _is_remains(pid: int) -> bool:
    """Whether it has ended and only its parent has not asked how: it does nothing any more."""
    fields = _stat_of(pid)
    # With more than one thread, another one may still be within a write.
    return len(fields) > 17 and fields[0] in ("Z", "X") and int(fields[17]) <= 1


def _start_of(pid: int) -> int | None:
    """When a process began, in ticks since the machine started; None where it cannot be known."""
    fields = _stat_of(pid)
    return int(fields[19]) if len(fields) > 19 else None


def _stat_of(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the third on (the state); empty where there are none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The second field is the program's name, which may hold spaces and brackets.
    return text.rpartition(")")[2].split()
