"""The command line: reads arguments, calls what does the work, and turns errors into lines and exit codes."""

import asyncio
import errno
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from genpipe import __version__, config
from genpipe.core.errors import ConfigError, DiskFull, GenpipeError, StoreError

T = TypeVar("T")

EXIT_CODES = """
Exit codes: 0 every prompt done; 1 finished, some failed (listed in failed.jsonl); 2 config, input or resume
mismatch; 3 stopped by a guard; 70 a bug; 73 disk full; 74 store; 75 another driver owns the run; 130 or 143
stopped by a signal, resumable.
"""

CLEAR_SCREEN = "\x1b[2J\x1b[H"

app = typer.Typer(
    name="genpipe",
    help="Fan prompts out over many SGLang servers: durable, resumable, and honest about its speed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> NoReturn:
    """The command ``genpipe``."""
    _occupy_standard_streams()
    try:
        app(prog_name="genpipe")
        code = 0
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise SystemExit(end.code) from None
        # Typer makes 1 of it, which has a meaning of its own here.
        code = 0
    except KeyboardInterrupt:
        code = 130
    except GenpipeError as error:
        _tell(f"genpipe: error: {error}")
        code = error.exit_code
    except BrokenPipeError:
        # Whoever read our results has gone; Python would complain about it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except Exception:
        # The outermost place: a bug is shown whole, with an exit code of its own.
        traceback.print_exc()
        _tell("genpipe: this is a bug in genpipe; answers that had come are on disk")
        code = 70
    sys.exit(code)


def _occupy_standard_streams() -> None:
    """Put the null device where a standard stream was closed.

    Or else the next file to be opened would get its number: whatever is written to "stderr" would go into it,
    and the event loop aborts the process when it is to close a socket of that number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given, and that is this one.
            os.open(os.devnull, os.O_RDWR)


def _tell(text: str) -> None:
    if sys.stderr is not None:
        try:
            sys.stderr.write(text + "\n")
        except (OSError, ValueError):
            return


def _say(text: str) -> None:
    """Put a result on stdout."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        kind = DiskFull if error.errno == errno.ENOSPC else StoreError
        raise kind(f"cannot write the result to stdout: {error.strerror}") from None


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"genpipe {__version__}")
        raise typer.Exit


@app.command(epilog=EXIT_CODES, short_help="Start a run, or resume it.")
def run(
    config_path: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG.toml", help="The run's settings in TOML; options stand over them."),
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="A JSON Lines file of prompts; repeatable.")
    ] = None,
    servers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="A server; http://host:30000-30007 means eight of them; repeatable."
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Requests at once, per server.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="The run folder.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Any setting; the value is TOML; repeatable."
        ),
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Ask prompts again that failed for good.")
    ] = False,
    allow_changed: Annotated[
        bool, typer.Option("--allow-changed", help="Go on though sampling, model or dialect changed.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Show the settings in force, and do nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only messages.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each failed attempt.")] = False,
) -> None:
    """Start a run, or resume it: the same command again goes on where it was.

    \b
    For example:
      genpipe run configs/gsm8k.toml
      genpipe run --prompts prompts.jsonl --servers http://gpu1:30000-30007 \\
          --concurrency 32 --out runs/first
      genpipe run configs/gsm8k.toml --set request.sampling.max_tokens=2048
    """  # noqa: D301  # the mark that keeps the lines apart is this very character
    settings = config.load(
        config_path,
        overrides=overrides or [],
        prompts=prompts or [],
        servers=servers or [],
        concurrency=concurrency,
        out=out,
    )
    if print_config:
        _say(settings.model_dump_json(indent=2))
        return
    from genpipe import compose
    from genpipe.edges.console import display

    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    # Other threads parse input and write records: the default of 5 ms would keep the loop waiting as long.
    sys.setswitchinterval(0.001)
    # What is here now stays, and requests are freed by reference counts: rare collections are enough.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    ending = run_on_loop(
        compose.run(
            settings, display=display(quiet=quiet), retry_failed=retry_failed, allow_changed=allow_changed
        )
    )
    _tell(f"genpipe: {ending.message}")
    raise typer.Exit(ending.exit_code)


def run_on_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the fastest loop that is installed.

    Raises:
        ConfigError: a loop is running already, as in a notebook.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        main.close()
        raise ConfigError("an event loop is running here already: use `await genpipe.run(...)` instead")
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


@app.command(short_help="Show a run: how far, how fast, where the time goes.")
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="The snapshot as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until the run ends.")] = False,
) -> None:
    """Show a run: how far, how fast, until when, where the time goes, and each server.

    \b
    For example:
      genpipe status runs/first
      genpipe status runs/first --json | jq .eta_hours
    """  # noqa: D301  # as above
    from genpipe import status as look

    while True:
        seen = look.look(folder)
        if watch and not as_json and sys.stdout.isatty():
            typer.echo(CLEAR_SCREEN, nl=False)
        _say(seen.as_json() if as_json else seen.as_text())
        if not (watch and seen.alive):
            return
        time.sleep(1)


