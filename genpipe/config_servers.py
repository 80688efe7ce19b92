"""The servers among the settings: one entry each, whatever way and however often they were given."""

from typing import Any, Literal

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from genpipe.config_errors import Origin
from genpipe.config_types import Count, Name, Section
from genpipe.core.errors import ConfigError
from genpipe.edges.address import HoldsSecretError, base_address, each_port


class ServerConfig(Section):
    """One server.

    Attributes:
        url: base address, without ``/v1``; its host in lower case, and without its scheme's own port.
        kind: ``sglang``, or ``openai`` for any other server with that API.
        concurrency: requests open at once.
        api_key_env: environment variable that holds its key.
    """

    url: str
    kind: Literal["sglang", "openai"] = "sglang"
    concurrency: Count = 32
    api_key_env: Name | None = None

    @field_validator("url")
    @classmethod
    def _base_address(cls, url: str) -> str:
        try:
            return base_address(url)
        except HoldsSecretError as error:
            # Of this kind, what was given is not shown.
            raise PydanticCustomError("secret", "{wanted}: use api_key_env", {"wanted": str(error)}) from None


def spread(entries: list[Any], concurrency: int | None, origin: Origin) -> list[Any]:
    """Each address with a range of ports becomes one entry a port.

    Args:
        entries: the servers as they were given; those that are none of a kind known here stay as they are.
        concurrency: requests per server, whatever the entries say; None: as they say.
        origin: where they came from.

    Raises:
        ConfigError: a range is none.
    """
    one_each: list[Any] = []
    for entry in entries:
        if not (isinstance(entry, dict) and isinstance(entry.get("url"), str)):
            one_each.append(entry)
            continue
        try:
            urls = each_port(entry["url"])
        except ValueError as error:
            raise ConfigError(f"{origin.of(['servers'])}: server {entry['url']}: {error}") from None
        for url in urls:
            one = {**entry, "url": url}
            if concurrency is not None:
                one["concurrency"] = concurrency
            one_each.append(one)
    return one_each


def once_each(
    servers: tuple[ServerConfig, ...], entries: list[Any], origin: Origin
) -> tuple[ServerConfig, ...]:
    """The servers without those that say the same of the same address again.

    Args:
        servers: one for each entry.
        entries: how they were given.
        origin: where they came from.

    Raises:
        ConfigError: one address is given with two limits, kinds or keys.
    """
    first: dict[str, int] = {}
    for place, server in enumerate(servers):
        before = first.setdefault(server.url, place)
        if server != servers[before]:
            one, other = servers[before].model_dump(), server.model_dump()
            differing = [key for key in one if one[key] != other[key]]
            named = [
                _with(entries[at]["url"], said, differing) for at, said in ((before, one), (place, other))
            ]
            where = origin.of(["servers"])
            raise ConfigError(f"{where}: {' and '.join(named)} are one server, and differ: keep one of them")
    return tuple(servers[place] for place in first.values())


def _with(url: str, settings: dict[str, Any], keys: list[str]) -> str:
    """An address as it was given, with some of its settings."""
    said = ", ".join(f"{key} {settings[key] or 'none'}" for key in keys)
    return f"{url} ({said})"
