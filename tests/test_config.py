"""Settings: what is taken, from where, and what is said of a mistake."""

import json
import time

import pytest

from genpipe import config
from genpipe.core.errors import ConfigError
from genpipe.core.settings import BenchSettings, FlowSettings, GuardSettings
from genpipe.wiring import flow_settings_of


def load(tmp_path, text, **options):
    path = tmp_path / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return config.load(path, **options)


def mistake(*args, **options):
    """The one line that is said of a mistake."""
    with pytest.raises(ConfigError) as caught:
        config.load(*args, **options)
    assert str(caught.value).isprintable()
    assert "pydantic" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return str(caught.value)


SERVER = "[[servers]]\nurl = 'http://gpu1:30000'\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[reqest]", "unknown key reqest; did you mean request?"),
        ("[request]\ntimeoutt_s = 1", "unknown key request.timeoutt_s; did you mean timeout_s?"),
        (
            "[zzzz]",
            "unknown key zzzz; known here: input, servers, request, start, output, s3, retry, guards",
        ),
        (
            SERVER + "concurency = 3",
            "unknown key servers.concurency of http://gpu1:30000; did you mean concurrency?",
        ),
        ("[request]\ntimeout_s = 'x'", "request.timeout_s must be a number, got 'x'"),
        ("[request]\ntimeout_s = 0", "request.timeout_s must be more than 0, got 0"),
        ("[request]\ntimeout_s = -1.5", "request.timeout_s must be more than 0, got -1.5"),
        ("[request]\ntimeout_s = inf", "request.timeout_s must be a finite number, got inf"),
        ("[request]\ntimeout_s = nan", "request.timeout_s must be a finite number, got nan"),
        ("[request]\ntimeout_s = true", "request.timeout_s must be a number, got true"),
        ("[request]\ntimeout_s = [1]", "request.timeout_s must be a number, got [1]"),
        ("[request]\napi = 'batch'", "request.api must be 'chat', 'completions' or 'generate', got 'batch'"),
        ("[request]\nmodel = 3", 'request.model must be text, in quotes ("…"), got 3'),
        ("[request]\nsampling = 1", "request.sampling must be a section of its own, got 1"),
        ("[request]\ngrace_s = -1", "request.grace_s must be at least 0, got -1"),
        ("request = 3", "request must be a section of its own, got 3"),
        ("[input]\npaths = 'a.jsonl'", """input.paths must be a list, as in ["a", "b"], got 'a.jsonl'"""),
        ("[input]\npaths = [1]", 'input.paths.0 must be text, in quotes ("…"), got 1'),
        ("[input]\npaths = ['']", "input.paths.0 must be a path, and not blank, got ''"),
        ("[input]\nfield = ''", "input.field must be text that can be printed, and not blank, got ''"),
        (
            "[input]\ndialect = 'vicuna'",
            (
                "input.dialect must be 'auto', 'messages', 'sharegpt', 'turns', 'alpaca', 'prompt', "
                "'question', 'text' or 'input_ids', got 'vicuna'"
            ),
        ),
        ("[output]\ndir = ''", "output.dir must be a path, and not blank, got ''"),
        ('[output]\ndir = "a\\u0000b"', r"output.dir must be a path, and not blank, got 'a\x00b'"),
        ("[output]\nshard_records = 0", "output.shard_records must be at least 1, got 0"),
        ("[output]\nshard_records = 1.5", "output.shard_records must be a whole number, got 1.5"),
        ("[retry]\nbackoff_s = inf", "retry.backoff_s must be a finite number, got inf"),
        ("[guards]\nrefused_share = 1.5", "guards.refused_share must be at most 1, got 1.5"),
        ("[guards]\nrefused_share = nan", "guards.refused_share must be at most 1, got nan"),
        ("[guards]\nempty_share = -0.1", "guards.empty_share must be at least 0, got -0.1"),
        ("[guards]\nwindow = 0", "guards.window must be at least 1, got 0"),
        ("[guards]\nwindow = 1_000_001", "guards.window must be at most 1000000, got 1000001"),
        ("[guards]\non_cut = 'ignore'", "guards.on_cut must be 'stop' or 'warn', got 'ignore'"),
        ("[retry]\nhedge = 1", "retry.hedge must be true or false, got 1"),
        ("[retry]\nhedge = 'no'", "retry.hedge must be true or false, got 'no'"),
        ("[retry]\npoison = 'retry'", "retry.poison must be 'give_up' or 'alone', got 'retry'"),
        ("[retry]\ngive_up_s = 0", "retry.give_up_s must be more than 0, got 0"),
        ("[request]\nstall_s = 0", "request.stall_s must be more than 0, got 0"),
        ("[request]\nsilent_s = 0", "request.silent_s must be more than 0, got 0"),
        (
            "[start]\norder = 'shortest'",
            "start.order must be 'input' or 'longest_first', got 'shortest'",
        ),
        ("[start]\nany_model = 'yes'", "start.any_model must be true or false, got 'yes'"),
        ("[[servers]]", "servers.url is missing"),
        ("[[servers]]\nurl = 3", 'servers.url must be text, in quotes ("…"), got 3'),
        ("servers = 'http://a:1'", "servers must be sections of their own, [[servers]], got 'http://a:1'"),
        ("[servers]\nurl = 'a'", "servers must be sections of their own, [[servers]], got {'url': 'a'}"),
        ("servers = ['http://a:1']", "servers must be a section of its own, got 'http://a:1'"),
        (SERVER + "concurrency = 0", "servers.concurrency of http://gpu1:30000 must be at least 1, got 0"),
        (
            SERVER + "concurrency = '8'",
            "servers.concurrency of http://gpu1:30000 must be a whole number, got '8'",
        ),
        (
            SERVER + "concurrency = true",
            "servers.concurrency of http://gpu1:30000 must be a whole number, got true",
        ),
        (
            SERVER + "kind = 'vllm'",
            "servers.kind of http://gpu1:30000 must be 'sglang' or 'openai', got 'vllm'",
        ),
        (
            "[[servers]]\nurl = 'http://a:9-2'",
            "server http://a:9-2: 9-2 is no range of ports; write e.g. 30000-30007",
        ),
        (
            "[[servers]]\nurl = 'http://a:1-70000'",
            "server http://a:1-70000: 1-70000 is no range of ports; write e.g. 30000-30007",
        ),
        (
            "[[servers]]\nurl = 'http://a:1-2'\n[[servers]]\nurl = 'http://b:1'\nkind = 1",
            "servers.kind of http://b:1 must be 'sglang' or 'openai', got 1",
        ),
    ],
)
def test_a_mistake_is_named_with_its_file_its_key_what_is_wanted_and_what_was_given(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)

    assert str(caught.value) == f"{tmp_path / 'run.toml'}: {said}"


