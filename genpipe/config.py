"""The run's settings: one TOML file, ``section.key=value`` over it, and errors that name the key."""

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from genpipe.core.errors import ConfigError

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]

_OWN_BODY_KEYS = {"messages", "prompt", "text", "input_ids", "model", "rid", "stream"}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Input(_Section):
    """Where prompts come from and how a record becomes a request.

    Attributes:
        paths: JSON Lines files, in this order; a record's index counts over all of them.
        dialect: how records look; ``auto`` looks at each record.
        field: the field that holds the text or the messages, where it has another name.
        id_field: the field that holds the user's own id.
        system: system message put before each conversation that has none.
        on_bad_line: ``skip`` lists bad lines in failed.jsonl; ``fail`` scans the whole input first.
    """

    paths: tuple[str, ...] = ()
    dialect: Literal["auto", "prompt", "messages", "sharegpt"] = "auto"
    field: str | None = None
    id_field: str = "id"
    system: str | None = None
    on_bad_line: Literal["skip", "fail"] = "skip"


class ServerConfig(_Section):
    """One server.

    Attributes:
        url: base address, without ``/v1``.
        kind: ``sglang``, or ``openai`` for any other server with that API.
        concurrency: requests open at once.
        api_key_env: environment variable that holds its key.
    """

    url: str
    kind: Literal["sglang", "openai"] = "sglang"
    concurrency: Count = 32
    api_key_env: str | None = None

    @field_validator("url")
    @classmethod
    def _base_address(cls, url: str) -> str:
        if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
            raise ValueError(f"{url!r} is no http:// or https:// address")
        return url.rstrip("/").removesuffix("/v1")


class Request(_Section):
    """What is asked of a server, the same for all prompts.

    Attributes:
        api: which endpoint.
        model: name sent as ``model``; the servers' own name for it where none is given.
        sampling: sampling parameters, passed through (``temperature``, ``max_tokens`` …).
        extra_body: further members of the request body, passed through.
        timeout_s: limit of one request; passing it ends the prompt. None: no limit.
        grace_s: how long a stop waits for requests in flight.
    """

    api: Literal["chat"] = "chat"
    model: str | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    extra_body: dict[str, Any] = Field(default_factory=dict)
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    grace_s: Seconds = 20.0

    @model_validator(mode="after")
    def _no_own_keys(self) -> "Request":
        for section in ("sampling", "extra_body"):
            values = getattr(self, section)
            for key in values:
                if key in _OWN_BODY_KEYS:
                    raise ValueError(f"{section}.{key} is set by genpipe itself; remove it")
            _demand_json(values, section)
        if self.sampling.keys() & self.extra_body.keys():
            twice = sorted(self.sampling.keys() & self.extra_body.keys())
            raise ValueError(f"{', '.join(twice)} stands in both sampling and extra_body; keep one")
        return self


def _demand_json(value: Any, where: str) -> None:
    """TOML has dates and not-a-number, JSON has not."""
    if isinstance(value, dict):
        for key, part in value.items():
            _demand_json(part, f"{where}.{key}")
    elif isinstance(value, list):
        for part in value:
            _demand_json(part, where)
    elif not isinstance(value, str | int | float | None) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        raise ValueError(f"{where} = {value} cannot be sent as JSON")


class StartConfig(_Section):
    """How a run begins.

    Attributes:
        ramp_s: slots open over this time, so that a fleet is not hit by a herd.
    """

    ramp_s: Seconds = 1.0


class Output(_Section):
    """Where records go.

    Attributes:
        dir: the run folder.
        shard_records: records in a shard.
        keep: input fields copied into the record.
    """

    dir: str | None = None
    shard_records: Count = 500
    keep: tuple[str, ...] = ()


class Retry(_Section):
    """What happens after a fault.

    Attributes:
        prompt_attempts: faults charged to a prompt before it is given up for now.
        backoff_s: first pause of a prompt; doubles with each fault.
        pause_max_s: longest pause of a prompt, and longest wait between two probes of a server.
        bench_faults: faults in a row that take a server out of use.
        bench_pause_s: wait before the first probe of a server; doubles.
    """

    prompt_attempts: Count = 4
    backoff_s: Annotated[float, Field(gt=0)] = 0.5
    pause_max_s: Annotated[float, Field(gt=0)] = 8.0
    bench_faults: Count = 3
    bench_pause_s: Annotated[float, Field(gt=0)] = 0.5


