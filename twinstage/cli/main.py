"""The `twinstage` command line. Each command imports what it needs, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from twinstage.cli.bench import bench
from twinstage.errors import ConfigError, ModelError, TwinstageError

if TYPE_CHECKING:
    from twinstage.client.options import Options

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_MAX_TOKENS = 256  # a terminal wants more than the API's 16 and less than a whole context

app = typer.Typer(
    name="twinstage",
    help="Serve language models over gRPC with prefill and decode in separate processes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Address = Annotated[
    str, typer.Option("--address", metavar="HOST:PORT", envvar="TWINSTAGE_ADDRESS", help="Where the router listens.")
]
ModelName = Annotated[str, typer.Option("--model", help="Name of the model; by default the only one that is served.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens to generate.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, help="Softmax temperature; 0 takes the most likely token.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the random numbers.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="String that ends the text. Repeatable.")]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Deadline of the call, in seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
StartTimeout = Annotated[
    float, typer.Option("--start-timeout", min=1, help="Seconds within which the cluster must be ready.")
]
KvTransports = Annotated[
    str | None, typer.Option("--kv-transports", help="Ways to hand over KV blocks, best first, such as shm,tcp.")
]
PrefixCache = Annotated[
    bool,
    typer.Option(
        "--prefix-cache/--no-prefix-cache",
        help="Keep the KV blocks of finished requests for those that begin alike, until their memory is needed.",
    ),
]
Weights = Annotated[
    Literal["stock", "auto", "fp32", "int8"] | None,
    typer.Option("--weights", help="stock: Transformers' modules; fp32, int8: own kernels; auto: fp32 where possible."),
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="The same request gives the same bits, whatever else is computed; slower."),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option("--log-level", help="Least severity that is shown.")
]


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="[NAME=]REF",
            help="Model to serve: a directory, a Hub id, a .gguf file, 'demo' or 'demo-embedding'. Repeatable; NAME "
            "is what requests call it. An embedding model gets one prefill worker. Default: demo.",
        ),
    ] = None,
    prefill: Annotated[int, typer.Option("--prefill", min=1, help="Prefill workers of each generation model.")] = 1,
    decode: Annotated[int, typer.Option("--decode", min=1, help="Decode workers of each generation model.")] = 1,
    host: Annotated[str, typer.Option("--host", help="Address at which the router listens.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the router; 0 takes a free one.")
    ] = 50051,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="Threads of each worker; by default the cores are shared out."),
    ] = None,
    pin_cpus: Annotated[
        bool,
        typer.Option(help="Bind each worker to its share of the cores, unless they are too few or --threads is given."),
    ] = True,
    kv_cache_bytes: Annotated[
        str | None, typer.Option("--kv-cache-bytes", help="Memory for KV blocks of each worker, such as 512MiB.")
    ] = None,
    kv_transports: KvTransports = None,
    prefix_cache: PrefixCache = True,
    kv_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"] | None,
        typer.Option("--kv-dtype", help="Number format of keys and values; auto: float16 with 8-bit weights."),
    ] = None,
    weights: Weights = None,
    deterministic: Deterministic = False,
    log_level: LogLevel = "info",
    log_directory: Annotated[
        Path | None,
        typer.Option("--log-directory", exists=True, file_okay=False, help="Also write each process's log here."),
    ] = None,
    start_timeout: StartTimeout = 600.0,
) -> None:
    """Run a local cluster in the foreground: a router, prefill workers and decode workers.

    One Ctrl-C (or SIGTERM) stops all of it, a second one kills it. Everything runs on this machine; for several, start
    `python -m router`, `python -m prefill_worker` and `python -m decode_worker` yourself.
    """
    from twinstage.cli import serve as command
    from twinstage.cli.cluster import ClusterConfig

    config = ClusterConfig(
        models=tuple(model or ("demo",)),
        prefill=prefill,
        decode=decode,
        host=host,
        port=port,
        threads=threads,
        pin_cpus=pin_cpus,
        kv_cache_bytes=kv_cache_bytes,
        kv_transports=kv_transports,
        prefix_cache=prefix_cache,
        kv_dtype=kv_dtype,
        weights=weights,
        deterministic=deterministic,
        log_level=log_level,
        log_directory=log_directory,
    )
    command.serve(config, start_timeout_s=start_timeout)


@app.command()
def demo(
    kv_transports: KvTransports = None,
    prefix_cache: PrefixCache = True,
    weights: Weights = None,
    deterministic: Deterministic = False,
    log_level: LogLevel = "info",
    start_timeout: StartTimeout = 600.0,
) -> None:
    """Start a cluster on the demo model, ask it one question, show where the time went, and stop it."""
    from twinstage.cli import demo as command
    from twinstage.cli.cluster import ClusterConfig

    config = ClusterConfig(
        port=0,
        kv_cache_bytes="384MiB",
        kv_transports=kv_transports,
        prefix_cache=prefix_cache,
        weights=weights,
        deterministic=deterministic,
        log_level=log_level,
    )
    command.demo(config, start_timeout_s=start_timeout)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    model: ModelName = "",
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = None,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Continue PROMPT. The text goes to standard output as it comes, usage and timing to standard error."""
    from twinstage.cli import ask

    options = _options(model, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop, timeout_s=timeout)
    ask.generate(address, _text(prompt), options=options, as_json=as_json)


