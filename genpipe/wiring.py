"""What the settings mean to the parts of a run."""

import os

from genpipe.config import Settings
from genpipe.core.errors import ConfigError
from genpipe.core.settings import BenchSettings, FlowSettings, GuardSettings
from genpipe.core.values import ServerSpec
from genpipe.edges.dialects import Dialect
from genpipe.edges.sglang import Endpoint


def dialect_of(settings: Settings) -> Dialect:
    """How the input's records become prompts."""
    return Dialect(
        name=settings.input.dialect,
        field=settings.input.field,
        id_field=settings.input.id_field,
        system=settings.input.system,
        api=settings.request.api,
        multi_turn=settings.request.multi_turn,
        sampling_field=settings.input.sampling_field,
        body_fields=settings.input.body_fields,
        keep=settings.output.keep,
    )


def endpoints_of(settings: Settings) -> list[Endpoint]:
    """Where the servers are, and their keys.

    Raises:
        ConfigError: a key is not in the environment.
    """
    endpoints = []
    for server in settings.servers:
        key = None
        if server.api_key_env is not None:
            key = os.environ.get(server.api_key_env)
            if not key:
                raise ConfigError(
                    f"server {server.url}: the environment variable {server.api_key_env} is not set; it "
                    "should hold the server's key"
                )
        endpoints.append(Endpoint(url=server.url, api_key=key, takes_rid=server.kind == "sglang"))
    return endpoints


def specs_of(settings: Settings) -> list[ServerSpec]:
    """The servers as the scheduler sees them."""
    return [ServerSpec(url=server.url, limit=server.concurrency) for server in settings.servers]


def flow_settings_of(settings: Settings) -> FlowSettings:
    """The scheduler's numbers."""
    request, retry = settings.request, settings.retry
    return FlowSettings(
        prompt_attempts=retry.prompt_attempts,
        backoff_s=retry.backoff_s,
        backoff_max_s=retry.pause_max_s,
        bench=BenchSettings(
            faults=retry.bench_faults, pause_s=retry.bench_pause_s, pause_max_s=retry.pause_max_s
        ),
        ramp_s=settings.start.ramp_s,
        longest_first=settings.start.order == "longest_first",
        disk_wait_s=settings.output.disk_wait_s,
        grace_s=request.grace_s,
        stall_s=request.stall_s,
        silent_s=request.silent_s,
        hedge=retry.hedge,
        alone=retry.poison == "alone",
        give_up_s=retry.give_up_s,
        guards=_guard_settings_of(settings),
    )


def _guard_settings_of(settings: Settings) -> GuardSettings:
    guards = settings.guards
    return GuardSettings(
        refused_after=guards.refused_after,
        refused_share_max=guards.refused_share,
        after=guards.after,
        window=guards.window,
        failed_share_max=guards.failed_share,
        empty_share_max=guards.empty_share,
        cut_share_max=guards.cut_share,
        looping_share_max=guards.looping_share,
        unclosed_think_share_max=guards.unclosed_think_share,
        short_share_max=guards.short_share,
        short_tokens=guards.short_tokens,
        on_failed=guards.on_failed,
        on_empty=guards.on_empty,
        on_cut=guards.on_cut,
        on_looping=guards.on_looping,
        on_unclosed_think=guards.on_unclosed_think,
        on_short=guards.on_short,
    )
