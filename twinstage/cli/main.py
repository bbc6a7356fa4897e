"""The `twinstage` command line. Each command imports what it needs, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from twinstage.cli.access_flags import AccessFlags
from twinstage.cli.ask_flags import DEFAULT_ADDRESS, Address, AsJson, AskFlags, Timeout
from twinstage.cli.bench import bench
from twinstage.cli.cluster_flags import ClusterFlags, EngineFlags, PortFlags
from twinstage.cli.flags import PlainCommand, takes_flag_groups
from twinstage.cli.pooling import classify, embed, rerank, score
from twinstage.errors import ConfigError, ModelError, TwinstageError, Unauthenticated

app = typer.Typer(
    name="twinstage",
    help="Serve language models over gRPC with prefill and decode in separate processes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
_command = partial(app.command, cls=PlainCommand)


@_command()
@takes_flag_groups
def serve(*, cluster: ClusterFlags, port: PortFlags, engine: EngineFlags) -> None:
    """Run a local cluster in the foreground: a router, prefill workers and decode workers.

    One Ctrl-C (or SIGTERM) stops all of it, a second one kills it. Everything runs on this machine; for several, start
    `python -m router`, `python -m prefill_worker` and `python -m decode_worker` yourself. Those read what this command
    has no flag for from their TWINSTAGE_* variables, such as TWINSTAGE_MAX_QUEUE_WAIT; the --help of each lists them.
    """
    from twinstage.cli import serve as command

    command.serve(cluster.config(engine, port.security()), start_timeout_s=engine.start_timeout)


@_command()
@takes_flag_groups
def demo(*, engine: EngineFlags) -> None:
    """Start a cluster on the demo models, ask it a question, search a few texts by their meaning, and stop it."""
    from twinstage.cli import demo as command

    cluster = ClusterFlags(model=["demo", "demo-embedding"], port=0, pin_cpus=False, kv_cache_bytes="384MiB")
    command.demo(cluster.config(engine), start_timeout_s=engine.start_timeout)


@_command()
@takes_flag_groups
def generate(
    *,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.")],
    flags: AskFlags,
    access: AccessFlags,
) -> None:
    """Continue PROMPT. The text goes to standard output as it comes, usage and timing to standard error."""
    from twinstage.cli import ask

    ask.generate(access.client(flags.address), _text(prompt), options=flags.options(), as_json=flags.as_json)


@_command()
@takes_flag_groups
def chat(
    *,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Message to answer; - reads it from standard input."),
    ] = None,
    system: Annotated[str, typer.Option("--system", help="How the model shall behave.")] = "",
    tools: Annotated[
        Path | None,
        typer.Option("--tools", help="JSON file with functions that the model may call; you give their results."),
    ] = None,
    flags: AskFlags,
    access: AccessFlags,
) -> None:
    """Answer PROMPT, or hold a conversation: each line is a message, and /help shows commands.

    Answers go to standard output as they come, usage and timing to standard error. Ctrl-C ends an answer alone.
    """
    from twinstage.cli import ask
    from twinstage.cli.chat import converse, read_tools

    client = access.client(flags.address)
    known = read_tools(tools) if tools is not None else ()
    if prompt is None:
        converse(client, options=flags.options(), system=system, tools=known, as_json=flags.as_json)
    else:
        text = _text(prompt)
        ask.chat(client, text, options=flags.options(), system=system, tools=known, as_json=flags.as_json)


_command()(embed)
_command()(classify)
_command()(score)
_command()(rerank)


@_command()
@takes_flag_groups
def workers(*, address: Address = DEFAULT_ADDRESS, as_json: AsJson = False, access: AccessFlags) -> None:
    """List the workers that the router knows, with their load."""
    from twinstage.cli import ask

    ask.workers(access.client(address), as_json=as_json)


@_command()
@takes_flag_groups
def drain(
    *,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, as `twinstage workers` shows it.")],
    address: Address = DEFAULT_ADDRESS,
    wait: Annotated[bool, typer.Option("--wait", help="Return once nothing is left on the worker.")] = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
    access: AccessFlags,
) -> None:
    """Let a worker finish what it has and take nothing new. Then it can be stopped, and no client notices."""
    from twinstage.cli import ask

    ask.drain(access.client(address), worker, wait=wait, timeout_s=timeout, as_json=as_json)


@_command()
@takes_flag_groups
def undrain(
    *,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id of the worker, as `twinstage workers` shows it.")],
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
    access: AccessFlags,
) -> None:
    """Let a draining worker take requests again."""
    from twinstage.cli import ask

    ask.undrain(access.client(address), worker, as_json=as_json)


@_command()
@takes_flag_groups
def trace(
    *,
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Id of the request.")],
    address: Address = DEFAULT_ADDRESS,
    as_json: AsJson = False,
    access: AccessFlags,
) -> None:
    """Show what was done for a request, when, and in which process; of those in progress and the last that ended."""
    from twinstage.cli import trace as command

    command.show(access.client(address), request, as_json=as_json)


@_command()
@takes_flag_groups
def reset_prefix_cache(
    *,
    address: Address = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option("--model", help="Only workers of this model; by default of all.")] = "",
    worker: Annotated[str, typer.Option("--worker", help="Only the worker with this id; by default all.")] = "",
    as_json: AsJson = False,
    access: AccessFlags,
) -> None:
    """Let the workers forget the prompts and answers that they keep for later requests that begin alike."""
    from twinstage.cli import ask

    ask.reset_prefix_cache(access.client(address), model=model, worker_id=worker, as_json=as_json)


@_command()
@takes_flag_groups
def models(*, address: Address = DEFAULT_ADDRESS, as_json: AsJson = False, access: AccessFlags) -> None:
    """List the models that are served."""
    from twinstage.cli import ask

    ask.models(access.client(address), as_json=as_json)


_command()(bench)


@_command()
@takes_flag_groups
def health(
    *,
    address: Address = DEFAULT_ADDRESS,
    service: Annotated[str, typer.Option("--service", help="Full name of a gRPC service; default: the server.")] = "",
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds to wait for an answer.")] = 3.0,
    access: AccessFlags,
) -> None:
    """Ask any server of the cluster, router or worker, for its health. Exit code 0: it serves; 1: it does not."""
    from twinstage.cli.health import check

    status = check(address, service, access=access.access(), timeout_s=timeout)
    print(status)
    if status != "SERVING":
        raise typer.Exit(1)


def _text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument


def main() -> None:
    """Run the command. Exit codes: 1 for what went wrong outside, 2 for wrong flags, a wrong model or a port in use."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's own warnings are no answer to a person
    try:
        app()
    except TwinstageError as error:
        advice = "; --token-file FILE sends one" if isinstance(error, Unauthenticated) else ""
        print(f"twinstage: {' '.join(str(error).split())}{advice}", file=sys.stderr)
        sys.exit(2 if isinstance(error, (ConfigError, ModelError)) else 1)


if __name__ == "__main__":
    main()
