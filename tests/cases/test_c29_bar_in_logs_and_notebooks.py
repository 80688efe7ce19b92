"""Progress in a log file, without a terminal, without stdout, and from a loop that runs already."""

import asyncio
import itertools
import os
import pty
import re
import signal
import subprocess
import termios
from datetime import datetime

import pytest

import genpipe as package
from genpipe import config
from genpipe.cli import run_on_loop
from genpipe.core.errors import ConfigError
from tests.e2e.harness import (
    GENPIPE,
    audit,
    genpipe,
    progress,
    running,
    saved,
    servers,
    wait_for,
    write_prompts,
)
from tests.faults.soak import SOAK

STAMPED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}) \S[^\r]*")
LINE_EVERY_S = 15
LINES = 3 if SOAK > 1 else 1
"""Intervals that are waited for."""


@pytest.mark.slow
def test_a_log_file_gets_whole_stamped_lines_also_while_nothing_moves(tmp_path):
    texts = ["One. <<delay=0.1>>", "Two. <<delay=0.1>>", "Three. <<hang=headers>>"]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        with running(*command, err=tmp_path / "run.err") as run:
            wait_for(lambda: run.err.count("running: ") > LINES, "lines", LINES * LINE_EVERY_S + 15)
            stalled = run.err
            run.send(signal.SIGTERM)
            wait_for(lambda: "SIGTERM" in run.err, "a word about the signal")
            run.send(signal.SIGTERM)
            code = run.wait(10)
    lines = run.err_path.read_bytes().decode().split("\n")
    moments = [
        datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S%z")
        for line in stalled.splitlines()
        if "running: " in line and (match := STAMPED.fullmatch(line))
    ]

    assert code == 143
    assert lines.pop() == ""
    assert lines.pop().startswith("genpipe: stopped by SIGTERM: 2 of 3 prompts done")
    assert "\r" not in run.err
    assert [line for line in lines if not STAMPED.fullmatch(line)] == []
    assert len(moments) == 1 + LINES
    for earlier, later in itertools.pairwise(moments):
        assert abs((later - earlier).total_seconds() - LINE_EVERY_S) <= 3
    assert sorted(saved(out)) == [0, 1]


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_a_closed_stdout_or_stderr_does_not_end_a_run(tmp_path, closing):
    texts = [f"Row {place}. <<delay=0.1>>" for place in range(40)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    env = {key: value for key, value in os.environ.items() if key != "TERM"}
    with servers(tmp_path) as fleet:
        command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
        shell = ["sh", "-c", f'exec "$@" {closing}', "sh", *GENPIPE, *map(str, command)]
        ended = subprocess.run(shell, timeout=60, stdin=subprocess.DEVNULL, capture_output=True, env=env)

    assert ended.returncode == 0, ended.stderr
    audit(out, texts)


def test_results_into_a_pipe_that_nobody_reads_make_no_noise(tmp_path):
    source, out = write_prompts(tmp_path / "in.jsonl", ["One."]), tmp_path / "out"
    with servers(tmp_path) as fleet:
        genpipe("run", "--prompts", source, "--servers", fleet.address, "--out", out)
    shell = ["sh", "-c", '{ "$@" status "$0"; echo "code $?" >&2; } | true', str(out), *GENPIPE]
    ended = subprocess.run(shell, timeout=60, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    assert ended.stderr == "code 0\n"


def test_a_terminal_gets_a_bar_and_the_last_line_stands_alone(tmp_path):
    texts = [f"Row {place}. <<delay=0.1>>" for place in range(40)]
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 120))
    try:
        with servers(tmp_path) as fleet:
            command = ["run", "--prompts", source, "--servers", fleet.address, "--out", out]
            ended = subprocess.run(
                [*GENPIPE, *map(str, command)],
                timeout=60,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=terminal,
            )
        shown = os.read(reader, 1 << 20).decode()
    finally:
        os.close(terminal)
        os.close(reader)

    assert ended.returncode == 0, shown
    assert ended.stdout == b""
    assert "40/40" in shown
    assert "\r" in shown.rstrip("\r\n")
    assert shown.split("\r\n")[-2].startswith("genpipe: done: 40 of 40 prompts answered")


def settings_for(tmp_path, fleet, texts):
    source, out = write_prompts(tmp_path / "in.jsonl", texts), tmp_path / "out"
    return config.load(prompts=[str(source)], servers=[fleet.address], out=str(out))


def test_the_entry_point_for_commands_says_in_one_line_what_to_do_inside_a_running_loop():
    async def in_a_notebook():
        async def work():
            pass

        run_on_loop(work())

    with pytest.raises(ConfigError, match=r"await genpipe\.run") as caught:
        asyncio.run(in_a_notebook())

    assert "\n" not in str(caught.value)


def test_the_awaitable_entry_point_works_on_a_loop_that_runs_already(tmp_path):
    texts = [f"Row {place}. <<delay=0.1>>" for place in range(40)]
    with servers(tmp_path) as fleet:
        settings = settings_for(tmp_path, fleet, texts)

        async def in_a_notebook():
            return await package.run(settings)

        ending = asyncio.run(in_a_notebook())

    assert ending.exit_code == 0
    assert "40 of 40" in ending.message
    audit(tmp_path / "out", texts)


def test_a_cancel_of_the_awaitable_entry_point_keeps_what_has_come_and_leaves_it_resumable(tmp_path):
    texts = [f"Row {place}. <<delay={0.05 if place < 20 else 30}>>" for place in range(24)]
    out = tmp_path / "out"
    with servers(tmp_path) as fleet:
        settings = settings_for(tmp_path, fleet, texts)

        async def in_a_notebook():
            task = asyncio.create_task(package.run(settings))
            await asyncio.to_thread(wait_for, lambda: len(saved(out)) >= 20, "all quick answers")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(in_a_notebook())
        last = progress(out)

    assert sorted(saved(out)) == list(range(20))
    assert last is not None
    assert (last["state"], last["completed"], last["in_flight"]) == ("interrupted", 20, 0)
