"""The settings of a prefill worker: those of every worker, and none of its own."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from twinstage.hosting.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """A prefill worker: computes prompts and hands their KV blocks to decode workers; or computes embeddings."""

    model_config = SettingsConfigDict(cli_prog_name="python -m prefill_worker")

    listen: str = Field(default="0.0.0.0:50061", description="host:port of the gRPC server; port 0 takes a free one.")