@pytest.mark.parametrize(
    "url",
    [
        *("", "gpu1:30000", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://a:0", "http://a:"),
        *("http://[::1", "http://a b", "http://a:1?x=1", "http://a#b", "http://a..b:1", "http:///v1"),
        *("http://:30000", "http://a:1-2-3", "http://a\n:1", f"http://{'a' * 64}:1"),
    ],
)
def test_what_is_no_address_is_refused_before_anything_is_sent_there(url):
    said = mistake(servers=[url])

    assert said.startswith("--servers: servers.url must be an address such as http://gpu1:30000")
    assert said.endswith(f", got {url!r:.80}")


def test_an_address_with_a_password_is_refused_without_being_shown():
    for url in ("http://user:hunter2@gpu1:30000", "http://user:hunter2@gpu1:1-2", "hunter2@gpu1"):
        said = mistake(servers=[url])

        assert said == "--servers: servers.url must hold no user and no password: use api_key_env"


@pytest.mark.parametrize("key", ["messages", "prompt", "text", "input_ids", "model", "rid", "stream"])
@pytest.mark.parametrize("section", ["sampling", "extra_body"])
def test_what_genpipe_sets_itself_cannot_be_passed_through(tmp_path, section, key):
    with pytest.raises(ConfigError, match=f"request.{section}.{key} is set by genpipe itself; remove it$"):
        load(tmp_path, f"[request.{section}]\n{key} = 1")


@pytest.mark.parametrize("section", ["sampling", "extra_body"])
def test_turns_are_asked_one_answer_at_a_time(tmp_path, section):
    text = f"[request.{section}]\nn = "
    with pytest.raises(
        ConfigError, match=rf"request\.{section}\.n is to be 1 where request\.multi_turn is on$"
    ):
        load(tmp_path, f"[request]\nmulti_turn = true\n{text}2")
    load(tmp_path, f"[request]\nmulti_turn = true\n{text}1")
    load(tmp_path, f"{text}2")


def test_a_member_cannot_stand_in_two_places(tmp_path):
    with pytest.raises(
        ConfigError, match=r"request\.sampling\.a stands in extra_body as well; keep one of them$"
    ):
        load(tmp_path, "[request.sampling]\na = 1\n[request.extra_body]\na = 2")


@pytest.mark.parametrize(
    "value",
    [
        *("2020-01-01", "12:30:00", "nan", "-inf", "[1, nan]", "{b = inf}", "[[{c = 1979-05-27T07:32:00Z}]]"),
        *("18446744073709551616", "-9223372036854775809"),
    ],
)
def test_what_json_cannot_say_cannot_be_passed_through(value):
    said = mistake(overrides=[f"request.sampling.a={value}"])

    assert said.startswith("--set: request.sampling.a")
    assert "cannot be sent as JSON, got " in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\nx = ?", "config {} is not TOML: Invalid value (at line 2, column 5)"),
        (
            b"[request]\n\na = 1\na = 2\n",
            "config {} is not TOML: Cannot overwrite a value (at line 4, column 6)",
        ),
        (b"# fine\n[request]\nmodel = '\xff'\n", "config {} is not UTF-8: byte 0xff in line 3"),
    ],
)
def test_a_file_that_is_no_toml_is_told_with_the_line(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)

    assert str(caught.value) == said.format(tmp_path / "run.toml")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert (
        mistake(tmp_path / "none.toml")
        == f"cannot read config {tmp_path}/none.toml: No such file or directory"
    )
    assert mistake(tmp_path) == f"cannot read config {tmp_path}: Is a directory"


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    settings = load(tmp_path, b"\xef\xbb\xbf[request]\r\nmodel = 'm'\r\n")

    assert settings.request.model == "m"


