"""What the settings mean to requests: what is refused before anything is touched, and what is warned of."""

import asyncio
import json

import pytest

from genpipe import config
from genpipe.core.errors import ConfigError, FaultKind, ServerFault
from genpipe.core.values import Prompt, Start
from genpipe.edges.connections import Endpoint, Names
from genpipe.edges.conversation import begin
from genpipe.edges.discovery import Served
from genpipe.edges.health import RunModel
from genpipe.wiring import asks_versions, endpoints_of, transport_of
from tests.edges.raw_server import RawServer, always, http

A, B = "http://a:1", "http://b:2"


def settings_of(tmp_path, text, kinds=("sglang", "sglang")):
    servers = "".join(
        f'[[servers]]\nurl = "{url}"\nkind = "{kind}"\n' for url, kind in zip((A, B), kinds, strict=True)
    )
    path = tmp_path / "run.toml"
    path.write_text(servers + text)
    return config.load(path)


def warnings_of(settings, served=None):
    told: list[str] = []
    transport_of(
        settings,
        endpoints_of(settings),
        model="m",
        run_model=RunModel(),
        served=served or {},
        names=Names(),
        warn=told.append,
    )
    return told


def test_generate_is_asked_of_sglang_alone_and_the_other_server_is_named(tmp_path):
    settings = settings_of(tmp_path, '[request]\napi = "generate"\n', ("sglang", "openai"))

    with pytest.raises(ConfigError, match=f"server {B} is of kind openai, and request.api = generate"):
        endpoints_of(settings)


def test_sampling_by_openai_s_names_is_refused_for_generate(tmp_path):
    text = '[request]\napi = "generate"\n[request.sampling]\nmax_tokens = 5\n'

    with pytest.raises(
        ConfigError, match=r"request.sampling.max_tokens: SGLang's /generate calls it max_new"
    ):
        endpoints_of(settings_of(tmp_path, text))
    endpoints_of(settings_of(tmp_path, text.replace("generate", "chat")))


def test_what_is_ignored_is_warned_of_before_anything_is_sent(tmp_path):
    text = """
        [request.sampling]
        temperature = 0.5
        max_token = 5
        [request.extra_body]
        chat_template_kwargs = { enable_thinking = false }
        return_meta_inf = true
    """
    settings = settings_of(tmp_path, text)

    told = warnings_of(settings)

    assert [text.partition(":")[0] for text in told] == [
        "request.sampling.max_token",
        "request.extra_body.return_meta_inf",
    ]
    assert "did you mean return_meta_info?" in told[1]
    assert warnings_of(settings_of(tmp_path, text, ("openai", "openai"))) == []


@pytest.mark.parametrize("keep", ["true", "false"])
def test_requests_carry_what_the_settings_say(tmp_path, keep):
    text = f"""
        [request]
        multi_turn = true
        reasoning_in_history = {keep}
        token_ids = true
        [request.sampling]
        top_p = 0.5
        [request.extra_body]
        priority = 1
    """
    settings = settings_of(tmp_path, text)
    message = {"content": "answer", "reasoning_content": "thought"}
    payload, talk = begin([{"role": "user", "content": text} for text in ("one", "two")])

    async def main():
        async with RawServer(always(http({"choices": [{"message": message}]}))) as server:
            transport = transport_of(
                settings,
                [Endpoint(url=server.url)],
                model="m",
                run_model=RunModel(),
                served={},
                names=Names(),
                warn=lambda _: None,
            )
            async with transport:
                prompt = Prompt(index=0, payload=payload, conversation=talk)
                start = Start(attempt=1, prompt=prompt, server=0, tries=1, started_s=0.0)
                more = transport.examine(start, await transport.generate(start)).more
                assert more is not None
            return json.loads(server.requests[0][1]), json.loads(more.payload)

    body, history = asyncio.run(main())

    assert body.pop("rid")
    assert body.pop("messages") == [{"role": "user", "content": "one"}]
    assert body == {"model": "m", "top_p": 0.5, "priority": 1, "return_token_ids": True}
    assert ("thought" in json.dumps(history)) is (keep == "true")


def test_ids_that_a_server_is_too_old_for_are_warned_of_with_its_version(tmp_path):
    settings = settings_of(tmp_path, "[request]\ntoken_ids = true\n")
    served = {
        A: Served(name="m", path="m", version="0.5.11"),
        B: ServerFault("away", kind=FaultKind.UNREACHABLE),
    }

    assert asks_versions(settings)
    assert warnings_of(settings, served) == [
        f"request.token_ids: SGLang reads it from 0.5.17 on; {A} (0.5.11) will ignore it"
    ]
    assert warnings_of(settings, {A: Served(name="m", path="m", version="0.5.23")}) == []
    assert warnings_of(settings, {A: Served(name="m", path="m")}) == []
    native = settings_of(tmp_path, '[request]\napi = "generate"\ntoken_ids = true\n')
    assert warnings_of(native, served) == []


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("", False),
        ("[request.sampling]\ntemperature = 0.5\n", False),
        ('[request]\napi = "generate"\ntoken_ids = true\n', False),
        ('[request]\napi = "completions"\ntoken_ids = true\n', True),
        ("[request.extra_body]\nreturn_meta_info = true\n", True),
    ],
)
def test_versions_are_asked_for_only_where_something_depends_on_them(tmp_path, text, asks):
    assert asks_versions(settings_of(tmp_path, text)) is asks
