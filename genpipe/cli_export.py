"""The command ``genpipe export``."""

from pathlib import Path
from typing import Annotated

import typer

from genpipe.cli_places import HOW, RUN_AT, target_of, tell


def export(
    run_at: Annotated[str, typer.Argument(metavar="DIR", help=f"{RUN_AT} A driver may be at work.")],
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="The file to be written: Parquet where it ends in .parquet, else JSON Lines (packed where "
            "it ends in .gz or .zst); or - for stdout.",
        ),
    ],
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="raw (records as they are), openai (messages), sharegpt (conversations of role and content, "
            "as SpecForge and speculators read them), or prompt (prompt and completion).",
        ),
    ] = "raw",
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAG",
            help="Only records with this flag, or with any of several (a,b); repeatable. Of several samples "
            "(n > 1) each is judged for itself, but for cut and short, which only whole records have; raw "
            "has whole records.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAG",
            help="No records with this flag, or with any of several (a,b); repeatable. Samples: see --only.",
        ),
    ] = None,
    reasoning: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Not for raw: field (reasoning_content, the default), think (in the text, between <think> "
            "and </think>), or drop.",
        ),
    ] = None,
    token_ids: Annotated[
        bool,
        typer.Option(
            "--token-ids",
            help="Not for raw: with input_ids and loss_mask; records whose token ids are not known are left "
            "out.",
        ),
    ] = False,
    card: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Where the data card goes: OUT.md unless it is said otherwise."),
    ] = None,
    no_card: Annotated[bool, typer.Option("--no-card", help="No data card.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the files if they are there.")] = False,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="S3.KEY=VALUE", help=HOW)] = None,
) -> None:
    """Write the records of a run to one file: by index, each once, without the checksums.

    Flags are cut, empty, looping, short and unclosed_think. Exits with 1 if some records may be missing
    because a shard is damaged, or were left out because they cannot be put into the form.

    \b
    For example:
      genpipe export runs/first answers.jsonl
      genpipe export runs/first train.parquet --format openai --without cut,empty
      genpipe export runs/first draft.jsonl --format sharegpt --reasoning think
    """  # noqa: D301  # the mark that keeps the lines apart is this very character
    from genpipe import folder_commands
    from genpipe.edges.export.wish import wish
    from genpipe.offsite import open_objects

    wished = wish(
        format_name=format_name,
        only=only or (),
        without=without or (),
        reasoning=reasoning,
        token_ids=token_ids,
    )
    code = folder_commands.export(
        target_of(run_at, overrides),
        out,
        force=force,
        tell=tell,
        open_objects=open_objects,
        wish=wished,
        card=folder_commands.card_path(out, card, no_card=no_card),
    )
    raise typer.Exit(code)