@app.command(short_help="Read prompts as a run would, and name the bad ones.")
def check(
    prompts: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="JSON Lines files, in the order of the run.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="As for run; repeatable.")
    ] = None,
) -> None:
    """Read prompts as a run would, before any GPU is asked: how many, of what shape, and which are bad.

    Exits with 1 if some records cannot be sent.

    \b
    For example:
      genpipe check prompts.jsonl --set input.field=question
    """  # noqa: D301  # as above
    from genpipe.edges.prompts import check_files
    from genpipe.ui.terminal import check_report
    from genpipe.wiring import dialect_of

    settings = config.load(None, overrides=overrides or [])
    report = check_files(prompts, dialect_of(settings))
    _say(check_report(report))
    if report.records == 0:
        raise ConfigError(f"no prompts in {', '.join(map(str, prompts))}: the input is empty")
    raise typer.Exit(1 if report.bad_count else 0)


@app.command(short_help="Hold a run folder's files against one another, and mend them.")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    repair: Annotated[bool, typer.Option("--repair", help="Mend what is wrong; no driver may run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What was found, as JSON.")] = False,
) -> None:
    """Hold every shard, checksum and index of a run folder against each other; safe beside a live driver.

    Exits with 0 if all is sound, and with 1 if problems remain.
    """
    from genpipe import folder_commands

    raise typer.Exit(folder_commands.verify(folder, repair=repair, as_json=as_json, say=_say))


@app.command(short_help="Write the records of a run to one file, in the order of the input.")
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder; a driver may be at work.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The file to be written, or - for stdout.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
) -> None:
    """Write the records of a run to one JSON Lines file: by index, each once, without the checksums.

    Exits with 1 if some records may be missing because a shard is damaged.
    """
    from genpipe import folder_commands

    raise typer.Exit(folder_commands.export(folder, out, force=force, tell=_tell))


@app.command(short_help="Simulated SGLang servers over real HTTP.")
def sim_server(
    ports: Annotated[
        str, typer.Option(help="One port, a range such as 30000-30003, or free:4 for any four.")
    ] = "30000",
    model: Annotated[str, typer.Option(help="Name of the model that it claims to serve.")] = "tiny-model",
    max_running: Annotated[int, typer.Option(help="Requests that run at once; more are queued.")] = 256,
    max_queued: Annotated[int | None, typer.Option(help="Queued requests; more get a 503.")] = None,
    tokens_per_s: Annotated[
        float, typer.Option(help="Speed of a request that runs alone; 0 answers at once.")
    ] = 0.0,
    tokens_per_s_full: Annotated[
        float | None, typer.Option(help="Speed of a full batch, all requests together.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Tokens per answer: fixed:N or lognormal:mean=M,sigma=S[,max=N].")
    ] = "fixed:16",
    reply_bytes: Annotated[
        int | None, typer.Option(help="Size of every answer's text, for benchmarks; by its tokens otherwise.")
    ] = None,
    health_delay_s: Annotated[float, typer.Option(help="How long /health takes.")] = 1.0,
    orders: Annotated[
        bool, typer.Option("--orders", help="Obey orders between << and >> in prompts, and /_fake.")
    ] = False,
    log_path: Annotated[Path | None, typer.Option("--log", help="One JSON line per request.")] = None,
    seed: Annotated[int, typer.Option(help="Of the lengths.")] = 0,
) -> None:
    """Simulated SGLang servers over real HTTP, several ports in one process; no GPU is needed.

    \b
    For example:
      genpipe sim-server --ports 30000-30007 --max-running 32 \\
          --tokens-per-s 200 --tokens-per-s-full 5000
    """  # noqa: D301  # as above
    from genpipe.sim.config import SimConfig, step_times_s
    from genpipe.sim.server import serve

    fixed_s = each_s = 0.0
    if tokens_per_s > 0:
        full = tokens_per_s * max_running if tokens_per_s_full is None else tokens_per_s_full
        fixed_s, each_s = step_times_s(
            alone_tokens_per_s=tokens_per_s, full_tokens_per_s=full, max_running=max_running
        )
    sim = SimConfig(
        model=model,
        max_running=max_running,
        max_queued=max_queued,
        step_fixed_s=fixed_s,
        step_per_request_s=each_s,
        lengths=lengths,
        reply_bytes=reply_bytes,
        health_delay_s=health_delay_s,
        orders=orders,
        log_path=log_path,
        seed=seed,
    )
    serve(sim, port_range(ports))


def port_range(text: str) -> list[int]:
    """``30000``, ``30000-30003`` or ``free:4`` as ports; 0 is a free one.

    Raises:
        ConfigError: it is none of them.
    """
    first, dash, last = text.partition("-")
    try:
        if text.startswith("free:"):
            ports = [0] * int(text.removeprefix("free:"))
        else:
            ports = list(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        ports = []
    if not ports or not all(0 <= port < 65536 for port in ports):
        raise ConfigError(f"--ports {text}: write one port, a range such as 30000-30003, or free:4")
    return ports


@app.command(short_help="A first try without a GPU: a run, a kill, a resume, an audit.")
def demo(
    prompts: Annotated[int, typer.Option(help="How many made-up prompts.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the prompts and the answers' lengths.")] = 7,
    keep: Annotated[Path | None, typer.Option(help="Keep the run folder here.")] = None,
) -> None:
    """Four simulated servers, a run that is killed half-way with SIGKILL, its resume, and an audit."""
    from genpipe.demo import play

    raise typer.Exit(play(prompts=prompts, seed=seed, keep=keep))
