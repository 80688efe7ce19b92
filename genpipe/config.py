"""The run's settings: one TOML file, ``section.key=value`` over it, and errors that name the key."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from genpipe.config_errors import Origin, explain
from genpipe.config_servers import ServerConfig, once_each, spread
from genpipe.config_types import (
    Count,
    Flag,
    HttpUrl,
    Name,
    OnBound,
    PathText,
    S3Uri,
    Seconds,
    Section,
    Share,
    SomeSeconds,
    Text,
    demand_json,
    misplaced,
)
from genpipe.core.errors import ConfigError
from genpipe.core.values import OWN_BODY_KEYS, ApiName, DialectName

__all__ = ["ServerConfig", "Settings", "load"]


class Input(Section):
    """Where prompts come from and how a record becomes a request.

    Attributes:
        paths: files, patterns such as ``data/*.jsonl``, ``s3://`` objects, or ``-`` for stdin, in this order;
            a record's index counts over all of them.
        format: ``jsonl`` (plain, gzip or zstd) or ``parquet``; ``auto`` looks at each file.
        dialect: how records look; ``auto`` looks at each record.
        field: the field that holds the text or the messages, where it has another name.
        id_field: the field that holds the user's own id.
        system: system message put before each conversation that has none.
        sampling_field: the field that holds sampling parameters of a record, which stand over the run's.
        body_fields: fields that are copied into the request, over ``request.extra_body`` (``tools`` …).
        on_bad_line: ``skip`` lists bad lines in failed.jsonl; ``fail`` scans the whole input first.
    """

    paths: tuple[PathText, ...] = ()
    format: Literal["auto", "jsonl", "parquet"] = "auto"
    dialect: DialectName = "auto"
    field: Name | None = None
    id_field: Name = "id"
    system: Text | None = None
    sampling_field: Name | None = None
    body_fields: tuple[Name, ...] = ()
    on_bad_line: Literal["skip", "fail"] = "skip"


class Request(Section):
    """What is asked of a server, the same for all prompts.

    Attributes:
        api: which endpoint: ``chat`` and ``completions`` as OpenAI has them, or SGLang's own ``generate``.
        model: name sent as ``model``; the servers' own name for it where none is given.
        sampling: sampling parameters, passed through (``temperature``, ``max_tokens`` …).
        extra_body: further members of the request body, passed through.
        multi_turn: the turns of a conversation are asked one by one, each with the new answers before it.
        reasoning_in_history: the new answers stand there with their reasoning.
        token_ids: ask for the token ids of prompts and answers, and keep them in the record.
        timeout_s: limit of one request; passing it ends the prompt. None: no limit.
        stall_s: age at which a request is given up, closed, and sent to another server. None: learnt from how
            long this run's answers take.
        silent_s: a server that for so long neither answers nor shows any work is given up, with all its
            requests.
        grace_s: how long a stop waits for requests in flight.
    """

    api: ApiName = "chat"
    model: Name | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    extra_body: dict[str, Any] = Field(default_factory=dict)
    multi_turn: Flag = False
    reasoning_in_history: Flag = False
    token_ids: Flag = False
    timeout_s: SomeSeconds | None = None
    stall_s: SomeSeconds | None = None
    silent_s: SomeSeconds = 60.0
    grace_s: Seconds = 20.0

    @model_validator(mode="after")
    def _no_own_keys(self) -> "Request":
        for section in ("sampling", "extra_body"):
            values = getattr(self, section)
            for key in values:
                if key in OWN_BODY_KEYS:
                    raise misplaced(f"{section}.{key}", "is set by genpipe itself; remove it")
            demand_json(values, section)
        if self.sampling.keys() & self.extra_body.keys():
            twice = min(self.sampling.keys() & self.extra_body.keys())
            raise misplaced(f"sampling.{twice}", "stands in extra_body as well; keep one of them")
        if self.multi_turn and self.api != "chat":
            raise misplaced("multi_turn", f"is for request.api = chat, and not for {self.api}")
        for section in ("sampling", "extra_body"):
            if self.multi_turn and getattr(self, section).get("n", 1) != 1:
                raise misplaced(f"{section}.n", "is to be 1 where request.multi_turn is on")
        if self.reasoning_in_history and not self.multi_turn:
            raise misplaced("reasoning_in_history", "is for request.multi_turn = true")
        return self


class StartConfig(Section):
    """How a run begins.

    Attributes:
        ramp_s: slots open over this time, so that a fleet is not hit by a herd.
        order: ``input``, or ``longest_first``: of the prompts in memory the longest goes first, as a guess at
            the longest answer, so that the end of the run is not spent waiting for a few.
        any_model: servers may serve different models; otherwise one with another model than the run's is
            not used.
    """

    ramp_s: Seconds = 1.0
    order: Literal["input", "longest_first"] = "input"
    any_model: Flag = False


class Output(Section):
    """Where records go.

    Attributes:
        dir: the run folder.
        shard_records: records in a shard.
        disk_wait_s: how long a run waits on a full disk before it ends.
        keep: input fields copied into the record.
    """

    dir: PathText | None = None
    shard_records: Count = 500
    disk_wait_s: Seconds = 600.0
    keep: tuple[Text, ...] = ()


class S3(Section):
    """Where every shard goes beside the local disk.

    Attributes:
        uri: ``s3://bucket/prefix`` of the run; none: nothing is uploaded.
        endpoint_url: address of a store other than AWS's own.
        region: the bucket's; what AWS's own chain says where none is given.
        path_style: the bucket stands in the path, not in the host name; as the library decides if None.
        checksums: ``when_required`` for stores that refuse the newer checksum headers and trailers.
        uploads: shards under way at once, at most 32.
        timeout_s: limit of one wait for the store within a request.
        drain_s: how long the end of a run waits for what is not uploaded yet.
        stop_s: likewise, after a signal.
        tail_s: between two snapshots of the shard that grows.
        progress_s: between two uploads of progress.json.
        lease_s: how long a silent driver keeps others off the prefix, at most an hour.
    """

    uri: S3Uri | None = None
    endpoint_url: HttpUrl | None = None
    region: Name | None = None
    path_style: bool | None = None
    checksums: Literal["when_supported", "when_required"] = "when_supported"
    uploads: Annotated[int, Field(ge=1, le=32, strict=True)] = 4
    timeout_s: SomeSeconds = 30.0
    drain_s: Seconds = 600.0
    stop_s: Seconds = 8.0
    tail_s: SomeSeconds = 45.0
    progress_s: SomeSeconds = 30.0
    lease_s: Annotated[float, Field(gt=0, le=3600, strict=True)] = 30.0


class Retry(Section):
    """What happens after a fault.

    Attributes:
        prompt_attempts: faults charged to a prompt before it is given up for now.
        backoff_s: first pause of a prompt; doubles with each fault.
        pause_max_s: longest pause of a prompt, and longest wait between two probes of a server.
        bench_faults: faults in a row that take a server out of use.
        bench_pause_s: wait before the first probe of a server; doubles.
        give_up_s: how long to wait while no server can be used before the run stops. None: for ever.
        hedge: near the end, late requests are sent to a second server as well; the first answer counts.
        poison: a prompt with which two servers died is sent to no other server (``give_up``), or once more
            at the end, ``alone`` on one of those that died.
    """

    prompt_attempts: Count = 4
    backoff_s: SomeSeconds = 0.5
    pause_max_s: SomeSeconds = 8.0
    bench_faults: Count = 3
    bench_pause_s: SomeSeconds = 0.5
    give_up_s: SomeSeconds | None = None
    hedge: Flag = True
    poison: Literal["give_up", "alone"] = "give_up"


class Guards(Section):
    """When a run stops itself, or warns, because it cannot be what was meant.

    Attributes:
        refused_after: prompts that must have ended before the next bound counts.
        refused_share: a larger share of the first prompts refused by the servers stops the run.
        after: prompts that must have ended, and answers that must have come, before the bounds below count.
        window: how many of the last ones they look at.
        failed_share: share of prompts that may end without an answer.
        empty_share: share of answers that may be empty.
        cut_share: share of answers that may be cut off at the length limit.
        looping_share: share of answers that may end in a phrase which repeats itself.
        unclosed_think_share: share of answers that may end within their reasoning.
        short_share: share of answers that may be short.
        short_tokens: answers of fewer output tokens are short, whatever the others are like.
        on_failed: what happens past that bound: ``stop`` ends the run, ``warn`` says so and goes on.
        on_empty: likewise.
        on_cut: likewise.
        on_looping: likewise.
        on_unclosed_think: likewise.
        on_short: likewise.
    """

    refused_after: Count = 200
    refused_share: Share = 0.5
    after: Count = 200
    window: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = 1000
    failed_share: Share = 0.5
    empty_share: Share = 0.2
    cut_share: Share = 0.5
    looping_share: Share = 0.1
    unclosed_think_share: Share = 0.2
    short_share: Share = 0.5
    short_tokens: Annotated[int, Field(ge=0, le=1_000_000, strict=True)] = 8
    on_failed: OnBound = "stop"
    on_empty: OnBound = "warn"
    on_cut: OnBound = "warn"
    on_looping: OnBound = "warn"
    on_unclosed_think: OnBound = "warn"
    on_short: OnBound = "warn"


class Settings(Section):
    """All of it; one attribute a section of the file."""

    input: Input = Field(default_factory=Input)
    servers: tuple[ServerConfig, ...] = ()
    request: Request = Field(default_factory=Request)
    start: StartConfig = Field(default_factory=StartConfig)
    output: Output = Field(default_factory=Output)
    s3: S3 = Field(default_factory=S3)
    retry: Retry = Field(default_factory=Retry)
    guards: Guards = Field(default_factory=Guards)

    def shape(self, model: str) -> dict[str, Any]:
        """What shapes an answer; a resume may not change it.

        Args:
            model: the model's name as it is sent.
        """
        request, given = self.request, self.input
        shape: dict[str, dict[str, Any]] = {
            "request": {
                "api": request.api,
                "model": model,
                "sampling": request.sampling,
                "extra_body": request.extra_body,
            },
            "input": {
                "dialect": given.dialect,
                "field": given.field,
                "id_field": given.id_field,
                "system": given.system,
            },
        }
        # What came later stands there only where it is used: runs that began before go on.
        later: dict[str, dict[str, Any]] = {
            "request": {
                "multi_turn": request.multi_turn,
                "reasoning_in_history": request.reasoning_in_history,
                "token_ids": request.token_ids,
            },
            "input": {"sampling_field": given.sampling_field, "body_fields": list(given.body_fields)},
        }
        for section, values in later.items():
            shape[section].update({key: value for key, value in values.items() if value})
        return shape


def load(
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    prompts: Sequence[str] = (),
    servers: Sequence[str] = (),
    concurrency: int | None = None,
    out: str | None = None,
    s3: str | None = None,
    hedge: bool = True,
) -> Settings:
    """The settings in force: the file, then ``--set``, then the named options.

    Args:
        path: TOML file, or None.
        overrides: ``section.key=value``; the value is TOML, or else plain text.
        prompts: input files.
        servers: addresses; ``http://host:30000-30007`` means eight of them.
        concurrency: requests per server.
        out: the run folder.
        s3: ``s3://bucket/prefix`` of the run.
        hedge: False: as ``retry.hedge=false``; True: as the settings say.

    Raises:
        ConfigError: naming the file and the key, and the nearest known name for an unknown one.
    """
    data = _read(path) if path is not None else {}
    origin = Origin(str(path) if path is not None else "settings")
    for override in overrides:
        origin.keys["--set"].append(_override(data, override))
    options = {
        "--prompts": ("input", "paths", list(prompts) or None),
        "--out": ("output", "dir", out),
        "--s3": ("s3", "uri", s3),
        "--no-hedge": ("retry", "hedge", None if hedge else False),
    }
    for option, (section, key, value) in options.items():
        if value is not None:
            _section(data, section, origin.file)[key] = value
            origin.keys[option].append([section, key])
    if servers:
        data["servers"] = [{"url": url} for url in servers]
        origin.keys["--servers"].append(["servers"])
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {concurrency}")
    entries = data.get("servers", [])
    if isinstance(entries, list):
        data["servers"] = entries = spread(entries, concurrency, origin)
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error.errors()[0], data, origin, Settings)) from None
    return settings.model_copy(update={"servers": once_each(settings.servers, entries, origin)})


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read config {path}: {getattr(error, 'strerror', error)}") from None
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"config {path} is not UTF-8: byte 0x{data[error.start]:02x} in line {line}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        hint = "; prompts are named with --prompts" if path.suffix in (".json", ".jsonl") else ""
        raise ConfigError(f"config {path} is not TOML: {error}{hint}") from None
    except RecursionError:
        raise ConfigError(f"config {path} is nested too deeply") from None


def _section(data: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    section = data.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{where}: {name} must be a section of its own, got {section!r:.80}")
    return section


def _override(data: dict[str, Any], override: str) -> list[str]:
    """Set what ``--set`` says; the key's parts."""
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"--set {override}: write it as section.key=value, e.g. request.timeout_s=600")
    if parts[0] == "servers":
        raise ConfigError(f"--set {override}: servers are set by --servers and --concurrency, or in the file")
    target = data
    for part in parts[:-1]:
        target = _section(target, part, f"--set {override}")
    target[parts[-1]] = _toml_value(text)
    return parts


def _toml_value(text: str) -> Any:
    """A value as TOML has it; what is no TOML is text, so that quotes need not be quoted for the shell."""
    try:
        values = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text.strip()
    return values["value"] if len(values) == 1 else text.strip()
