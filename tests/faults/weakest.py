"""A disk by the weakest rules that POSIX allows, on which the calls of a trace are replayed.

Bytes are safe once a sync of their file that began after they were written has returned; a name, once a
sync of its folder that began after it was made has returned. Nothing else is safe, whatever today's file
systems do. Each complaint begins with the letter of its rule:

a  an acknowledged record or failure has bytes, or a file whose name, that a power loss could take
b  a file is renamed while bytes of it are not safe
c  ``.done_indices`` gets an index whose record is not safe: it leads
d  a line of the manifest is written before its shard is safe under its sealed name
e  something is acknowledged in a folder that a power loss could take
f  a sync that failed is called again
g  a record that was acknowledged is removed
h  a shard is handed on while its line of the manifest, or an index of it in ``.done_indices``, is not safe
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.edges.audit import whole_lines
from tests.faults.traces import Call

_WRITES = {"write": 1, "writev": 1, "pwrite64": 1, "pwritev": 1, "pwritev2": 1}
_SYNCS = frozenset({"fsync", "fdatasync"})
_RENAMES = {"rename": (0, 1), "renameat": (1, 3), "renameat2": (1, 3)}
_UNLINKS = {"unlink": 0, "unlinkat": 1, "rmdir": 0}
_MKDIRS = {"mkdir": 0, "mkdirat": 1}
_OPENS = {"open": 0, "creat": 0, "openat": 1, "openat2": 1}
_HARMLESS = frozenset({"chmod", "fchmod", "fchmodat", "sync_file_range", "fallocate"})
_OTHERS = ("close", "ftruncate", "truncate", "link", "linkat", "dup", "dup2", "dup3", "syncfs")
_ALL = (*_WRITES, *_SYNCS, *_RENAMES, *_UNLINKS, *_MKDIRS, *_OPENS, *_HARMLESS, *_OTHERS)
TRACED = ",".join(f"?{name}" for name in _ALL)
"""The calls that the replay needs to see, for ``strace -e trace=``."""


@dataclass(eq=False)
class Node:
    """A file, or a folder, whatever its name.

    Attributes:
        is_folder: what it is.
        data: its bytes.
        safe_bytes: how many of them, from the start, are safe.
        changes: of a folder: names made and removed since its last sync.
        sync_failed: a sync of it returned an error.
        dropped_to: bytes from ``safe_bytes`` to here are those of a sync that failed: the system may have
            dropped them, and no later sync makes them safe, whatever it reports and to whichever process.
    """

    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    safe_bytes: int = 0
    changes: list[tuple[PurePosixPath, "Node | None"]] = field(default_factory=list)
    sync_failed: bool = False
    dropped_to: int = 0


@dataclass
class Handle:
    """An open file: where the next write goes."""

    node: Node
    appends: bool
    offset: int = 0


class Weakest:
    """The disk below one folder, while one process at a time works on it.

    Attributes:
        complaints: what broke a rule, in order.
        acked: records that were acknowledged, by line on standard output or by ``.done_indices``.
        acks: how many lines on standard output acknowledged something.
    """

    def __init__(self, root: Path) -> None:
        self._root = PurePosixPath(root)
        self.complaints: list[str] = []
        self.acked: set[int] = set()
        self.acks = 0
        self._names: dict[PurePosixPath, Node] = {self._root: Node(is_folder=True)}
        for path in sorted(root.rglob("*")):
            data = bytearray() if path.is_dir() else bytearray(path.read_bytes())
            self._names[PurePosixPath(path)] = Node(is_folder=path.is_dir(), data=data, safe_bytes=len(data))
        self._safe = dict(self._names)
        self._handles: dict[int, Handle] = {}
        self._begun: dict[int, tuple[int, int]] = {}

    def replay(self, trace: Iterable[Call]) -> list[str]:
        """One process from its first call to its last; the complaints so far."""
        self._handles.clear()
        self._begun.clear()
        for node in self._names.values():
            node.sync_failed = False
        for call in trace:
            if call.returned:
                self._end(call)
            else:
                self._begin(call)
        return self.complaints

    # What holds when a call begins.

    def _begin(self, call: Call) -> None:
        if call.name in _WRITES:
            self._begin_write(call)
        elif call.name in _RENAMES:
            old, _ = self._paths(call)
            node = self._names.get(old)
            if node is not None and node.safe_bytes < len(node.data):
                self._complain("b", f"{old} is renamed, {len(node.data) - node.safe_bytes} bytes not safe")
        elif call.name in _SYNCS and (handle := self._handles.get(call.number(0))):
            if handle.node.sync_failed:
                self._complain("f", f"{self._name(handle.node)} is synced again after a failure")
            self._begun[call.thread] = (len(handle.node.data), len(handle.node.changes))
        assert call.name not in {"link", "linkat", "dup", "dup2", "dup3", "truncate"}, call

    def _begin_write(self, call: Call) -> None:
        data = call.text(1)
        if call.number(0) == 1 and data.startswith(b"ack "):
            self.acks += 1
            for word in data.split()[1:]:
                is_failure = word.startswith(b"f")
                index = int(word.removeprefix(b"f"))
                if not is_failure:
                    self.acked.add(index)
                self._complain_unless_safe("a", index, is_failure=is_failure)
            return
        if call.number(0) == 1 and data.startswith(b"sealed "):
            self._check_handed_on(data.split()[1].decode())
            return
        handle = self._handles.get(call.number(0))
        if handle is None:
            return
        name = self._name(handle.node).name.removesuffix(".tmp")
        if name not in {".done_indices", "manifest.jsonl"}:
            return
        start = handle.node.data.rfind(b"\n") + 1
        fresh = bytes(handle.node.data[start:]) + data
        if name == "manifest.jsonl":
            for entry in whole_lines(fresh):
                self._check_manifest(entry)
            return
        for line in fresh.split(b"\n")[:-1]:
            self.acked.add(int(line))
            self._complain_unless_safe("c", int(line), is_failure=False)

    def _check_manifest(self, entry: dict[str, object]) -> None:
        for path, node in self._safe.items():
            if path.name == entry["file"] and path.parent.name == "shards":
                safe = self._names.get(path) is node and node.safe_bytes == entry["bytes"]
                if safe and not self._loose_folders(path):
                    return
        self._complain("d", f"{entry['file']} is listed and not safe under that name")

    def _check_handed_on(self, name: str) -> None:
        entries = [entry for entry in whole_lines(self._safe_data("manifest.jsonl")) if entry["file"] == name]
        if not entries:
            self._complain("h", f"{name} is handed on and its line of the manifest is not safe")
            return
        held = {index for first, last in entries[-1]["indices"] for index in range(first, last + 1)}
        listed = set(map(int, self._safe_data(".done_indices").split(b"\n")[:-1]))
        if held - listed:
            self._complain("h", f"{name} is handed on and {sorted(held - listed)} are not safely listed")

    def _safe_data(self, name: str) -> bytes:
        """What a power loss would leave at least of a file beside the shards."""
        nodes = [node for path, node in self._safe.items() if path.name == name]
        return b"".join([bytes(node.data[: node.safe_bytes]) for node in nodes])

    def _complain_unless_safe(self, rule: str, index: int, *, is_failure: bool) -> None:
        """Say why a power loss could take a record, or a failure that no record has overtaken."""
        reasons = []
        for path, node in self._names.items():
            if not (_is_shard(path) or (is_failure and path.name == "failed.jsonl")):
                continue
            if index in _indices(node.data):
                if index not in _indices(node.data[: node.safe_bytes]):
                    reasons.append((rule, f"{index}: its bytes in {path} are not safe"))
                elif node not in self._safe.values():
                    reasons.append((rule, f"{index}: the name of {path} is not safe"))
                elif loose := self._loose_folders(path):
                    reasons.append(("e", f"{index}: the name of the folder {loose[0]} is not safe"))
                else:
                    return
        self._complain(*(reasons[0] if reasons else (rule, f"{index} is nowhere")))

    def _loose_folders(self, path: PurePosixPath) -> list[PurePosixPath]:
        """Folders above whose names a power loss could take."""
        return [up for up in path.parents if up in self._names and up not in self._safe]

    # What a call has done when it returns.

    def _end(self, call: Call) -> None:
        if call.name in _SYNCS:
            self._end_sync(call)
        elif call.error is not None:
            return
        elif call.name in _OPENS:
            self._end_open(call)
        elif call.name in _WRITES:
            self._end_write(call)
        elif call.name == "close":
            self._handles.pop(call.number(0), None)
        elif call.name in _MKDIRS:
            self._link(self._path(call, _MKDIRS[call.name]), Node(is_folder=True))
        elif call.name in _RENAMES:
            old, new = self._paths(call)
            if node := self._names.get(old):
                self._unlink(old)
                self._link(new, node)
                self._check_nothing_is_gone(call)
        elif call.name in _UNLINKS:
            self._unlink(self._path(call, _UNLINKS[call.name]))
            self._check_nothing_is_gone(call)
        elif call.name == "ftruncate" and (handle := self._handles.get(call.number(0))):
            del handle.node.data[call.number(1) :]
            handle.node.safe_bytes = min(handle.node.safe_bytes, call.number(1))
            handle.node.dropped_to = min(handle.node.dropped_to, call.number(1))
            self._check_nothing_is_gone(call)

    def _end_open(self, call: Call) -> None:
        place = _OPENS[call.name]
        path = self._path(call, place)
        flags = call.arguments[place + 1] if call.name != "creat" else "O_CREAT|O_TRUNC"
        node = self._names.get(path)
        if node is None:
            if "O_CREAT" not in flags or self._root not in path.parents:
                return
            node = Node(is_folder=False)
            self._link(path, node)
        if "O_TRUNC" in flags:
            node.data.clear()
            node.safe_bytes = 0
        assert call.result is not None
        self._handles[call.result] = Handle(node, appends="O_APPEND" in flags)

    def _end_write(self, call: Call) -> None:
        handle = self._handles.get(call.number(0))
        if handle is None:
            return
        node = handle.node
        data = call.text(1)[: call.result]
        at = call.number(3) if call.name.startswith("p") else handle.offset
        if handle.appends:
            at = len(node.data)
        node.data[at : at + len(data)] = data
        node.safe_bytes = min(node.safe_bytes, at)
        if not call.name.startswith("p"):
            handle.offset = at + len(data)

    def _end_sync(self, call: Call) -> None:
        handle = self._handles.get(call.number(0))
        if handle is None:
            return
        node, (size_bytes, change_count) = handle.node, self._begun.pop(call.thread)
        if call.error is not None:
            node.sync_failed = True
            node.dropped_to = max(node.dropped_to, size_bytes)
            return
        if node.safe_bytes >= node.dropped_to:
            node.safe_bytes = max(node.safe_bytes, min(size_bytes, len(node.data)))
        for path, target in node.changes[:change_count]:
            if target is None:
                self._safe.pop(path, None)
            else:
                self._safe[path] = target
        del node.changes[:change_count]

    def _link(self, path: PurePosixPath, node: Node) -> None:
        folder = self._names.get(path.parent)
        if folder is not None:
            self._names[path] = node
            folder.changes.append((path, node))

    def _unlink(self, path: PurePosixPath) -> None:
        if self._names.pop(path, None) is not None:
            self._names[path.parent].changes.append((path, None))

    def _check_nothing_is_gone(self, call: Call) -> None:
        shards = [node for path, node in self._names.items() if _is_shard(path)]
        there = {index for node in shards for index in _indices(node.data)}
        for index in sorted(self.acked - there):
            self._complain("g", f"{index} was acknowledged and is removed by {call.name}{call.arguments}")

    # Words.

    def _path(self, call: Call, place: int) -> PurePosixPath:
        path = PurePosixPath(call.text(place).decode("utf-8", "surrogateescape"))
        assert path.is_absolute() or self._root.name not in path.parts, f"{path} is relative"
        return path

    def _paths(self, call: Call) -> tuple[PurePosixPath, PurePosixPath]:
        old, new = _RENAMES[call.name]
        return self._path(call, old), self._path(call, new)

    def _name(self, node: Node) -> PurePosixPath:
        return next((path for path, there in self._names.items() if there is node), PurePosixPath("removed"))

    def _complain(self, rule: str, what: str) -> None:
        self.complaints.append(f"{rule} {what}")


def _is_shard(path: PurePosixPath) -> bool:
    return path.parent.name == "shards" and path.name.startswith("part-") and path.suffix != ".tmp"


def _indices(data: bytes | bytearray) -> set[int]:
    return {line["index"] for line in whole_lines(bytes(data))}