# ---- --set and the other options ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("0.7", 0.7),
        ("1e3", 1000.0),
        ("true", True),
        ('"0.7"', "0.7"),
        ("'a b'", "a b"),
        ("[1, 'b', [2]]", [1, "b", [2]]),
        ("{enable_thinking = false}", {"enable_thinking": False}),
        ("a b", "a b"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        (" spaces around ", "spaces around"),
        ("", ""),
        ("#x", "#x"),
        ("a=b", "a=b"),
        ("7 # seven", 7),
        ("</s>\nstop = 3", "</s>\nstop = 3"),
        ("True", "True"),
    ],
)
def test_set_takes_every_value_that_toml_has_and_plain_text(text, value):
    settings = config.load(overrides=[f"request.sampling.a={text}"])

    assert settings.request.sampling == {"a": value}


@pytest.mark.parametrize(
    "override", ["", "=", "a", "a=1", "=1", "request.timeout_s", "request..a=1", ".a=1", "request.=1"]
)
def test_set_of_another_form_is_refused_with_an_example(override):
    assert mistake(overrides=[override]).startswith(f"--set {override}: write it as section.key=value, e.g. ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overrides": ["x.y=3"]}, "--set: unknown key x; known here: "),
        (
            {"overrides": ["request.tmeout_s=3"]},
            "--set: unknown key request.tmeout_s; did you mean timeout_s?",
        ),
        (
            {"overrides": ["request.model.x=3"]},
            "--set request.model.x=3: model must be a section of its own, got 'm'",
        ),
        (
            {"overrides": ["request.sampling=5"]},
            "--set: request.sampling must be a section of its own, got 5",
        ),
        (
            {"overrides": ["servers.url=x"]},
            "--set servers.url=x: servers are set by --servers and --concurrency",
        ),
        ({"overrides": ["request=1", "request.a=1"]}, "--set request=1: write it as section.key=value"),
        ({"prompts": [""]}, "--prompts: input.paths.0 must be a path"),
        ({"out": ""}, "--out: output.dir must be a path"),
        ({"concurrency": 0}, "--concurrency must be at least 1, got 0"),
        ({"servers": ["http://a:5-4"]}, "--servers: server http://a:5-4: 5-4 is no range of ports"),
    ],
)
def test_a_mistake_in_an_option_is_not_blamed_on_the_file(tmp_path, options, said):
    (tmp_path / "run.toml").write_text("[request]\nmodel = 'm'\n")

    assert mistake(tmp_path / "run.toml", **options).startswith(said)


