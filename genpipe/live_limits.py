"""The limits of a run that goes on: what ``limits.json`` says is carried out by its driver."""

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from genpipe.core.values import ServerSpec
from genpipe.driver import Driver
from genpipe.edges.limits_file import Limits, described
from genpipe.edges.process import file_room, port_room
from genpipe.edges.sglang import Endpoint, SglangTransport


class LiveLimits:
    """Holds what is wished for against what is so, and changes the difference."""

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        endpoints: Sequence[Endpoint],
        transport: SglangTransport,
        driver: Driver,
        note: Callable[[str], None],
    ) -> None:
        """Begin with the configured fleet.

        Args:
            specs: the servers and their limits.
            endpoints: their addresses and keys; those of a server that joins are as of one on the same host,
                or else of the first.
            transport: told of servers that join.
            driver: told of every change.
            note: told, in one line, what was changed, or why not.
        """
        self._configured = {spec.url: spec.limit for spec in specs}
        self._limits = dict(self._configured)
        self._endpoints = list(endpoints)
        self._known = {endpoint.url for endpoint in endpoints}
        self._transport = transport
        self._driver = driver
        self._note = note

    def apply(self, wished: Mapping[str, int]) -> None:
        """Make the fleet what the configured one becomes with these limits by address; 0: it leaves.

        What the machine has no room for stays as it is.
        """
        after = {**self._limits, **dict.fromkeys(self._limits.keys() - self._configured.keys(), 0)}
        after |= {**self._configured, **wished}
        trouble = file_room(sum(after.values()))
        for url, limit in after.items():
            trouble = trouble or port_room(url, limit)
        if trouble is not None:
            self._note(f"warning: the limits stay as they are: {trouble}")
            return
        changed: Limits = {url: limit for url, limit in after.items() if self._limits.get(url, 0) != limit}
        for url, limit in changed.items():
            if url not in self._known:
                self._known.add(url)
                self._transport.add(self._endpoint(url))
            self._driver.set_limit(url, limit)
        self._limits = after
        if changed:
            self._note(f"limits changed: {described(changed)}")

    def _endpoint(self, url: str) -> Endpoint:
        host = urlsplit(url).hostname
        like = next(
            (each for each in self._endpoints if urlsplit(each.url).hostname == host), self._endpoints[0]
        )
        return Endpoint(url=url, api_key=like.api_key, takes_rid=like.takes_rid)
