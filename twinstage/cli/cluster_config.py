"""What a local cluster consists of, and what each of its processes is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from twinstage.cli.model_choice import ModelChoice, choose_models
from twinstage.cli.port_security import OPEN_PORT, PortSecurity
from twinstage.errors import ConfigError
from twinstage.types import Role

STOP_GRACE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What to start. `models` are `[NAME=]REF`; `prefill` and `decode` count workers for each generation model.

    An embedding model gets one prefill worker. `port` 0 takes a free one. `threads` are those of each worker; by
    default the cores are shared out, and with `pin_cpus` each worker runs on its own. `tasks`, `tokenizers` and
    `revisions` are `[NAME=]VALUE`. `security` is that of the router's port. `log_directory` gets a file with the log of
    each process.
    """

    models: tuple[str, ...] = ("demo",)
    tasks: tuple[str, ...] = ()
    tokenizers: tuple[str, ...] = ()
    revisions: tuple[str, ...] = ()
    prefill: int = 1
    decode: int = 1
    host: str = "127.0.0.1"
    port: int = 50051
    threads: int | None = None
    pin_cpus: bool = False
    kv_cache_bytes: str | None = None
    kv_transports: str | None = None
    prefix_cache: bool = True
    kv_dtype: str | None = None
    weights: str | None = None
    deterministic: bool = False
    log_level: str = "info"
    log_directory: Path | None = None
    stop_grace_s: float = STOP_GRACE_S
    security: PortSecurity = OPEN_PORT
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def chosen_models(self) -> tuple[ModelChoice, ...]:
        """What `models`, and the flags for single ones of them, mean. Raises ConfigError or ModelError."""
        if not self.models:
            raise ConfigError("--model: name at least one model")
        told = {"--task": self.tasks, "--tokenizer": self.tokenizers, "--revision": self.revisions}
        return choose_models(self.models, told)

    def worker_flags(self, role: Role) -> tuple[str, ...]:
        """What all workers of a role are told."""
        named = {
            "--kv-cache-bytes": self.kv_cache_bytes,
            "--weights": self.weights,
            "--kv-dtype": self.kv_dtype,
            "--kv-transports": self.kv_transports,
        }
        flags = [word for flag, value in named.items() if value is not None for word in (flag, value)]
        if not self.prefix_cache:
            flags.append("--no-prefix-cache")
        if self.deterministic:
            flags.append("--deterministic")
        if role is Role.DECODE:
            return (*flags, "--kv-listen", "127.0.0.1:0", *self.decode_flags)
        return (*flags, *self.prefill_flags)
