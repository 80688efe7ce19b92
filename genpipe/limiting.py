"""``genpipe limit``: hands changes of the fleet to the driver of a live run, and sees it take them."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from genpipe import status
from genpipe.core import wording
from genpipe.core.errors import ConfigError
from genpipe.core.progress import OVER
from genpipe.edges import limits_file
from genpipe.edges.address import base_address, each_port
from genpipe.edges.limits_file import LIMIT_MAX, LIMITS, Limits
from genpipe.ui import terminal

TAKEN_WITHIN_S = 5.0
"""The driver looks at the file once a second, and reports once a second."""

LOOK_EVERY_S = 0.1
ALL = "*"
FORM = "write SERVER=N, e.g. gpu1:30000=16, or gpu1:30000=0 to use it no more"

_NAMED_MAX = 5


def limit(
    folder: Path,
    changes: Sequence[str],
    *,
    say: Callable[[str], None],
    tell: Callable[[str], None],
    wait_s: float = TAKEN_WITHIN_S,
) -> int:
    """Change the limits of a live run's servers, add servers to it, or remove some.

    Args:
        folder: the run folder.
        changes: each ``SERVER=N``.
        say: shows a line on stdout.
        tell: shows a line on stderr.
        wait_s: how long to wait for the driver to take them (seconds).

    Returns:
        0 once the driver has taken them; 1 if it has not in time: they are handed over all the same, and it
        takes them as soon as it can.

    Raises:
        ConfigError: no run is under way there, or a change cannot be made; nothing was changed.
        StoreError: they cannot be handed over.
    """
    running = _look(folder)
    path = folder / LIMITS
    with limits_file.changing(path):
        handed_over = limits_file.read(path)
        fleet = {**_fleet(running.progress), **handed_over}
        wanted = _resolve(changes, fleet)
        merged = {**fleet, **wanted}
        if not any(merged.values()):
            raise ConfigError(
                f"that would leave no server to the run in {folder}: keep one, add another in the same "
                "command, or stop the run with Ctrl-C (it can be resumed)"
            )
        limits_file.write(path, {**handed_over, **wanted})
    until_s = time.monotonic() + wait_s
    while True:
        seen = status.look(folder)
        rows = [row for row in seen.progress["servers"] if row["url"] in wanted]
        if _are_taken(wanted, rows):
            say("\n".join(terminal.servers(rows)))
            return 0
        is_over = not seen.alive or seen.progress["state"] in OVER
        if is_over or time.monotonic() >= until_s:
            break
        time.sleep(LOOK_EVERY_S)
    if is_over:
        then = "the run has ended meanwhile, and begins again with the servers as configured"
    else:
        then = f"not taken within {wait_s:g} s; it will be, and `genpipe status {folder}` shows it then"
    tell(f"genpipe: handed over ({limits_file.described(wanted)}), but {then}")
    return 1


def _look(folder: Path) -> status.Look:
    """The run, which must be one whose driver is at work."""
    seen = status.look(folder)
    state = seen.progress["state"]
    if seen.alive and state not in OVER:
        return seen
    ended = f"its last report says {state}" if state in OVER else "its driver has ended"
    raise ConfigError(
        f"the run in {folder} is not under way ({ended}): give limits to `genpipe run`, with --concurrency "
        "or in its config"
    )


def _fleet(progress: Mapping[str, Any]) -> Limits:
    """The limits of all servers of a run by its report; 0 for one that is used no more."""
    return {row["url"]: 0 if row["state"] == "gone" else row["limit"] for row in progress["servers"]}


def _are_taken(wanted: Limits, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a report shows all of it; a removed server may be shown as gone, or not at all."""
    shown = {row["url"]: row for row in rows}
    for url, limit in wanted.items():
        row = shown.get(url)
        used = 0 if row is None or row["state"] == "gone" else row["limit"]
        if used != limit:
            return False
    return True


def _resolve(changes: Sequence[str], fleet: Limits) -> Limits:
    """What is wanted, by address.

    Args:
        changes: as they were typed; a single server's counts more than what is said of all.
        fleet: all servers of the run, with 0 for those that are used no more.

    Raises:
        ConfigError: one of them cannot be made.
    """
    of_all: Limits = {}
    of_one: Limits = {}
    for change in changes:
        name, limit = _split(change)
        if name == ALL:
            if of_all:
                raise ConfigError(f"{change}: {ALL} is given twice; give it once")
            of_all = {url: limit for url, now in fleet.items() if now}
            continue
        for url in _addresses(name, change, fleet, adds=limit > 0):
            if url in of_one:
                raise ConfigError(f"{change}: {url} is given twice; give it once")
            of_one[url] = limit
    return {**of_all, **of_one}


def _split(change: str) -> tuple[str, int]:
    if "@" in change:
        # It may hold a password, so it is not shown.
        raise ConfigError("a server's address holds no user and no password")
    name, equals, number = (part.strip() for part in change.rpartition("="))
    if not equals or not name or not change.isprintable():
        raise ConfigError(f"{change!r:.80}: {FORM}")
    if not re.fullmatch("[0-9]{1,9}", number) or int(number) > LIMIT_MAX:
        wanted = f"must be a whole number from 0 to {LIMIT_MAX:,}"
        raise ConfigError(f"{name}: its limit {wanted}, got {number!r:.40}; {FORM}")
    return name, int(number)


def _addresses(name: str, change: str, fleet: Limits, *, adds: bool) -> list[str]:
    """The servers that a name means: whole addresses, new ones only if it ``adds``, or a known one's end."""
    if "://" not in name:
        return [_known(name, fleet)]
    try:
        urls = [base_address(url) for url in each_port(name)]
    except ValueError as error:
        raise ConfigError(f"{change}: {error}") from None
    for url in urls:
        if url not in fleet and not adds:
            raise ConfigError(
                f"{url} is no server of this run, so that it cannot be removed; {_those(fleet)}"
            )
    return urls


def _known(name: str, fleet: Limits) -> str:
    """The one server of the run that has this ending."""
    for scheme in ("http", "https"):
        try:
            whole = base_address(f"{scheme}://{name}")
        except ValueError:
            continue
        if whole in fleet:
            return whole
    found = [url for url in fleet if _ends_with(url, name.lower())]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError(
            f"{name} is no server of this run; {_those(fleet)}. To add one, give its whole address, as in "
            "http://gpu1:30000=16"
        )
    raise ConfigError(f"{name} may mean {_listed(found)}: give more of the address")


def _ends_with(url: str, name: str) -> bool:
    """Whether a name is the ending of an address, and begins where a part of it does."""
    before = url[: -len(name)]
    return url.lower().endswith(name) and (name[0] in ".:/" or before[-1:] in (".", ":", "/"))


def _those(fleet: Limits) -> str:
    return f"its servers are {_listed(list(fleet))}"


def _listed(urls: Sequence[str]) -> str:
    more = len(urls) - _NAMED_MAX
    return ", ".join(urls[:_NAMED_MAX]) + (f" and {wording.number(more)} more" if more > 0 else "")
