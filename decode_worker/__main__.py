"""`python -m decode_worker`: reads the settings and wires a decode worker together."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from decode_worker.config import DecodeSettings
from decode_worker.service import SERVICE_NAME, add_services
from twinstage.addresses import split_address
from twinstage.errors import ConfigError
from twinstage.hosting.found_model import find_model
from twinstage.rpc.protocol import PROTOCOL_VERSION
from twinstage.rpc.worker_process import WorkerProcess, kv_identity, kv_secrets, kv_tls, run_worker
from twinstage.types import Role, Task

if TYPE_CHECKING:  # they import torch
    from decode_worker.worker import DecodeWorker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    return run_worker(
        Role.DECODE,
        sys.argv[1:] if arguments is None else arguments,
        settings=DecodeSettings,
        process=_process,
    )


def _process(settings: DecodeSettings) -> WorkerProcess[DecodeWorker]:
    return WorkerProcess(
        settings,
        service_name=SERVICE_NAME,
        add_services=partial(add_services, lease_s=settings.lease),
        load=lambda: _load(settings),
    )


def _load(settings: DecodeSettings) -> Callable[[asyncio.AbstractEventLoop], DecodeWorker]:
    """Load the model, on a thread; the result makes the worker on the event loop."""
    secret, tls = kv_secrets(settings), kv_tls(settings)
    found = find_model(settings)
    if found.resolved.task is not Task.GENERATE:
        raise ConfigError(f"{found.resolved.name} is an embedding model: it runs on prefill workers only")

    from decode_worker.worker import DecodeWorker
    from twinstage.hosting.assemble import build_engine
    from twinstage.transfer.receiver import ChannelTimeouts, KvReceiver

    parts, description = build_engine(
        settings, found, role=Role.DECODE, protocol_version=PROTOCOL_VERSION, speculation=settings.speculation
    )
    return lambda loop: DecodeWorker(
        parts,
        open_receiver=lambda intake: KvReceiver(
            parts.memory,
            kv_identity(description),
            secret=secret,
            delegate=intake,
            shm_directory=_socket_directory(settings),
            tcp_listen=split_address(settings.kv_listen) if "tcp" in settings.transports else None,
            tcp_advertise=settings.kv_advertise,
            timeouts=ChannelTimeouts.of_lease(settings.lease),
            tls=tls,
        ),
        description=description,
        tokenizer_bundle=found.bundle.to_bytes(),
        loop=loop,
    )


def _socket_directory(settings: DecodeSettings) -> Path | None:
    """Where the unix socket of shared memory goes; None without shared memory."""
    if "shm" not in settings.transports:
        return None
    return settings.kv_socket_directory or Path(tempfile.gettempdir())


if __name__ == "__main__":
    sys.exit(main())
