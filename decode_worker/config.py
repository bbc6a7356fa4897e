"""The settings of a decode worker: those of every worker, and where KV blocks come in."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from twinstage.addresses import split_address
from twinstage.hosting.settings import WorkerSettings


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

    @field_validator("kv_listen", "kv_advertise")
    @classmethod
    def _addresses_have_ports(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value
