"""A router with its real gRPC server, over workers without a model, and what tests of its services share."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc

from fake_workers import FakeCluster, make_bundle, make_model, make_vector, until
from router.__main__ import Router
from router.config import RouterSettings
from twinstage.settings import read_settings
from twinstage.types import Task
from twinstage.v1 import admin_pb2_grpc, embedding_pb2_grpc, generation_pb2_grpc

MAX_INPUT_TOKENS = 12


@dataclass
class Service:
    router: Router
    generators: FakeCluster
    embedders: FakeCluster
    channel: grpc.aio.Channel

    @property
    def generation(self) -> Any:
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @property
    def embedding(self) -> Any:
        return embedding_pb2_grpc.EmbeddingServiceStub(self.channel)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.AdminServiceStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)


@contextlib.asynccontextmanager
async def serving(
    *flags: str, prefill: int = 1, decode: int = 1, embed: int = 1, wait: bool = True
) -> AsyncIterator[Service]:
    bundle = make_bundle(max_input_tokens=MAX_INPUT_TOKENS)
    embedding_model = make_model(name="embedder", task=Task.EMBED, bundle=bundle)
    async with (
        FakeCluster(prefill=prefill, decode=decode) as generators,
        FakeCluster(prefill=embed, decode=0, model=embedding_model, bundle=bundle, prefix="embed-") as embedders,
    ):
        addresses = [*generators.addresses, *embedders.addresses] or ["127.0.0.1:1"]
        workers = [argument for address in addresses for argument in ("--workers", address)]
        settings = read_settings(
            RouterSettings, ["--listen", "127.0.0.1:0", "--report-interval", "0.3", *workers, *flags]
        )
        router = Router(settings)
        await router.start()
        try:
            if wait:
                await until(lambda: all(entry.life and entry.life.load for entry in router.workers.entries), what="all")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
                yield Service(router, generators, embedders, channel)
            await generators.assert_idle()
            await embedders.assert_idle()
        finally:
            await router.stop()


def details(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """google.rpc details of a failed call by message name."""
    metadata = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in (
            error_details_pb2.BadRequest,
            error_details_pb2.ErrorInfo,
            error_details_pb2.ResourceInfo,
            error_details_pb2.RetryInfo,
        ):
            message = kind()
            if packed.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


async def failing(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


# --- embedding ------------------------------------------------------------------------------------


def floats(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def vector_of(text: str, *, normalize: bool) -> list[float]:
    bundle_ids = ids_of(text)
    return floats(make_vector(bundle_ids, normalize=normalize))


def ids_of(text: str) -> list[int]:
    from twinstage.text.tokenizer import TextTokenizer

    return TextTokenizer(make_bundle()).encode(text)
