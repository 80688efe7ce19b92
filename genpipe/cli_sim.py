"""The commands that need no GPU: simulated servers, and the demo."""

from pathlib import Path
from typing import Annotated

import typer

from genpipe.core.errors import ConfigError


def sim_server(
    ports: Annotated[
        str, typer.Option(help="One port, a range such as 30000-30003, or free:4 for any four.")
    ] = "30000",
    model: Annotated[str, typer.Option(help="Name of the model that it claims to serve.")] = "tiny-model",
    max_running: Annotated[int, typer.Option(help="Requests that run at once; more are queued.")] = 256,
    max_queued: Annotated[int | None, typer.Option(help="Queued requests; more get a 503.")] = None,
    context_tokens: Annotated[int, typer.Option(help="Context length (tokens).")] = 32768,
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
        context_tokens=context_tokens,
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


def demo(
    prompts: Annotated[int, typer.Option(help="How many made-up prompts.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the prompts and the answers' lengths.")] = 7,
    keep: Annotated[Path | None, typer.Option(help="Keep the run folder here.")] = None,
) -> None:
    """Four simulated servers, a run that is killed half-way with SIGKILL, its resume, and an audit."""
    from genpipe.demo import play

    raise typer.Exit(play(prompts=prompts, seed=seed, keep=keep))
