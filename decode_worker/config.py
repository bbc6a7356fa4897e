"""The settings of a decode worker: those of every worker, where KV blocks come in, and how tokens are guessed ahead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from twinstage.addresses import split_address
from twinstage.hosting.settings import WorkerSettings

if TYPE_CHECKING:
    from twinstage.engine.speculation import SpeculationOptions


class DecodeSettings(WorkerSettings):
    """A decode worker: takes KV blocks from prefill workers and generates tokens."""

    model_config = SettingsConfigDict(cli_prog_name="python -m decode_worker")

    listen: str = Field(default="0.0.0.0:50062", description="host:port of the gRPC server; port 0 takes a free one.")
    kv_listen: str = Field(
        default="0.0.0.0:0", description="host:port at which KV blocks come in over tcp; port 0 takes a free one."
    )
    kv_advertise: str | None = Field(
        default=None,
        description="host:port at which prefill workers reach --kv-listen; by default the host at which the router "
        "reaches this worker, and the port of --kv-listen.",
    )
    kv_socket_directory: Path | None = Field(
        default=None, description="Where the unix socket for shared memory is made; by default a temporary directory."
    )

    speculative: Literal["off", "ngram", "draft_model", "mtp"] = Field(
        default="off",
        description="Guess tokens ahead and check several of them in one step, which changes how fast tokens come and "
        "not which: ngram takes what followed the last time that the latest tokens occurred in the same request, "
        "draft_model asks --draft-model. mtp is not implemented.",
    )
    num_speculative_tokens: int = Field(default=7, ge=1, le=64, description="Tokens guessed for one step at most.")
    speculative_max_sequences: int = Field(
        default=8,
        ge=1,
        description="Sequences decoded together up to which tokens are guessed; in larger batches it does not pay.",
    )
    ngram_max: int = Field(default=4, ge=1, le=64, description="Tokens that ngram looks for at most.")
    ngram_min: int = Field(default=2, ge=1, le=64, description="Tokens that ngram looks for at least.")
    draft_model: str | None = Field(
        default=None,
        description="The model that guesses: a local directory, a Hub id or a .gguf file; its tokens are those of "
        "--model.",
    )
    draft_revision: str | None = Field(
        default=None, description="Revision of --draft-model, where that is a Hub model; used as it is."
    )
    draft_weights: Literal["stock", "auto", "fp32", "int8"] = Field(
        default="auto", description="How the draft model runs, as --weights; auto takes int8 where its shape allows it."
    )
    draft_kv_cache_bytes: ByteSize = Field(
        default=ByteSize(256 * 1024 * 1024), gt=0, description="Memory for the KV blocks of the draft model."
    )

    @field_validator("speculative")
    @classmethod
    def _method_is_implemented(cls, value: str) -> str:
        if value == "mtp":
            raise ValueError(
                "mtp, guesses by heads of the model itself, is not implemented; choose ngram or draft_model"
            )
        return value

    @model_validator(mode="after")
    def _speculation_is_complete(self) -> Self:
        if self.speculative == "draft_model" and not self.draft_model:
            raise ValueError("--speculative draft_model needs --draft-model")
        if self.draft_model and self.speculative != "draft_model":
            raise ValueError("--draft-model needs --speculative draft_model")
        if self.draft_revision and not self.draft_model:
            raise ValueError("--draft-revision needs --draft-model")
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"--ngram-min, {self.ngram_min}, must not be above --ngram-max, {self.ngram_max}")
        return self

    @property
    def speculation(self) -> SpeculationOptions | None:
        """How tokens are guessed ahead; None when they are not."""
        from twinstage.engine.speculation import SpeculationOptions

        if self.speculative in ("off", "mtp"):
            return None
        return SpeculationOptions(
            method="ngram" if self.speculative == "ngram" else "draft_model",
            num_tokens=self.num_speculative_tokens,
            max_sequences=self.speculative_max_sequences,
            ngram_max=self.ngram_max,
            ngram_min=self.ngram_min,
            draft_model=self.draft_model or "",
            draft_revision=self.draft_revision,
            draft_weights=self.draft_weights,
            draft_kv_cache_bytes=int(self.draft_kv_cache_bytes),
        )

    @field_validator("kv_listen", "kv_advertise")
    @classmethod
    def _addresses_have_ports(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value
