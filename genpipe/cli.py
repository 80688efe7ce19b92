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

from genpipe import __version__, cli_export, cli_sim, config
from genpipe.cli_places import HOW, RUN_AT, target_of, tell
from genpipe.core.errors import ConfigError, DiskFull, GenpipeError, StoreError

T = TypeVar("T")

EXIT_CODES = """
Exit codes: 0 every prompt done (and uploaded, where S3 is set); 1 finished, some failed (listed in
failed.jsonl) or not uploaded; 2 config, input or resume mismatch; 3 stopped by a guard, or with no server for
retry.give_up_s; 70 a bug; 73 disk full; 74 store; 75 another driver owns the run; 130 or 143 stopped by a
signal, resumable.
"""

WATCH_OFFSITE_S = 10
"""A run in S3 says something new that seldom (seconds)."""

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
        tell(f"genpipe: error: {error}")
        code = error.exit_code
    except BrokenPipeError:
        # Whoever read our results has gone; Python would complain about it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    except Exception:
        # The outermost place: a bug is shown whole, with an exit code of its own.
        traceback.print_exc()
        tell("genpipe: this is a bug in genpipe; answers that had come are on disk")
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
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Prompts: JSON Lines (also .gz or .zst) or Parquet; a file, a pattern in quotes such as "
            "'data/*.jsonl', an s3:// object or pattern, or - for standard input; repeatable.",
        ),
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
    s3: Annotated[
        str | None,
        typer.Option(metavar="s3://BUCKET/PREFIX", help="Where every shard goes beside the run folder."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Any setting; the value is TOML; repeatable."
        ),
    ] = None,
    no_hedge: Annotated[
        bool, typer.Option("--no-hedge", help="Send no late request to a second server near the end.")
    ] = False,
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
        s3=s3,
        hedge=not no_hedge,
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
    tell(f"genpipe: {ending.message}")
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
    run_at: Annotated[str, typer.Argument(metavar="DIR", help=RUN_AT)],
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="S3.KEY=VALUE", help=HOW)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The snapshot as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second, until the run ends.")] = False,
) -> None:
    """Show a run: how far, how fast, until when, where the time goes, and each server.

    \b
    For example:
      genpipe status runs/first
      genpipe status runs/first --json | jq .eta_hours
      genpipe status s3://bucket/runs/first
    """  # noqa: D301  # as above
    from genpipe import status as look
    from genpipe.offsite import open_objects

    target = target_of(run_at, overrides)
    objects = None if isinstance(target, Path) else open_objects(target)
    while True:
        seen = look.look(Path(run_at)) if objects is None else look.look_offsite(objects)
        if watch and not as_json and sys.stdout.isatty():
            typer.echo(CLEAR_SCREEN, nl=False)
        _say(seen.as_json() if as_json else seen.as_text())
        if not (watch and seen.alive):
            return
        time.sleep(1 if objects is None else WATCH_OFFSITE_S)


@app.command(short_help="Change limits of a live run, add servers to it, or remove some.")
def limit(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder of a run that is under way.")],
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="SERVER=N",
            help="Requests at once. SERVER is an address, or the end of one that the run has; * is all.",
        ),
    ],
) -> None:
    """Change how many requests servers of a live run have at once, add servers, or remove some (0).

    It is so until the run ends; one that is resumed begins with the servers of its command. Requests that a
    removed server has are let run to their end.

    Exits with 0 once the run has taken it, and with 1 if it has not within 5 s (it will, if it goes on).

    \b
    For example:
      genpipe limit runs/first gpu1:30000=64
      genpipe limit runs/first http://gpu9:30000=32 :30001=0
      genpipe limit runs/first '*=16'
    """  # noqa: D301  # as above
    from genpipe import limiting

    if not isinstance(target_of(folder, None), Path):
        raise ConfigError("limits are changed where the driver is: name its run folder")
    raise typer.Exit(limiting.limit(Path(folder), changes, say=_say, tell=tell))


@app.command(short_help="Read prompts as a run would, and name the bad ones.")
def check(
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="JSON Lines (also .gz or .zst) or Parquet files, patterns, s3:// objects, or -, in order.",
        ),
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
    from genpipe import inputs
    from genpipe.ui.terminal import check_report

    report = inputs.check(config.load(None, overrides=overrides or [], prompts=prompts), note=tell)
    _say(check_report(report))
    if report.records == 0:
        raise ConfigError(f"no prompts in {', '.join(prompts)}: the input is empty")
    raise typer.Exit(1 if report.bad_count else 0)


@app.command(short_help="Hold a run's files, or objects, against one another, and mend them.")
def verify(
    run_at: Annotated[str, typer.Argument(metavar="DIR", help=RUN_AT)],
    repair: Annotated[bool, typer.Option("--repair", help="Mend what is wrong; no driver may run.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="S3.KEY=VALUE", help=HOW)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="What was found, as JSON.")] = False,
) -> None:
    """Hold every shard, checksum and index of a run against each other; safe beside a live driver.

    Of a folder that is sent to S3, the objects there are looked up too; s3://bucket/prefix reads them whole.
    Exits with 0 if all is sound, and with 1 if problems remain.
    """
    from genpipe import folder_commands
    from genpipe.offsite import open_objects

    target = target_of(run_at, overrides)
    if repair and not isinstance(target, Path):
        raise ConfigError("--repair mends run folders: name the folder whose shards are to be put right")
    raise typer.Exit(
        folder_commands.verify(target, repair=repair, as_json=as_json, say=_say, open_objects=open_objects)
    )


app.command(short_help="Write the records of a run to one file, in the order of the input.")(
    cli_export.export
)
app.command(short_help="Simulated SGLang servers over real HTTP.")(cli_sim.sim_server)
app.command(short_help="A first try without a GPU: a run, a kill, a resume, an audit.")(cli_sim.demo)
