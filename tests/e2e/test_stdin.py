"""Prompts from a pipe: kept in the run folder, so that a run that is killed goes on without the pipe."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import (
    GENPIPE,
    Running,
    audit,
    genpipe,
    run_command,
    saved,
    servers,
    wait_for,
)


def texts(count, delay_s=0.0):
    return [f"Row {place} of a pipe. <<tokens=5 delay={delay_s}>>" for place in range(count)]


def lines(rows):
    return "".join(f'{{"prompt": "{row}"}}\n' for row in rows).encode()


@contextlib.contextmanager
def piped(*command, err):
    """A command whose standard input is a pipe: the command, and the pipe's end."""
    with open(err, "ab") as err_file:
        process = subprocess.Popen(
            [*GENPIPE, *map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=err_file
        )
    assert process.stdin is not None
    try:
        yield Running(process, err, 0.0), process.stdin
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.kill()
        process.wait(10)


def spool_of(out):
    return sorted(path.name for path in (out / "inputs").iterdir()) if (out / "inputs").is_dir() else []


def test_a_killed_run_goes_on_from_what_it_kept_and_reads_no_more(tmp_path):
    rows, out = texts(60, 0.1), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = run_command(fleet, Path("-"), out, 4)
        with piped(*command, err=tmp_path / "1.err") as (run, stdin):
            stdin.write(lines(rows))
            stdin.close()
            wait_for(lambda: len(saved(out)) >= 10, "ten records")
            run.kill()
        with piped(*command, err=tmp_path / "2.err") as (again, stdin):
            stdin.write(lines(texts(3)))
            stdin.flush()
            # Its standard input stays open: nobody waits for its end.
            code = again.wait()
        no_pipe = genpipe(*command)
        fleet.stop()
    assert code == 0, again.err
    assert (
        f"standard input is not read: this run began with what is in {out / 'inputs' / 'stdin'}" in again.err
    )
    assert no_pipe.code == 0, no_pipe.err
    assert (out / "inputs" / "stdin").read_bytes() == lines(rows)
    audit(out, rows)


def test_a_kill_in_the_middle_of_the_pipe_leaves_nothing_that_is_trusted(tmp_path):
    rows, out = texts(20), tmp_path / "out"
    with servers(tmp_path) as fleet:
        command = run_command(fleet, Path("-"), out, 4)
        with piped(*command, err=tmp_path / "1.err") as (run, stdin):
            stdin.write(lines(rows[:9]) + b'{"prompt": "half')
            stdin.flush()
            wait_for(lambda: spool_of(out) == ["stdin.part"], "the copy")
            run.kill()
        again = subprocess.run(
            [*GENPIPE, *map(str, command)], input=lines(rows), capture_output=True, timeout=60
        )
    assert again.returncode == 0, again.stderr
    assert spool_of(out) == ["stdin"]
    audit(out, rows)


def nobody(out):
    """A run that needs no server before it has its prompts."""
    where = ["run", "--prompts", "-", "--servers", "http://127.0.0.1:9", "--out", out]
    return [*where, "--set", "request.model='m'"]


@pytest.mark.parametrize("writer", ["ends", "goes on"])
def test_a_signal_while_the_pipe_is_read_ends_it_at_once(tmp_path, writer):
    out = tmp_path / "out"
    with piped(*nobody(out), err=tmp_path / "1.err") as (run, stdin):
        stdin.write(lines(texts(3)))
        stdin.flush()
        wait_for(lambda: spool_of(out) == ["stdin.part"], "the copy")
        run.send(signal.SIGINT)
        if writer == "ends":
            # As in a shell: it reaches whoever writes as well, so that the pipe ends at the same moment.
            stdin.close()
        code = run.wait(15)
    assert code == 130, run.err
    assert "Traceback" not in run.err
    assert spool_of(out) == []


@pytest.mark.parametrize("what", ["terminal", "nothing"])
def test_a_terminal_and_an_empty_pipe_are_one_line(tmp_path, what):
    out = tmp_path / "out"
    command = [*GENPIPE, *map(str, nobody(out))]
    if what == "nothing":
        ended = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    else:
        ours, theirs = os.openpty()
        ended = subprocess.run(command, stdin=theirs, capture_output=True, timeout=60)
        os.close(ours)
        os.close(theirs)
    errors = [line for line in ended.stderr.splitlines() if line.startswith(b"genpipe: error: ")]
    assert ended.returncode == 2
    assert len(errors) == 1
    assert (b"is a terminal" if what == "terminal" else b"no prompts on standard input") in errors[0]
    assert b"Traceback" not in ended.stderr
    assert spool_of(out) == []
