"""The settings that both kinds of worker have, read from flags and `TWINSTAGE_*` variables. Free of torch."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, field_validator

from twinstage.cgroups import usable_cpus
from twinstage.cpus import bind_process, parse_cpus
from twinstage.errors import ConfigError
from twinstage.settings import ProcessSettings
from twinstage.types import Role, WorkerId

KNOWN_TRANSPORTS = ("shm", "tcp")
MIN_SECRET_BYTES = 16


class WorkerSettings(ProcessSettings):
    """What a prefill worker and a decode worker can both be told."""

    model: str = Field(
        default="demo",
        description="The model: a local directory, a Hub id (org/name), a .gguf file, 'demo' or 'demo-embedding'.",
    )
    task: Literal["auto", "generate", "embed", "score", "classify"] = Field(
        default="auto",
        description="What the model is used for; auto decides by its files. They do not tell of classifiers with "
        "several labels (classify), nor of rerankers that answer yes or no (score).",
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a Hub model; by default main.")
    tokenizer: Path | None = Field(
        default=None,
        description="Directory with the tokenizer (tokenizer.json, chat template) to use instead of the model's own.",
    )
    tokenizer_mode: Literal["auto", "slow"] = Field(
        default="auto",
        description="auto reads tokenizer.json; slow, a tokenizer of Transformers in Python, is refused: convert it.",
    )
    served_model_name: str | None = Field(
        default=None,
        description="Name by which requests choose the model; by default derived from the model reference.",
    )
    worker_id: str | None = Field(
        default=None, description="Unique name of this worker; by default role, host name and a random part."
    )
    max_model_len: int | None = Field(
        default=None,
        gt=0,
        description="Longest sequence in tokens; by default the model's own limit, which this may only lower.",
    )
    block_size: int = Field(default=16, ge=1, le=1024, description="Tokens in one KV block.")
    kv_cache_bytes: ByteSize = Field(
        default=ByteSize(512 * 1024 * 1024), gt=0, description="Memory for KV blocks, such as 512MiB or 4GiB."
    )
    prefix_cache: bool = Field(
        default=True,
        description="Keep the KV blocks of finished requests until their memory is needed, so that a prompt which "
        "begins like an earlier one is computed and handed over from where it differs.",
    )
    max_num_sequences: int = Field(default=64, ge=1, description="Sequences computed together at most.")
    max_tokens_per_step: int = Field(
        default=512, ge=1, description="Tokens computed in one step at most; longer prompts are computed in chunks."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads that compute; by default as many as this process has CPUs, or as the CPU quota of its "
        "control group allows.",
    )
    cpus: str | None = Field(
        default=None,
        description="CPUs this worker runs on, such as 0-3,8; where several share a machine, give each its own. By "
        "default all that the process may use.",
    )
    weights: Literal["stock", "auto", "fp32", "int8"] = Field(
        default="auto",
        description="How the model runs: as stock Transformers modules in float32, or packed in fp32 or int8 with "
        "kernels of its own, which are compiled at the first start; auto takes fp32 where the model has a shape they "
        "know, and stock modules elsewhere. Pooling models take fp32, or int8, where they can.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Number format of weights; bfloat16 is for embedding models of BERT's kin alone.",
    )
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        default="auto",
        description="Number format of keys and values, the same for prefill and decode workers; auto takes, "
        "with 8-bit weights, bfloat16 where the CPU has AVX512_BF16 and float16 elsewhere, and float32 otherwise.",
    )
    deterministic: bool = Field(
        default=False,
        description="Compute the same bits for the same request, whatever else is computed with it. All workers of a "
        "model need it, with the same number of threads and tokens per step.",
    )
    kv_transports: str = Field(default="shm,tcp", description="Ways to hand over KV blocks, best first: shm, tcp.")
    kv_secret_file: Path | None = Field(
        default=None,
        description="File with the secret that both ends of a KV channel must know; each further line is accepted as "
        "well, so that secrets can be replaced. Without it none is asked.",
    )
    kv_tls_certificate: Path | None = Field(
        default=None,
        description="PEM certificate that this worker shows at the other end of a KV channel over tcp, which then has "
        "TLS. All workers of a model need it, with --kv-tls-key and --kv-tls-ca.",
    )
    kv_tls_key: Path | None = Field(default=None, description="PEM key of --kv-tls-certificate.")
    kv_tls_ca: Path | None = Field(
        default=None,
        description="PEM certificates of the CAs that the worker at the other end must have its certificate of. "
        "Whoever has one is taken for a worker, by whatever name: use a CA that signs nothing else.",
    )
    worker_secret_file: Path | None = Field(
        default=None,
        description="File with the secret that routers must send, the same as their --worker-secret-file; each further "
        "line is accepted as well, so that secrets can be replaced. Without it everybody may call this worker.",
    )
    lease: float = Field(
        default=10.0,
        ge=0.3,
        le=600,
        description="Seconds after which a router, or the worker at the other end of a KV channel, that says nothing "
        "is taken for lost, and what it holds here is freed.",
    )
    cache_directory: Path | None = Field(
        default=None, description="Where prepared models are kept; by default $TWINSTAGE_CACHE or ~/.cache/twinstage."
    )

    @field_validator("kv_transports")
    @classmethod
    def _transports_are_known(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if not names or len(set(names)) != len(names) or not set(names) <= set(KNOWN_TRANSPORTS):
            raise ValueError(f"must be one or several of {', '.join(KNOWN_TRANSPORTS)}, separated by commas")
        return ",".join(names)

    @field_validator("tokenizer_mode")
    @classmethod
    def _tokenizer_is_a_file(cls, value: str) -> str:
        if value == "slow":
            raise ValueError(
                "the router has no Transformers to run such a tokenizer; write its tokenizer.json with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...), and pass --tokenizer"
            )
        return value

    @field_validator("cpus")
    @classmethod
    def _cpus_are_a_list(cls, value: str | None) -> str | None:
        if value is not None:
            parse_cpus(value)
        return value

    @property
    def transports(self) -> tuple[str, ...]:
        """The names in `kv_transports`, best first."""
        return tuple(self.kv_transports.split(","))

    @property
    def kv_tls(self) -> tuple[Path, Path, Path] | None:
        """Certificate, key and CA of the KV channel; None without TLS. Raises ConfigError when one of them lacks."""
        certificate, key, ca = self.kv_tls_certificate, self.kv_tls_key, self.kv_tls_ca
        if certificate is None and key is None and ca is None:
            return None
        if certificate is None or key is None or ca is None:
            raise ConfigError("--kv-tls-certificate, --kv-tls-key and --kv-tls-ca: name all three, or none")
        return certificate, key, ca

    @property
    def announced_transports(self) -> tuple[str, ...]:
        """The ways to hand over KV blocks as others see them: tcp with TLS is called tls."""
        return tuple("tls" if name == "tcp" and self.kv_tls else name for name in self.transports)

    @property
    def compute_threads(self) -> int:
        """Threads to compute with: `threads`, or as many as this process has CPUs to use."""
        return self.threads or usable_cpus()

    def bind_cpus(self) -> None:
        """Run on `cpus` only, if they are given. To be called before threads start. Raises ConfigError."""
        if self.cpus is not None:
            bind_process(parse_cpus(self.cpus))

    def identity(self, role: Role) -> WorkerId:
        """The worker's id: as given, or role, host name and a random part."""
        return WorkerId(self.worker_id or f"{role.value}-{socket.gethostname()}-{secrets.token_hex(3)}")

    def kv_secrets(self) -> tuple[bytes, ...]:
        """The secrets of the KV channel, if there are any: the first is proved, all are accepted.

        Raises ConfigError when the file cannot be read or a line is too short.
        """
        if self.kv_secret_file is None:
            return ()
        try:
            lines = self.kv_secret_file.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(f"--kv-secret-file {self.kv_secret_file}: {error.strerror}") from error
        secrets = tuple(line.strip() for line in lines if line.strip())
        if not secrets or min(map(len, secrets)) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"--kv-secret-file {self.kv_secret_file}: each line needs at least {MIN_SECRET_BYTES} bytes"
            )
        return secrets