class Guards(_Section):
    """When a run stops itself, because it cannot be what was meant.

    Attributes:
        refused_after: prompts that must have ended first.
        refused_share: a larger share of prompts refused by the servers stops the run.
    """

    refused_after: Count = 200
    refused_share: Annotated[float, Field(ge=0, le=1)] = 0.5


class Settings(_Section):
    """All of it; one attribute a section of the file."""

    input: Input = Field(default_factory=Input)
    servers: tuple[ServerConfig, ...] = ()
    request: Request = Field(default_factory=Request)
    start: StartConfig = Field(default_factory=StartConfig)
    output: Output = Field(default_factory=Output)
    retry: Retry = Field(default_factory=Retry)
    guards: Guards = Field(default_factory=Guards)

    def shape(self, model: str) -> dict[str, Any]:
        """What shapes an answer; a resume may not change it.

        Args:
            model: the model's name as it is sent.
        """
        return {
            "request": {
                "api": self.request.api,
                "model": model,
                "sampling": self.request.sampling,
                "extra_body": self.request.extra_body,
            },
            "input": {
                "dialect": self.input.dialect,
                "field": self.input.field,
                "id_field": self.input.id_field,
                "system": self.input.system,
            },
        }


def load(
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    prompts: Sequence[str] = (),
    servers: Sequence[str] = (),
    concurrency: int | None = None,
    out: str | None = None,
) -> Settings:
    """The settings in force: the file, then ``--set``, then the named options.

    Args:
        path: TOML file, or None.
        overrides: ``section.key=value``; the value is TOML, or else plain text.
        prompts: input files.
        servers: addresses; ``http://host:30000-30007`` means eight of them.
        concurrency: requests per server.
        out: the run folder.

    Raises:
        ConfigError: naming the file and the key, and the nearest known name for an unknown one.
    """
    data = _read(path) if path is not None else {}
    where = str(path) if path is not None else "settings"
    for override in overrides:
        _override(data, override)
    if prompts:
        _section(data, "input")["paths"] = list(prompts)
    if out is not None:
        _section(data, "output")["dir"] = out
    if servers:
        data["servers"] = [{"url": url} for url in servers]
    entries = data.get("servers", [])
    if isinstance(entries, list):
        data["servers"] = _spread(entries, concurrency)
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0], where)) from None
    urls = [server.url for server in settings.servers]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"server {url} is given {urls.count(url)} times; give it once, with its limit")
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not TOML: {error}") from None


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name} must be a section, [{name}]")
    return section


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {override}: write it as section.key=value, e.g. request.timeout_s=600")
    if parts[0] == "servers":
        raise ConfigError(f"--set {override}: servers are set by --servers and --concurrency, or in the file")
    target = data
    for part in parts[:-1]:
        target = _section(target, part)
    target[parts[-1]] = _toml_value(text)


def _toml_value(text: str) -> Any:
    """A value as TOML has it; what is no TOML is text, so that quotes need not be quoted for the shell."""
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if len(values) == 1 else text


def _spread(entries: list[Any], concurrency: int | None) -> list[Any]:
    """Each address with a range of ports becomes one entry a port."""
    spread: list[Any] = []
    for entry in entries:
        if not (isinstance(entry, dict) and isinstance(entry.get("url"), str)):
            spread.append(entry)
            continue
        for url in _ports(entry["url"]):
            one = {**entry, "url": url}
            if concurrency is not None:
                one["concurrency"] = concurrency
            spread.append(one)
    return spread


def _ports(url: str) -> Iterable[str]:
    match = re.fullmatch(r"(.*:)(\d+)-(\d+)(/.*)?", url)
    if match is None:
        return [url]
    head, first, last, tail = match.group(1), int(match.group(2)), int(match.group(3)), match.group(4) or ""
    if not 0 < first <= last < 65536:
        raise ConfigError(f"server {url}: {first}-{last} is no range of ports")
    return [f"{head}{port}{tail}" for port in range(first, last + 1)]


def _explain(error: ErrorDetails, where: str) -> str:
    """One line for one mistake."""
    place = [str(part) for part in error["loc"]]
    key = ".".join(place)
    if error["type"] == "extra_forbidden":
        known = _names(place[:-1])
        near = difflib.get_close_matches(place[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        return f"{where}: unknown key {key}; {hint}"
    given = error.get("input")
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    shown = "" if isinstance(given, BaseModel | dict | None) else f", got {given!r:.80}"
    return f"{where}: {key}: {message}{shown}"


def _names(place: Sequence[str]) -> list[str]:
    """The keys known at a place of the settings."""
    model: type[BaseModel] = Settings
    for part in place:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel))
    return list(model.model_fields)
