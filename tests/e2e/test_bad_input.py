"""Whatever is wrong with a command, it says so in one line, with its exit code, and touches nothing."""

import json
import signal
import time

import pytest

from genpipe import config
from genpipe.core.errors import ConfigError
from tests.e2e.harness import (
    Ended,
    assert_one_error,
    audit,
    contents,
    genpipe,
    progress,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)

NOBODY = "http://127.0.0.1:9"


def rows(count, delay_s=0.0):
    return [f"Row {place}. <<tokens=5 delay={delay_s}>>" for place in range(count)]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[input]\npath = ['in.jsonl']\n", ["input.path", "did you mean paths?"]),
        (
            "[[servers]]\nurl = 'http://h'\nconcurency = 3\n",
            ["servers", "concurency", "did you mean concurrency?"],
        ),
        ("[sampling]\ntemperature = 1\n", ["unknown key sampling", "known here"]),
        ("[input\n", ["is not TOML", "line 1"]),
        ("[[servers]]\nurl = 'h:30000'\n", ["servers", "'h:30000'"]),
        ("[[servers]]\nurl = 'http://h:1'\nconcurrency = 0\n", ["servers", "concurrency", "got 0"]),
        ("[request.sampling]\nday = 2026-01-01\n", ["request", "sampling.day", "JSON"]),
        ("[request.sampling]\ntop_p = nan\n", ["request", "sampling.top_p", "nan"]),
        ("[request.sampling]\nstream = true\n", ["sampling.stream", "genpipe itself"]),
        ("[output]\nkeep = ['usage']\n", ["output.keep", "'usage'"]),
        ("servers = 'http://h'\n", ["servers"]),
        ("input = 3\n", ["input"]),
    ],
)
def test_a_mistake_in_the_config_is_named_with_its_key(tmp_path, toml, words):
    source, file = write_prompts(tmp_path / "in.jsonl", rows(1)), tmp_path / "run.toml"
    file.write_text(toml)
    before = contents(tmp_path)
    # What the file itself brings is not given once more, for options win over it.
    given = ["--prompts", source] if "[input" not in toml and "input =" not in toml else []
    given += ["--servers", NOBODY] if "servers" not in toml else []
    ended = genpipe("run", file, *given, "--out", tmp_path / "out")

    assert_one_error(ended, 2, *words)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "request.timeout=3"], ["request.timeout", "did you mean timeout_s?"]),
        (["--set", "timeout_s"], ["--set timeout_s", "section.key=value"]),
        (["--set", "request.timeout_s=-1"], ["request.timeout_s", "got -1"]),
        (["--set", "servers.url=x"], ["--servers"]),
        (["--concurrency", "0"], ["concurrency", "got 0"]),
        (["--servers", "http://127.0.0.1:30007-30000"], ["30007-30000"]),
    ],
)
def test_a_mistake_in_an_option_is_named(tmp_path, options, words):
    source = write_prompts(tmp_path / "in.jsonl", rows(1))
    command = ["run", "--prompts", source, "--servers", NOBODY, "--out", tmp_path / "out"]
    ended = genpipe(*command, *options)

    assert_one_error(ended, 2, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("leave_out", "words"),
    [
        ("--prompts", ["--prompts", "input.paths"]),
        ("--servers", ["--servers", "[[servers]]"]),
        ("--out", ["--out", "output.dir"]),
    ],
)
def test_what_is_missing_is_asked_for_by_its_option(tmp_path, leave_out, words):
    source = write_prompts(tmp_path / "in.jsonl", rows(1))
    given = {"--prompts": source, "--servers": NOBODY, "--out": tmp_path / "out"}
    del given[leave_out]
    ended = genpipe("run", *(word for option in given.items() for word in option))

    assert_one_error(ended, 2, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["missing", "folder", "parquet"])
