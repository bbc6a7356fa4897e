"""`python -m prefill_worker`: reads the settings and wires a prefill worker together."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prefill_worker.config import PrefillSettings
from prefill_worker.service import SERVICE_NAME, add_services
from twinstage.hosting.found_model import FoundModel, find_model
from twinstage.rpc.protocol import PROTOCOL_VERSION
from twinstage.rpc.worker_process import WorkerProcess, kv_identity, kv_secrets, kv_tls, run_worker
from twinstage.types import Role, Task

if TYPE_CHECKING:  # they import torch
    from prefill_worker.embedding import EmbeddingWorker
    from prefill_worker.worker import PrefillWorker

    AnyWorker = PrefillWorker | EmbeddingWorker
    MakeWorker = Callable[[asyncio.AbstractEventLoop], AnyWorker]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; returns the exit code."""
    return run_worker(
        Role.PREFILL,
        sys.argv[1:] if arguments is None else arguments,
        settings=PrefillSettings,
        process=_process,
    )


def _process(settings: PrefillSettings) -> WorkerProcess[AnyWorker]:
    return WorkerProcess(
        settings,
        service_name=SERVICE_NAME,
        add_services=add_services,
        load=lambda: _load(settings),
    )


def _load(settings: PrefillSettings) -> MakeWorker:
    """Load the model, on a thread; the result makes the worker on the event loop."""
    found = find_model(settings)
    if found.resolved.task is not Task.GENERATE:
        return _load_embedding(settings, found)
    return _load_generative(settings, found)


def _load_embedding(settings: PrefillSettings, found: FoundModel) -> MakeWorker:
    from prefill_worker.embedding import EmbeddingWorker
    from twinstage.hosting.assemble import build_encoder

    encoder, description = build_encoder(settings, found, protocol_version=PROTOCOL_VERSION)
    return lambda loop: EmbeddingWorker(
        encoder,
        description=description,
        tokenizer_bundle=found.bundle.to_bytes(),
        max_tokens_per_batch=settings.max_tokens_per_encoding_batch,
    )


def _load_generative(settings: PrefillSettings, found: FoundModel) -> MakeWorker:
    secret, tls = kv_secrets(settings), kv_tls(settings)

    from prefill_worker.worker import PrefillWorker
    from twinstage.hosting.assemble import build_engine
    from twinstage.transfer.sender import ChannelTimeouts, KvSender

    parts, description = build_engine(settings, found, role=Role.PREFILL, protocol_version=PROTOCOL_VERSION)
    sender = KvSender(
        parts.memory,
        kv_identity(description),
        secret=secret,
        transports=settings.transports,
        timeouts=ChannelTimeouts.of_lease(settings.lease),
        tls=tls,
    )
    return lambda loop: PrefillWorker(
        parts,
        sender=sender,
        description=description,
        tokenizer_bundle=found.bundle.to_bytes(),
        loop=loop,
    )


if __name__ == "__main__":
    sys.exit(main())
