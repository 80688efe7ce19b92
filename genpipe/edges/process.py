"""What this process may use of its machine."""

from collections.abc import Mapping
from pathlib import Path

from genpipe.core.errors import ConfigError

SPARE_FILES = 200
"""Open files beside the connections: shards, input, standard streams, libraries (count)."""

LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Where Linux says which local ports an outgoing connection may have."""


def raise_file_limit(connections: int) -> None:
    """Raise the soft limit of open files as far as is needed and allowed.

    Args:
        connections: connections that may be open at once.

    Raises:
        ConfigError: the hard limit is too low; names both numbers.
    """
    if (trouble := file_room(connections)) is not None:
        raise ConfigError(f"{trouble}, or lower --concurrency")


def file_room(connections: int) -> str | None:
    """Raise the soft limit of open files as far as is needed: None, or in one line why that is not allowed.

    Args:
        connections: connections that may be open at once.
    """
    try:
        import resource
    except ImportError:
        return None
    needed = 2 * connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard != resource.RLIM_INFINITY and hard < needed:
        return (
            f"{connections} requests at once need {needed} open files and this process may have {hard}: "
            "raise the limit (ulimit -Hn)"
        )
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError) as error:
        # Without a hard limit there is still the system's own.
        return (
            f"{connections} requests at once need {needed} open files, this process may have {soft}, and the "
            f"system does not raise that ({error}): raise the system's limit (fs.nr_open)"
        )
    return None


def check_local_ports(limits: Mapping[str, int], source: Path = LOCAL_PORTS) -> None:
    """Refuse more connections to one address than this machine has local ports for it.

    Args:
        limits: by address, connections that may be open at once.
        source: says which local ports there are; where it cannot be read, nothing is refused.

    Raises:
        ConfigError: one has too many; names both numbers.
    """
    for address, limit in limits.items():
        if (trouble := port_room(address, limit, source)) is not None:
            raise ConfigError(f"{trouble}, or lower --concurrency")


def port_room(address: str, connections: int, source: Path = LOCAL_PORTS) -> str | None:
    """Why so many connections to one address cannot be open at once, in one line; None where they can."""
    try:
        first, last = map(int, source.read_text().split())
    except (OSError, ValueError):
        return None
    ports = last - first + 1
    if connections <= ports:
        return None
    return (
        f"{connections} requests at once to {address} need as many local ports and this machine has {ports}: "
        "widen net.ipv4.ip_local_port_range"
    )
