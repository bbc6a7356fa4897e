"""The flags of commands that start a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from twinstage.cli.port_security import OPEN_PORT, PortSecurity

if TYPE_CHECKING:
    from twinstage.cli.cluster_config import ClusterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """How workers compute, what they keep and hand over, and what is told of them."""

    kv_transports: Annotated[
        str | None,
        typer.Option("--kv-transports", show_default="shm,tcp", help="Ways to hand over KV blocks, best first."),
    ] = None
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Keep the KV blocks of finished requests for those that begin alike, until their memory is needed.",
        ),
    ] = True
    weights: Annotated[
        Literal["stock", "auto", "fp32", "int8"] | None,
        typer.Option(
            "--weights",
            show_default="auto",
            help="stock: Transformers' modules; fp32, int8: own kernels; auto: fp32 where possible.",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="The same request gives the same bits, whatever else is computed; slower."
        ),
    ] = False
    speculative: Annotated[
        Literal["off", "ngram", "draft_model"] | None,
        typer.Option(
            "--speculative",
            show_default="off",
            help="Guess tokens ahead: from the request itself, or by --draft-model.",
        ),
    ] = None
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="The model that guesses, with the same tokens as --model.")
    ] = None
    draft_revision: Annotated[
        str | None, typer.Option("--draft-revision", help="Revision of --draft-model, where that is a Hub model.")
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option("--num-speculative-tokens", min=1, show_default="7", help="Tokens guessed for one step at most."),
    ] = None
    ngram_max: Annotated[
        int | None,
        typer.Option("--ngram-max", min=1, show_default="4", help="Latest tokens that ngram looks for at most."),
    ] = None
    ngram_min: Annotated[
        int | None,
        typer.Option("--ngram-min", min=1, show_default="2", help="Latest tokens that ngram looks for at least."),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option("--log-level", help="Least severity that is shown."),
    ] = "info"
    start_timeout: Annotated[
        float, typer.Option("--start-timeout", min=1, help="Seconds within which the cluster must be ready.")
    ] = 600.0

    @property
    def speculation_flags(self) -> tuple[str, ...]:
        """Those of a decode worker, as they were given."""
        names = ("speculative", "draft_model", "draft_revision", "num_speculative_tokens", "ngram_max", "ngram_min")
        given = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        return tuple(word for name, value in given for word in (f"--{name.replace('_', '-')}", str(value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFlags:
    """Who may call the router."""

    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            envvar="TWINSTAGE_TLS_CERTIFICATE",
            help="PEM file with the router's certificate chain; with it, its port speaks TLS only.",
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", envvar="TWINSTAGE_TLS_KEY", help="PEM file with the key of --tls-certificate."),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca",
            envvar="TWINSTAGE_TLS_CLIENT_CA",
            help="PEM file with CA certificates; with it, only clients with a certificate of theirs may connect.",
        ),
    ] = None
    tokens_file: Annotated[
        Path | None,
        typer.Option(
            "--tokens-file",
            envvar="TWINSTAGE_TOKENS_FILE",
            help="File with a caller a line: name, token or sha256:DIGEST, rights, quotas. Without it everybody may "
            "call everything.",
        ),
    ] = None

    def security(self) -> PortSecurity:
        """The same without typer."""
        return PortSecurity(
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            tls_client_ca=self.tls_client_ca,
            tokens_file=self.tokens_file,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """Which processes there are, and what each of them gets."""

    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="[NAME=]REF",
            show_default="demo",
            help="Model to serve: a directory, a Hub id, a .gguf file, 'demo' or 'demo-embedding'. Repeatable; NAME "
            "is what requests call it. An embedding model gets one prefill worker.",
        ),
    ] = None
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            metavar="[NAME=]TASK",
            show_default="auto",
            help="What a model is for: generate, embed, score or classify; auto: what its files say. Repeatable.",
        ),
    ] = None
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(
            "--tokenizer", metavar="[NAME=]DIRECTORY", help="Tokenizer to use instead of the model's own. Repeatable."
        ),
    ] = None
    revision: Annotated[
        list[str] | None,
        typer.Option("--revision", metavar="[NAME=]REVISION", help="Revision of a Hub model. Repeatable."),
    ] = None
    prefill: Annotated[int, typer.Option("--prefill", min=1, help="Prefill workers of each generation model.")] = 1
    decode: Annotated[int, typer.Option("--decode", min=1, help="Decode workers of each generation model.")] = 1
    host: Annotated[str, typer.Option("--host", help="Address at which the router listens.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port of the router; 0 takes a free one.")] = (
        50051
    )
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="Threads of each worker; by default the cores are shared out."),
    ] = None
    pin_cpus: Annotated[
        bool,
        typer.Option(help="Bind each worker to its share of the cores, unless they are too few or --threads is given."),
    ] = True
    kv_cache_bytes: Annotated[
        str | None,
        typer.Option("--kv-cache-bytes", show_default="512MiB", help="Memory for KV blocks of each worker."),
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"] | None,
        typer.Option(
            "--kv-dtype",
            show_default="auto",
            help="Number format of keys and values; auto: 16 bits with 8-bit weights, else 32.",
        ),
    ] = None
    tool_parser: Annotated[
        list[str] | None,
        typer.Option(
            "--tool-parser",
            metavar="[NAME=]PARSER",
            help="How models call tools; by default as their chat templates show. Repeatable; docs/chat.md lists them.",
        ),
    ] = None
    reasoning_parser: Annotated[
        list[str] | None,
        typer.Option("--reasoning-parser", metavar="[NAME=]PARSER", help="How models mark their reasoning, likewise."),
    ] = None
    grammar_backend: Annotated[
        Literal["auto", "xgrammar", "llguidance"] | None,
        typer.Option(
            "--grammar-backend", show_default="auto", help="Library for grammars of outputs; auto: by their form."
        ),
    ] = None
    log_directory: Annotated[
        Path | None,
        typer.Option("--log-directory", exists=True, file_okay=False, help="Also write each process's log here."),
    ] = None

    def config(self, engine: EngineFlags, security: PortSecurity = OPEN_PORT) -> ClusterConfig:
        """What is to be started."""
        from twinstage.cli.cluster_config import ClusterConfig

        return ClusterConfig(
            models=tuple(self.model or ("demo",)),
            tasks=tuple(self.task or ()),
            tokenizers=tuple(self.tokenizer or ()),
            revisions=tuple(self.revision or ()),
            prefill=self.prefill,
            decode=self.decode,
            host=self.host,
            port=self.port,
            threads=self.threads,
            pin_cpus=self.pin_cpus,
            kv_cache_bytes=self.kv_cache_bytes,
            kv_transports=engine.kv_transports,
            prefix_cache=engine.prefix_cache,
            kv_dtype=self.kv_dtype,
            weights=engine.weights,
            deterministic=engine.deterministic,
            decode_flags=engine.speculation_flags,
            log_level=engine.log_level,
            log_directory=self.log_directory,
            router_flags=self._router_flags(),
            security=security,
        )

    def _router_flags(self) -> tuple[str, ...]:
        tools = [f"--tool-parser={value}" for value in self.tool_parser or ()]
        reasoning = [f"--reasoning-parser={value}" for value in self.reasoning_parser or ()]
        backend = () if self.grammar_backend is None else (f"--grammar-backend={self.grammar_backend}",)
        return (*tools, *reasoning, *backend)