@app.command()
def chat(
    prompt: Annotated[str, typer.Argument(help="Message to answer; - reads it from standard input.")],
    address: Address = DEFAULT_ADDRESS,
    model: ModelName = "",
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = None,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Answer PROMPT as a chat. The text goes to standard output as it comes, usage and timing to standard error."""
    from twinstage.cli import ask

    options = _options(model, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop, timeout_s=timeout)
    ask.chat(address, _text(prompt), options=options, as_json=as_json)


@app.command()
def embed(
    texts: Annotated[list[str], typer.Argument(help="Texts to embed.")],
    address: Address = DEFAULT_ADDRESS,
    model: ModelName = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Embed TEXTS and print the beginning of each vector; --json prints all numbers."""
    from twinstage.cli import ask

    ask.embed(address, texts, model=model, timeout_s=timeout, as_json=as_json)


@app.command()
def workers(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """List the workers that the router knows, with their load."""
    from twinstage.cli import ask

    ask.workers(address, as_json=as_json)


@app.command()
def reset_prefix_cache(
    address: Address = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option("--model", help="Only workers of this model; by default of all.")] = "",
    worker: Annotated[str, typer.Option("--worker", help="Only the worker with this id; by default all.")] = "",
    as_json: AsJson = False,
) -> None:
    """Let the workers forget the prompts and answers that they keep for later requests that begin alike."""
    from twinstage.cli import ask

    ask.reset_prefix_cache(address, model=model, worker_id=worker, as_json=as_json)


@app.command()
def models(address: Address = DEFAULT_ADDRESS, as_json: AsJson = False) -> None:
    """List the models that are served."""
    from twinstage.cli import ask

    ask.models(address, as_json=as_json)


app.command()(bench)


@app.command()
def health(
    address: Address = DEFAULT_ADDRESS,
    service: Annotated[str, typer.Option("--service", help="Full name of a gRPC service; default: the server.")] = "",
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds to wait for an answer.")] = 3.0,
) -> None:
    """Ask any server of the cluster, router or worker, for its health. Exit code 0: it serves; 1: it does not."""
    from twinstage.cli.health import check

    status = check(address, service, timeout_s=timeout)
    print(status)
    if status != "SERVING":
        raise typer.Exit(1)


def _options(
    model: str,
    *,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
    stop: list[str] | None,
    timeout_s: float | None,
) -> Options:
    from twinstage.client.options import Options, Sampling, Stopping

    return Options(
        model=model,
        sampling=Sampling(temperature=temperature, seed=seed),
        stopping=Stopping(max_tokens=max_tokens, stop=tuple(stop or ())),
        timeout_s=timeout_s,
    )


def _text(argument: str) -> str:
    return sys.stdin.read() if argument == "-" else argument


def main() -> None:
    """Run the command. Exit codes: 1 for what went wrong outside, 2 for wrong flags, a wrong model or a port in use."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's own warnings are no answer to a person
    try:
        app()
    except TwinstageError as error:
        print(f"twinstage: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, (ConfigError, ModelError)) else 1)


if __name__ == "__main__":
    main()
