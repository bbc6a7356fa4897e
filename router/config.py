"""The router's settings: flags, then `TWINSTAGE_*` variables, then defaults."""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from router.admission.answers import ParserChoice, read_reasoning_parsers, read_tool_parsers
from router.discovery import WorkerSource, parse_source
from router.failover import FailoverPolicy
from router.limits import MAX_PRIORITY
from twinstage.addresses import split_address
from twinstage.errors import ConfigError
from twinstage.rpc.access import Access
from twinstage.rpc.callers import read_shared_secrets
from twinstage.rpc.protocol import MAX_MESSAGE_BYTES
from twinstage.rpc.reloaded import Reloaded
from twinstage.rpc.tls import TlsFiles, channel_credentials
from twinstage.settings import ProcessSettings
from twinstage.text.answers.reasoning import REASONING_STYLES
from twinstage.text.answers.registry import TOOL_PARSERS
from twinstage.types import SECONDS_PER_PRIORITY_LEVEL
from twinstage.types.constraints import GrammarBackend

MOST_OPEN_FILES = 1024 * 1024  # where the system sets no limit


class RouterSettings(ProcessSettings):
    """Twinstage router: accepts requests, and places them on prefill and decode workers."""

    model_config = SettingsConfigDict(cli_prog_name="python -m router")

    listen: str = Field(default="0.0.0.0:50051", description="host:port of the gRPC server; port 0 takes a free one.")
    workers: Annotated[list[str], NoDecode] = Field(
        default=[],
        description="A worker as host:port, or all workers behind a name as dns:///name:port; at least one is needed. "
        "Repeat the flag, or separate by commas.",
    )
    max_live_requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests in progress at once; more wait. A call counts as many as it has continuations that are "
        "computed at once, but as a quarter of this at most. By default twice what the batches of the decode workers "
        "hold, so that the next ones are computed and handed over while those run.",
    )
    max_queued_requests: int = Field(default=256, ge=0, description="Requests that may wait; more are refused.")
    max_queue_wait: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that a request may wait for its turn; one that would wait longer is refused at once. Set "
        "it to what clients can wait for their first token: those who are let in then have a use for their answers.",
    )
    max_priority: int | None = Field(
        default=None,
        ge=0,
        le=MAX_PRIORITY,
        description="Levels that the priority of a request counts at most, up or down: a level is a head start of ten "
        "seconds. By default as many as keep the highest less than --max-queue-wait ahead of the lowest, so that none "
        "waits in vain.",
    )
    caller_weights: Annotated[dict[str, float], NoDecode] = Field(
        default={},
        description="Share of a caller beside others when requests wait, as NAME=WEIGHT; 1 for those that are not "
        "named. Repeat the flag, or separate by commas. Who calls is said by the token, else by the metadata x-caller, "
        "else by the host's address.",
    )
    default_timeout: float = Field(
        default=600.0, gt=0, description="Seconds that a request may take whose client sets no deadline."
    )
    max_timeout: float = Field(default=3600.0, gt=0, description="Seconds that any request may take.")
    report_interval: float = Field(
        default=0.5,
        ge=0.05,
        le=60,
        description="Seconds between load reports of a worker; after three without one it is taken for lost.",
    )
    lookup_interval: float = Field(default=5.0, gt=0, description="Seconds between look-ups of dns:/// names.")
    failover: bool = Field(
        default=True,
        description="Try a request again elsewhere when a worker fails it, from the tokens on that it has. Without it, "
        "the client gets UNAVAILABLE before the first token, and ABORTED with the number of tokens after it.",
    )
    max_attempts: int = Field(default=3, ge=1, le=100, description="Times that one request is tried at most.")
    worker_wait: float = Field(
        default=1.0,
        ge=0,
        description="Seconds that a request which a worker failed waits for one to come back when there is no other.",
    )
    resume_wait: float = Field(
        default=10.0, ge=0, description="The same for a stream whose client has tokens, which it cannot ask for again."
    )
    poison_limit: int = Field(
        default=2,
        ge=2,
        description="Workers that may be lost while they compute for a request; one that takes so many is refused.",
    )
    poison_memory: float = Field(
        default=120.0,
        ge=0,
        description="Seconds for which a request refused for that is refused when its caller sends it again; twice as "
        "long each time that it is refused again, up to an hour. 0 forgets it at once.",
    )
    tokenizer_threads: int = Field(
        default=2,
        ge=1,
        description="Threads for prompts, to tokenize and render; as many others are for inputs to embed, and "
        "there a call's texts are also shared out among all cores.",
    )
    grammar_backend: Literal["auto", "xgrammar", "llguidance"] = Field(
        default="auto",
        description="Library that compiles the grammars of structured output, for requests that name none; auto takes "
        "llguidance, and xgrammar for EBNF and structural tags.",
    )
    max_message_bytes: int = Field(
        default=4 * 1024 * 1024,
        ge=1024,
        le=MAX_MESSAGE_BYTES,
        description="Bytes of the largest message that clients may send; larger ones are refused.",
    )
    max_connections: int | None = Field(
        default=None,
        ge=1,
        description="Connections of clients at once; more are closed. By default three quarters of the files that the "
        "process may open.",
    )
    max_streams_per_connection: int = Field(
        default=1024, ge=1, description="Calls in progress on one connection; more wait at the client."
    )
    tokens_file: Path | None = Field(
        default=None,
        description="File with the callers and their tokens, a line each: name, token or sha256:DIGEST, the rights "
        "use, admin or use,admin, and quotas: requests=, requests-per-minute=, tokens-per-minute=. Without it "
        "everybody may call everything.",
    )
    worker_tls: bool = Field(default=False, description="Call workers over TLS, with the CAs that gRPC trusts.")
    worker_tls_ca: Path | None = Field(
        default=None,
        description="PEM file with the CA certificates of workers; with it, workers are called over TLS, by default "
        "in plain text.",
    )
    worker_tls_certificate: Path | None = Field(
        default=None, description="PEM file with the certificate chain that this router shows to workers."
    )
    worker_tls_key: Path | None = Field(default=None, description="PEM file with the key of --worker-tls-certificate.")
    worker_tls_name: str = Field(
        default="", description="Name in the certificates of workers; by default the host of their addresses."
    )
    worker_secret_file: Path | None = Field(
        default=None, description="File with the secret that workers ask for, of which the first line is sent."
    )
    tool_parser: Annotated[list[str], NoDecode] = Field(
        default=[],
        description="How models call tools, as PARSER for all or MODEL=PARSER for one: auto (by the chat template), "
        f"none, or one of {', '.join(TOOL_PARSERS)}. Repeat the flag, or separate by commas.",
    )
    reasoning_parser: Annotated[list[str], NoDecode] = Field(
        default=[],
        description="How models mark their reasoning, as PARSER for all or MODEL=PARSER for one: auto (by the chat "
        f"template), none, or one of {', '.join(REASONING_STYLES)}. Repeat the flag, or separate by commas.",
    )
    metrics_listen: str = Field(
        default="",
        description="host:port of an HTTP server that tells metrics in Prometheus' format at /metrics; by default "
        "none. It asks for no token, so let only those reach it who may know how much there is to do.",
    )
    otlp_endpoint: str = Field(
        default="",
        description="URL of a collector of traces that speaks OTLP over HTTP, such as http://collector:4318; by "
        "default none.",
    )
    trust_request_chat_template: bool = Field(
        default=False,
        description="Take chat templates from clients. Each is a program; it runs in a process of its own that gets "
        "little time and memory.",
    )
    max_connection_age: float = Field(
        default=1800.0,
        gt=0,
        description="Seconds after which clients have to connect anew, so that load spreads over new routers.",
    )
    max_connection_age_grace: float = Field(
        default=3600.0, gt=0, description="Seconds that calls on such a connection get to finish."
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _otlp_endpoint_is_http(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("must be a URL, such as http://collector:4318")
        return value

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_listen_has_a_port(cls, value: str) -> str:
        if value:
            split_address(value)
        return value

    @field_validator("workers", "tool_parser", "reasoning_parser", mode="before")
    @classmethod
    def _split_lists(cls, value: object) -> object:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, Sequence):
            return values
        return [part.strip() for entry in values for part in str(entry).split(",") if part.strip()]

    @property
    def priority_at_most(self) -> int:
        """`max_priority`, or the most levels whose head start over as many below zero is under `max_queue_wait`."""
        if self.max_priority is not None:
            return self.max_priority
        levels = math.ceil(self.max_queue_wait / (2 * SECONDS_PER_PRIORITY_LEVEL)) - 1
        return min(levels, MAX_PRIORITY)

    @property
    def connections_at_most(self) -> int:
        """`max_connections`, or what leaves a quarter of the process's files for workers and everything else."""
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft_limit == resource.RLIM_INFINITY:
            soft_limit = MOST_OPEN_FILES
        return self.max_connections or max(1, soft_limit * 3 // 4)

    @field_validator("caller_weights", mode="before")
    @classmethod
    def _split_weights(cls, value: object) -> object:
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, Sequence):
            return values
        weights: dict[str, float] = {}
        for part in (part.strip() for entry in values for part in str(entry).split(",")):
            name, _, weight = part.rpartition("=")
            if not name or not re.fullmatch(r"[0-9]*\.?[0-9]+", weight) or not float(weight):
                raise ValueError(f"write a caller's weight as NAME=WEIGHT with a weight above 0, not {part!r}")
            weights[name] = float(weight)
        return weights

    @field_validator("tool_parser")
    @classmethod
    def _check_tool_parsers(cls, values: list[str]) -> list[str]:
        read_tool_parsers(values)
        return values

    @field_validator("reasoning_parser")
    @classmethod
    def _check_reasoning_parsers(cls, values: list[str]) -> list[str]:
        read_reasoning_parsers(values)
        return values

    def parsers(self) -> ParserChoice:
        """How the answers of each model are read."""
        return ParserChoice(
            tool=read_tool_parsers(self.tool_parser), reasoning=read_reasoning_parsers(self.reasoning_parser)
        )

    @property
    def default_grammar_backend(self) -> GrammarBackend | None:
        """`grammar_backend`, None for auto."""
        return None if self.grammar_backend == "auto" else GrammarBackend(self.grammar_backend)

    def worker_access(self) -> Reloaded[Access]:
        """How workers are called. Raises ConfigError when a file cannot be read, or a name is given without TLS."""
        files = TlsFiles(
            certificate=self.worker_tls_certificate,
            key=self.worker_tls_key,
            ca=self.worker_tls_ca,
            flag_prefix="--worker-tls-",
        )
        return Reloaded([*files.paths, self.worker_secret_file], lambda: self._read_worker_access(files))

    def _read_worker_access(self, files: TlsFiles) -> Access:
        credentials = channel_credentials(files, required=self.worker_tls)
        if self.worker_tls_name and credentials is None:
            raise ConfigError("--worker-tls-name needs --worker-tls, or --worker-tls-ca")
        if self.worker_secret_file is None:
            secret = ""
        else:
            secret = read_shared_secrets(self.worker_secret_file, flag="--worker-secret-file")[0]
        return Access(credentials=credentials, token=secret, server_name=self.worker_tls_name)

    def failover_policy(self) -> FailoverPolicy:
        """How requests are tried again."""
        return FailoverPolicy(
            max_attempts=self.max_attempts if self.failover else 1,
            poison_limit=self.poison_limit,
            worker_wait_s=self.worker_wait,
            resume_wait_s=self.resume_wait,
        )

    def sources(self) -> list[WorkerSource]:
        """Where to find workers. Raises ConfigError when there is nowhere, or a value cannot be read."""
        if not self.workers:
            raise ConfigError("no workers: pass --workers host:port or --workers dns:///name:port")
        return [parse_source(value) for value in dict.fromkeys(self.workers)]