def test_a_mistake_in_the_file_is_not_blamed_on_an_option(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[request]\ntimeout_s = 0\n")

    said = mistake(
        path, overrides=["request.model=m", "guards.refused_after=3"], out="x", servers=["http://a:1"]
    )

    assert said == f"{path}: request.timeout_s must be more than 0, got 0"


def test_options_stand_over_the_file_and_leave_the_rest_of_it(tmp_path):
    text = """
        [input]
        paths = ["a.jsonl"]
        system = "Be brief."
        [request.sampling]
        temperature = 0.5
        max_tokens = 10
        [[servers]]
        url = "http://old:1"
        [output]
        dir = "old"
        shard_records = 7
    """
    settings = load(
        tmp_path,
        text,
        overrides=["request.sampling.max_tokens=20", 'request.sampling.stop=["x"]'],
        prompts=["b.jsonl", "c.jsonl"],
        servers=["http://new:30000-30001", "https://other/prefix/v1/"],
        concurrency=5,
        out="new",
    )

    assert settings.input.paths == ("b.jsonl", "c.jsonl")
    assert settings.input.system == "Be brief."
    assert settings.request.sampling == {"temperature": 0.5, "max_tokens": 20, "stop": ["x"]}
    assert [(server.url, server.concurrency) for server in settings.servers] == [
        ("http://new:30000", 5),
        ("http://new:30001", 5),
        ("https://other/prefix", 5),
    ]
    assert (settings.output.dir, settings.output.shard_records) == ("new", 7)


def test_a_range_of_ports_shares_what_its_entry_says(tmp_path):
    settings = load(tmp_path, "[[servers]]\nurl = 'http://[::1]:8-10/x'\nkind = 'openai'\nconcurrency = 3\n")

    assert [server.url for server in settings.servers] == [f"http://[::1]:{port}/x" for port in (8, 9, 10)]
    assert {(server.kind, server.concurrency) for server in settings.servers} == {("openai", 3)}


@pytest.mark.parametrize(
    "urls",
    [
        ["http://a:1", "http://a:1"],
        ["http://a:1", "http://A:1/v1/", "http://a:01"],
        ["http://a:1-3", "http://a:2"],
        ["http://[FE80::1]:1", "http://[fe80::1]:1"],
    ],
)
def test_an_address_that_is_given_twice_is_one_server(urls):
    settings = config.load(servers=urls, concurrency=5)
    named = [server.url for server in settings.servers]

    assert named == list(dict.fromkeys(named))
    assert named[0] == "http://[fe80::1]:1" if "[" in urls[0] else named[0] == "http://a:1"
    assert len(named) == (3 if "-" in urls[0] else 1)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://GPU1.Example:30000/Path", "http://gpu1.example:30000/Path"),
        ("http://gpu1:80", "http://gpu1"),
        ("https://gpu1:443/v1", "https://gpu1"),
        ("https://gpu1:80", "https://gpu1:80"),
        ("http://gpu1:443/", "http://gpu1:443"),
        ("http://[::1]:80/x", "http://[::1]/x"),
        ("http://[::1]", "http://[::1]"),
    ],
)
def test_a_server_has_one_name_whatever_the_case_of_its_host_and_with_its_scheme_s_own_port(given, url):
    assert config.load(servers=[given]).servers[0].url == url


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (
            "url = 'http://gpu1:30000'",
            "url = 'http://GPU1:29999-30001/v1/'\nconcurrency = 8",
            "http://gpu1:30000 (concurrency 32) and http://GPU1:30000/v1/ (concurrency 8)",
        ),
        (
            "url = 'https://a:443'\nkind = 'openai'",
            "url = 'https://a'\napi_key_env = 'K'",
            "https://a:443 (kind openai, api_key_env none) and https://a (kind sglang, api_key_env K)",
        ),
    ],
)
def test_one_server_with_two_settings_is_refused_with_both_entries_and_what_differs(
    tmp_path, one, other, said
):
    path = tmp_path / "run.toml"
    path.write_text(f"[[servers]]\n{one}\n[[servers]]\n{other}\n")

    assert mistake(path) == f"{path}: {said} are one server, and differ: keep one of them"


def test_doubled_servers_in_a_file_keep_their_first_place(tmp_path):
    text = "[[servers]]\nurl = 'http://b:1'\nconcurrency = 3\n"
    settings = load(tmp_path, f"{text}{SERVER}{text}")

    assert [(server.url, server.concurrency) for server in settings.servers] == [
        ("http://b:1", 3),
        ("http://gpu1:30000", 32),
    ]


