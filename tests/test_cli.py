"""The command line as a process: exit codes, one-line errors, and help that can be read."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from genpipe import __version__

GENPIPE = [sys.executable, "-m", "genpipe"]
AT = "at line 1, column 1"
GOOD = '{"prompt":"a"}\n'


def genpipe(*args, **options):
    settings = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL}
    return subprocess.run([*GENPIPE, *map(str, args)], **{**settings, **options})


def in_columns(columns, *args):
    return genpipe(*args, env={**os.environ, "COLUMNS": str(columns)})


def assert_one_line(done, code, said):
    assert done.returncode == code, done.stderr
    assert done.stderr == f"genpipe: error: {said}\n"
    assert done.stdout == ""


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text(GOOD)
    return path


# ---- help ----


def test_alone_it_shows_its_help_and_what_it_can_do():
    done = genpipe()

    assert done.returncode == 2
    assert "Usage: genpipe [OPTIONS] COMMAND [ARGS]..." in done.stderr + done.stdout
    for command in ("run", "status", "limit", "check", "sim-server", "demo"):
        assert re.search(rf"^  {command} ", done.stderr + done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "command", [[], ["run"], ["status"], ["limit"], ["check"], ["export"], ["sim-server"], ["demo"]]
)
def test_help_fits_80_columns_and_cuts_no_word_short(command):
    done = in_columns(80, *command, "--help")

    assert done.returncode == 0
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "..." not in re.sub(r"\[ARGS\]\.\.\.|\}\.\.\.", "", done.stdout)
    assert "\b" not in done.stdout


def test_the_examples_of_run_stand_as_they_are_typed():
    lines = in_columns(80, "run", "--help").stdout.splitlines()
    place = lines.index("  For example:")

    assert lines[place + 1 : place + 5] == [
        "    genpipe run configs/gsm8k.toml",
        "    genpipe run --prompts prompts.jsonl --servers http://gpu1:30000-30007 \\",
        "        --concurrency 32 --out runs/first",
        "    genpipe run configs/gsm8k.toml --set request.sampling.max_tokens=2048",
    ]


def test_the_help_of_run_names_every_exit_code():
    text = genpipe("run", "--help").stdout

    for code in (0, 1, 2, 3, 70, 73, 74, 75, 130, 143):
        assert re.search(rf"\b{code}\b", text), code


def test_the_version_is_told():
    done = genpipe("--version")

    assert (done.returncode, done.stdout) == (0, f"genpipe {__version__}\n")


@pytest.mark.parametrize(
    "args",
    [
        ["bogus"],
        ["run", "--nope"],
        ["run", "a", "b"],
        ["check"],
        ["status"],
        ["limit", "a"],
        ["run", "--concurrency", "x"],
    ],
)
def test_what_it_does_not_know_is_told_with_the_way_to_the_help(args):
    done = genpipe(*args)

    assert done.returncode == 2
    assert done.stdout == ""
    assert "--help' for help." in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in done.stderr


# ---- mistakes ----


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no input: name files with --prompts, or input.paths in the config"),
        (["--prompts", "{in}"], "no servers: name them with --servers, or [[servers]] in the config"),
        (
            ["--prompts", "{in}", "--servers", "http://a:1"],
            "no run folder: name it with --out, or output.dir in the config",
        ),
        (["none.toml"], "cannot read config none.toml: No such file or directory"),
        (
            ["{in}"],
            f"config {{in}} is not TOML: Invalid statement ({AT}); prompts are named with --prompts",
        ),
        (["--set", "request.timeout=1"], "--set: unknown key request.timeout; did you mean timeout_s?"),
        (["--concurrency", "0"], "--concurrency must be at least 1, got 0"),
        (
            ["--servers", "gpu1"],
            "--servers: servers.url must be an address such as http://gpu1:30000, got 'gpu1'",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(prompts, args, said):
    given = [arg.replace("{in}", str(prompts)) for arg in args]

    assert_one_line(genpipe("run", *given, "--quiet"), 2, said.replace("{in}", str(prompts)))


@pytest.mark.slow
def test_a_key_that_is_not_there_is_named_and_one_that_is_wrong_is_not_shown(prompts, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[[servers]]\nurl = 'http://127.0.0.1:9'\napi_key_env = 'GPU_KEY'\n")
    command = ["run", path, "--prompts", prompts, "--out", tmp_path / "out", "--quiet"]
    clean = {key: value for key, value in os.environ.items() if key != "GPU_KEY"}
    without = genpipe(*command, env=clean)
    odd = genpipe(*command, env={**clean, "GPU_KEY": "sk-secret\nX: y"})
    shown = genpipe("run", path, "--print-config", env={**clean, "GPU_KEY": "sk-secret"})

    assert without.returncode == 2
    assert "GPU_KEY is not set" in without.stderr
    assert odd.returncode == 2
    assert "its key is blank, or holds a line break" in odd.stderr
    assert "sk-secret" not in odd.stderr
    assert len(odd.stderr.splitlines()) == 1
    assert json.loads(shown.stdout)["servers"][0]["api_key_env"] == "GPU_KEY"
    assert "sk-secret" not in shown.stdout + shown.stderr


def test_print_config_shows_what_is_in_force_and_does_nothing(tmp_path):
    done = genpipe(
        *(
            "run",
            "--print-config",
            "--prompts",
            "in.jsonl",
            "--servers",
            "http://a:1-2",
            "--concurrency",
            "5",
        ),
        *("--out", tmp_path / "out", "--set", "request.sampling.temperature=0.5", "--no-hedge"),
    )
    shown = json.loads(done.stdout)

    assert done.returncode == 0
    assert [server["url"] for server in shown["servers"]] == ["http://a:1", "http://a:2"]
    assert {server["concurrency"] for server in shown["servers"]} == {5}
    assert shown["request"]["sampling"] == {"temperature": 0.5}
    assert shown["retry"]["hedge"] is False
    assert not (tmp_path / "out").exists()


def test_a_bug_is_shown_whole_with_an_exit_code_of_its_own(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import genpipe.config\n"
        "def load(*args, **options):\n"
        "    raise RuntimeError('a bug')\n"
        "genpipe.config.load = load\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = genpipe("run", env={**os.environ, "PYTHONPATH": path})

    assert done.returncode == 70
    assert "Traceback (most recent call last):" in done.stderr
    assert "RuntimeError: a bug" in done.stderr
    assert done.stderr.endswith("genpipe: this is a bug in genpipe; answers that had come are on disk\n")


# ---- check ----


def test_check_of_good_prompts_counts_them(prompts):
    done = genpipe("check", prompts)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:2] == ["1 record in 15 bytes", "good      1 prompt"]


@pytest.mark.slow
def test_check_names_bad_lines_and_exits_with_1(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'\xff\n{"prompt":1}\n[]\n' + GOOD.encode() + b'\n{"query":"q"}\n')
    done = genpipe("check", path)

    assert (done.returncode, done.stderr) == (1, "")
    for line in (1, 2, 3, 6):
        assert f"  {path}:{line}: " in done.stdout
    assert "bad       4\n" in done.stdout
    assert genpipe("check", path, "--set", "input.field=query").stdout.count(f"{path}:6") == 0


@pytest.mark.slow
def test_check_of_what_is_no_input_is_one_line(tmp_path):
    (tmp_path / "packed").write_bytes(b"\x1f\x8b\x08\x00rest")
    (tmp_path / "empty").write_bytes(b"\n\n")
    for name, said in (
        ("none", "No such file"),
        ("", "directory"),
        ("packed", "gzip"),
        ("empty", "the input is empty"),
    ):
        done = genpipe("check", tmp_path / name)

        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("genpipe: error: ")
        assert said in done.stderr


# ---- streams and signals ----


def many_bad_lines(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("x\n" * 100)
    return path


@pytest.mark.slow
def test_a_reader_that_stops_reading_is_no_error(tmp_path):
    path = many_bad_lines(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = genpipe("check", path, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)

    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")  # noqa: PTH110
def test_a_full_disk_under_stdout_is_one_line_and_not_a_bug(tmp_path):
    with open("/dev/full", "w") as full:
        done = genpipe(
            "check", many_bad_lines(tmp_path), capture_output=False, stdout=full, stderr=subprocess.PIPE
        )

    assert done.returncode == 73
    assert done.stderr == "genpipe: error: cannot write the result to stdout: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-", "0<&-"])
def test_closed_streams_make_no_bug_of_it(prompts, closed):
    done = subprocess.run(
        f"exec {' '.join(GENPIPE)} check {prompts} {closed}", shell=True, capture_output=True, text=True
    )

    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_simulated_servers_end_well_when_they_are_told_to():
    command = [*GENPIPE, "sim-server", "--ports", "free:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        ready = server.stdout.readline()
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=10)

    assert ready.startswith("sim-server ready http://127.0.0.1:")
    assert (server.returncode, said) == (0, "")


@pytest.mark.slow
def test_a_run_from_the_command_line_ends_with_0_or_1_and_says_how_it_went(tmp_path):
    command = [*GENPIPE, "sim-server", "--ports", "free:1", "--orders", "--health-delay-s", "0"]
    source = tmp_path / "in.jsonl"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        try:
            runs = []
            for name, text in (("good", "fine"), ("bad", "<<status=400 why=too_long>>")):
                source.write_text(GOOD + json.dumps({"prompt": text}) + "\n")
                runs.append(
                    genpipe(
                        "run",
                        "--prompts",
                        source,
                        "--servers",
                        url,
                        "--out",
                        tmp_path / name,
                        "--set",
                        "start.ramp_s=0",
                    )
                )
            shown = genpipe("status", tmp_path / "good")
        finally:
            server.terminate()
    good, bad = runs

    assert good.returncode == 0, good.stderr
    assert good.stdout == ""
    assert good.stderr.splitlines()[-1].startswith("genpipe: done: 2 of 2 prompts answered, in ")
    assert bad.returncode == 1, bad.stderr
    assert "1 of 2 prompts answered" in bad.stderr
    assert f"1 failed, listed in {tmp_path / 'bad' / 'failed.jsonl'}" in bad.stderr
    assert "\r" not in good.stderr + bad.stderr
    assert shown.stdout.startswith("done  run ")
    assert "2 of 2, 100.0 %" in shown.stdout
