"""The settings of a prefill worker: those of every worker, and none of its own."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from twinstage.hosting.settings import WorkerSettings

# An input is never cut, and no stream waits behind a batch: larger ones than a step of generation cost fewer passes.
TOKENS_PER_ENCODING_BATCH = 1024


class PrefillSettings(WorkerSettings):
    """A prefill worker: computes prompts and hands their KV blocks to decode workers; or computes embeddings."""

    model_config = SettingsConfigDict(cli_prog_name="python -m prefill_worker")

    listen: str = Field(default="0.0.0.0:50061", description="host:port of the gRPC server; port 0 takes a free one.")

    @property
    def max_tokens_per_encoding_batch(self) -> int:
        """Tokens of inputs that are encoded together at most: --max-tokens-per-step where it was given."""
        given = "max_tokens_per_step" in self.model_fields_set
        return self.max_tokens_per_step if given else TOKENS_PER_ENCODING_BATCH