def test_concurrency_on_the_command_line_makes_doubled_servers_the_same(tmp_path):
    text = f"{SERVER}concurrency = 3\n{SERVER}concurrency = 4\n"

    assert [server.concurrency for server in load(tmp_path, text, concurrency=5).servers] == [5]
    assert "are one server, and differ" in mistake(tmp_path / "run.toml")


def test_no_hedge_stands_over_the_file_and_its_absence_does_not(tmp_path):
    text = "[retry]\nhedge = {}\nbackoff_s = 2\n"
    off = load(tmp_path, text.format("true"), hedge=False).retry

    assert (off.hedge, off.backoff_s) == (False, 2.0)
    assert load(tmp_path, text.format("false")).retry.hedge is False
    assert load(tmp_path, "").retry.hedge is True


def test_every_setting_of_the_scheduler_reaches_it(tmp_path):
    """Each is given another value than its default."""
    text = """
        [request]
        stall_s = 101
        silent_s = 102
        grace_s = 103
        [start]
        ramp_s = 104
        order = "longest_first"
        [output]
        disk_wait_s = 105
        [retry]
        prompt_attempts = 106
        backoff_s = 107
        pause_max_s = 108
        bench_faults = 109
        bench_pause_s = 110
        give_up_s = 111
        hedge = false
        poison = "alone"
        [guards]
        refused_after = 112
        refused_share = 0.11
        after = 113
        window = 114
        failed_share = 0.12
        empty_share = 0.13
        cut_share = 0.14
        on_failed = "warn"
        on_empty = "stop"
        on_cut = "stop"
    """

    assert flow_settings_of(load(tmp_path, text)) == FlowSettings(
        stall_s=101,
        silent_s=102,
        grace_s=103,
        ramp_s=104,
        longest_first=True,
        disk_wait_s=105,
        prompt_attempts=106,
        backoff_s=107,
        backoff_max_s=108,
        bench=BenchSettings(faults=109, pause_s=110, pause_max_s=108),
        give_up_s=111,
        hedge=False,
        alone=True,
        guards=GuardSettings(
            refused_after=112,
            refused_share_max=0.11,
            after=113,
            window=114,
            failed_share_max=0.12,
            empty_share_max=0.13,
            cut_share_max=0.14,
            on_failed="warn",
            on_empty="stop",
            on_cut="stop",
        ),
    )


def test_without_a_file_the_scheduler_has_its_own_defaults():
    assert flow_settings_of(config.load()) == FlowSettings()


def test_ten_thousand_servers_are_looked_through_at_once():
    began_s = time.monotonic()
    settings = config.load(servers=["http://gpu:20000-29999"])

    assert len(settings.servers) == 10_000
    assert time.monotonic() - began_s < 2


def test_a_whole_number_will_do_for_seconds(tmp_path):
    assert load(tmp_path, "[request]\ntimeout_s = 600\n[retry]\nbackoff_s = 1").request.timeout_s == 600.0


def test_settings_show_the_name_of_a_key_s_variable_and_never_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_KEY", "sk-very-secret")
    shown = load(tmp_path, SERVER + "api_key_env = 'GPU_KEY'\n").model_dump_json()

    assert json.loads(shown)["servers"][0]["api_key_env"] == "GPU_KEY"
    assert "sk-very-secret" not in shown


def test_what_shapes_an_answer_is_in_the_shape_and_what_does_not_is_not():
    plain = config.load(servers=["http://a:1"], prompts=["a"], out="o").shape("m")
    elsewhere = config.load(
        servers=["http://b:2"], prompts=["b"], out="p", overrides=["request.timeout_s=5", "retry.backoff_s=3"]
    ).shape("m")

    assert plain == elsewhere
    for change in ("request.sampling.a=1", "request.extra_body.a=1", "input.system=x", "input.field=x"):
        assert config.load(overrides=[change]).shape("m") != plain
    assert config.load().shape("other") != plain


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("uri = 's3://bucket'", "s3.uri must name a folder in a bucket, such as s3://bucket/run1, got"),
        ("uri = 's3://bucket/a/../b'", "s3.uri must not have empty parts, nor . or .."),
        (f"uri = 's3://bucket/{'x' * 901}'", "s3.uri must not be longer than 900 bytes behind the bucket"),
        ("endpoint_url = 'http://me:secret@store'", "s3.endpoint_url must hold no user and no password"),
        ("uploads = 33", "s3.uploads must be at most 32, got 33"),
    ],
)
def test_a_wrong_place_in_s3_is_named_and_no_password_is_shown(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"[s3]\n{text}")

    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
