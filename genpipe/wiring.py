"""What the settings mean to the parts of a run."""

import os
from collections.abc import Callable, Mapping, Sequence

from genpipe.config import Settings
from genpipe.core.errors import ConfigError, ServerFault
from genpipe.core.settings import BenchSettings, FlowSettings, GuardSettings
from genpipe.core.values import ServerSpec
from genpipe.edges import known_options
from genpipe.edges.connections import Names
from genpipe.edges.discovery import Served
from genpipe.edges.health import RunModel
from genpipe.edges.prompts.dialects import Dialect
from genpipe.edges.requests import Bodies, demand_names
from genpipe.edges.sglang import Endpoint, SglangTransport


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
        continues=bool(
            (settings.request.sampling | settings.request.extra_body).get("continue_final_message")
        ),
        keep=settings.output.keep,
    )


def endpoints_of(settings: Settings) -> list[Endpoint]:
    """Where the servers are, and their keys.

    Raises:
        ConfigError: a key is not in the environment, or a server cannot be asked as the run wants it.
    """
    api = settings.request.api
    demand_names(api, settings.request.sampling)
    endpoints = []
    for server in settings.servers:
        if api == "generate" and server.kind != "sglang":
            raise ConfigError(
                f"server {server.url} is of kind {server.kind}, and request.api = generate is SGLang's own: "
                "set request.api to chat or completions"
            )
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


def transport_of(
    settings: Settings,
    endpoints: Sequence[Endpoint],
    *,
    model: str,
    run_model: RunModel,
    served: Mapping[str, Served | ServerFault],
    names: Names,
    warn: Callable[[str], None],
) -> SglangTransport:
    """How prompts reach the servers; options that these are known to ignore are warned of.

    Args:
        settings: of the run.
        endpoints: the servers.
        model: the model's name as it is sent.
        run_model: what a server has to serve.
        served: what the servers said of themselves, by address.
        names: looks names up.
        warn: told of each such option in one line, now or when it first comes.
    """
    request = settings.request
    has_sglang = any(endpoint.takes_rid for endpoint in endpoints)
    if has_sglang:
        for text in _ignored_options(settings, served):
            warn(text)
    return SglangTransport(
        endpoints,
        bodies=Bodies(
            model=model,
            api=request.api,
            sampling=request.sampling,
            extra_body=request.extra_body,
            token_ids=request.token_ids,
            warn=warn if has_sglang else None,
        ),
        timeout_s=request.timeout_s,
        run_model=run_model,
        names=names,
        keep_reasoning=request.reasoning_in_history,
        warn=warn,
    )


def asks_versions(settings: Settings) -> bool:
    """Whether the versions of the servers tell whether they do what they are asked for."""
    request = settings.request
    return known_options.depends_on_version(request.api, [option.name for option in _options_of(settings)])


def _options_of(settings: Settings) -> list[known_options.Option]:
    request = settings.request
    options = known_options.options_of(request.sampling, request.extra_body)
    if request.token_ids and request.api != "generate":
        options.append(known_options.Option("request.token_ids", "return_token_ids", is_sampling=False))
    return options


def _ignored_options(settings: Settings, served: Mapping[str, Served | ServerFault]) -> list[str]:
    api, options = settings.request.api, _options_of(settings)
    versions = {
        url: answer.version
        for url, answer in served.items()
        if isinstance(answer, Served) and answer.version is not None
    }
    ignored = [text for option in options if (text := known_options.ignored(api, option))]
    return [*ignored, *known_options.too_new(api, options, versions)]


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