def test_an_input_that_is_no_file_of_prompts_is_named(tmp_path, what):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    if what == "folder":
        source.mkdir()
    if what == "parquet":
        source.write_bytes(b"PAR1\x15\x04\x15\x10" * 50)
    ended = genpipe("run", "--prompts", source, "--servers", NOBODY, "--out", out)

    assert_one_error(ended, 2, str(source))
    assert not out.exists()


@pytest.mark.parametrize("command", ["run", "status", "check"])
def test_a_missing_file_or_folder_is_named_by_every_command(tmp_path, command):
    nowhere = tmp_path / "nowhere"
    ended = genpipe(command, nowhere)

    assert_one_error(ended, 2, str(nowhere))


def test_an_output_folder_that_is_a_file_is_refused_and_kept(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", rows(1)), tmp_path / "out"
    out.write_text("the only copy")
    ended = genpipe("run", "--prompts", source, "--servers", NOBODY, "--out", out)

    assert_one_error(ended, 2, str(out), "not a folder")
    assert out.read_text() == "the only copy"


def test_a_fleet_that_cannot_be_reached_is_waited_for_and_ctrl_c_ends_it_with_130(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", rows(1)), tmp_path / "out"
    command = ["run", "--prompts", source, "--servers", NOBODY, "--out", out]
    with running(*command, err=tmp_path / "run.err") as run:
        wait_for(lambda: "waiting for one" in run.err, "a word about the wait")
        time.sleep(0.5)
        assert not run.over
        run.send(signal.SIGINT)
        code = run.wait(5)

    assert code == 130
    assert NOBODY in run.err
    assert "Traceback" not in run.err
    assert run.err.splitlines()[-1] == "genpipe: stopped by SIGINT before anything was sent"


def test_something_that_is_no_such_server_is_named(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", rows(1)), tmp_path / "out"
    with servers(tmp_path) as fleet:
        address = f"{fleet.address}/somewhere"
        ended = genpipe("run", "--prompts", source, "--servers", address, "--out", out)

    assert_one_error(ended, 2, address, "404")
    assert not out.exists()


def finished_run(tmp_path, fleet, count=30, *options: object):
    """A run that has ended well, and the command that made it."""
    source, out = write_prompts(tmp_path / "in.jsonl", rows(count)), tmp_path / "out"
    command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out, *options]
    ended: Ended = genpipe(*command)
    assert ended.code == 0, ended.err
    return source, out, command


def test_changed_sampling_is_named_and_refused_unless_it_is_allowed(tmp_path):
    with servers(tmp_path) as fleet:
        source, out, command = finished_run(tmp_path, fleet, 30, "--set", "request.sampling.temperature=0.7")
        before = contents(out)
        changed = [*command[:-1], "request.sampling.temperature=0.2"]
        refused = genpipe(*changed)
        after_refusal = contents(out)
        write_prompts(source, rows(35))
        allowed = genpipe(*changed, "--allow-changed")

    assert_one_error(refused, 2, "request.sampling.temperature was 0.7, is 0.2", "--allow-changed")
    assert {name for name in before if before[name] != after_refusal[name]} <= {".lock"}
    assert allowed.code == 0, allowed.err
    assert "temperature was 0.7, is 0.2" in allowed.err
    records = audit(out, rows(35))
    assert [index for index, record in records.items() if "settings" in record] == [30, 31, 32, 33, 34]


@pytest.mark.parametrize("now", [30, 40, 20], ids=["in place", "and grown", "and cut"])
def test_changed_input_is_refused_and_the_records_are_named(tmp_path, now):
    with servers(tmp_path) as fleet:
        source, out, command = finished_run(tmp_path, fleet, 30)
        before = saved(out)
        texts = rows(now)
        texts[7] = texts[7].replace("Row", "Raw")
        write_prompts(source, texts)
        ended = genpipe(*command)
        fleet.stop()
        visits = fleet.visits()
    errors = [line for line in ended.err.splitlines() if line.startswith("genpipe: error: ")]

    assert ended.code == 2, ended.err
    assert len(errors) == 1
    assert str(source) in errors[0]
    assert "records 0-29" in errors[0]
    assert "Traceback" not in ended.err
    assert saved(out) == before
    assert len(visits) == 30


@pytest.mark.slow
def test_a_change_far_back_in_what_is_done_is_found_though_new_prompts_come_first(tmp_path):
    with servers(tmp_path, 2) as fleet:
        source, _, command = finished_run(tmp_path, fleet, 4_500)
        texts = rows(4_600, 0.5)
        texts[:4_500] = rows(4_500)
        texts[3_333] = texts[3_333].replace("Row", "Raw")
        write_prompts(source, texts)
        ended = genpipe(*command)
    errors = [line for line in ended.err.splitlines() if line.startswith("genpipe: error: ")]

    assert ended.code == 2, ended.err
    assert len(errors) == 1
    assert "records 3000-3999" in errors[0]


def test_input_that_grew_at_its_end_is_gone_on_with(tmp_path):
    with servers(tmp_path) as fleet:
        source, out, command = finished_run(tmp_path, fleet)
        write_prompts(source, rows(50))
        ended = genpipe(*command)
        fleet.stop()
        visits = fleet.visits()

    assert ended.code == 0, ended.err
    audit(out, rows(50))
    assert len(visits) == 50


def test_a_second_driver_on_one_folder_ends_with_75_and_names_the_first(tmp_path):
    texts = rows(60, 0.3)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out]
        with running(*command, err=tmp_path / "1.err") as first:
            wait_for(lambda: saved(out), "the first answers")
            second = genpipe(*command)
            code = first.wait()
        fleet.stop()
        visits = fleet.visits()

    assert_one_error(second, 75, str(out), str(first.pid))
    assert code == 0
    audit(out, texts)
    assert len(visits) == len(texts)


def test_two_drivers_at_one_instant_make_one_run(tmp_path):
    texts = rows(60, 0.1)
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--concurrency", 8, "--out", out]
        with (
            running(*command, err=tmp_path / "1.err") as one,
            running(*command, err=tmp_path / "2.err") as other,
        ):
            codes = [one.wait(), other.wait()]
        fleet.stop()
        visits = fleet.visits()

    assert sorted(codes) == [0, 75], one.err + other.err
    audit(out, texts)
    assert len(visits) == len(texts)


def test_a_guard_stops_a_run_whose_prompts_are_all_refused(tmp_path):
    texts = [f"Row {place}. <<status=400 why=too_long>>" for place in range(600)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        ended = genpipe("run", "--prompts", source, "--servers", fleet.address, "--out", out)
        fleet.stop()
        visits = fleet.visits()

    assert ended.code == 3, ended.err
    assert "guards.refused_share" in ended.err.splitlines()[-1]
    assert 200 <= len(visits) <= 300
    assert (progress(out) or {})["state"] == "stopped"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"overrides": ["request.timeout_s='soon'"]}, ["request.timeout_s", "soon"]),
        ({"servers": ["gpu1:30000"]}, ["servers", "gpu1:30000"]),
        ({"concurrency": -1, "servers": ["http://gpu1"]}, ["concurrency", "-1"]),
        ({"overrides": ["input.dialect=xml"]}, ["input.dialect", "xml"]),
    ],
)
def test_wrong_values_from_python_are_config_errors_of_one_line(arguments, words):
    with pytest.raises(ConfigError) as caught:
        config.load(**arguments)

    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_print_config_shows_what_is_in_force_and_does_nothing(tmp_path):
    out = tmp_path / "out"
    ended = genpipe("run", "--out", out, "--servers", "http://h:30000-30001", "--print-config")
    shown = json.loads(ended.out)

    assert ended.code == 0
    assert [server["url"] for server in shown["servers"]] == ["http://h:30000", "http://h:30001"]
    assert not out.exists()
