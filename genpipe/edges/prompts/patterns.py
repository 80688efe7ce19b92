"""Paths that stand for several files: ``data/*.jsonl``, with ``**`` for folders within folders."""

import glob
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from genpipe.core.errors import ConfigError

_WILD = re.compile(r"[*?[]")


def local_files(path: str) -> list[str]:
    """The files that a path stands for, sorted: itself, where there is such a file or it is no pattern.

    Raises:
        ConfigError: it is a pattern that no file matches.
    """
    if not is_pattern(path) or Path(path).exists():
        return [path]
    # Not pathlib's: what it finds is not written as the pattern is.
    found = sorted(file for file in glob.glob(path, recursive=True) if not Path(file).is_dir())  # noqa: PTH207
    if not found:
        raise nothing_matches(path)
    return found


def is_pattern(path: str) -> bool:
    """Whether there is a wildcard in it."""
    return _WILD.search(path) is not None


def head_of(pattern: str) -> str:
    """What stands before the first wildcard."""
    return _WILD.split(pattern, maxsplit=1)[0]


def matching(keys: Iterable[str], pattern: str) -> list[str]:
    """The keys that a pattern stands for, sorted: the one that is just so, if there is one."""
    parts = pattern.split("/")
    found = []
    for key in keys:
        if key == pattern:
            return [key]
        if _matches(key.split("/"), parts):
            found.append(key)
    return sorted(found)


def nothing_matches(pattern: str) -> ConfigError:
    """The ConfigError for a pattern without a file."""
    return ConfigError(f"no file matches {pattern!r}: see [input].paths, or --prompts")


def _matches(parts: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[place:], pattern[1:]) for place in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
