"""The connection of the asyncio client: a channel and its stubs, opened by the first call.

gRPC binds a channel to the event loop in which it is made, while a client may be made before there is any.
"""

from __future__ import annotations

from typing import Any

import grpc.aio

from twinstage.client.channel import CHANNEL_OPTIONS
from twinstage.rpc.access import Access
from twinstage.v1 import (
    admin_pb2_grpc,
    embedding_pb2_grpc,
    generation_pb2_grpc,
    model_pb2_grpc,
    scoring_pb2_grpc,
    tokenizer_pb2_grpc,
)


class AioStubs:
    """The stubs of every service at an address. The generated ones are typed for blocking channels, so they are Any."""

    def __init__(self, address: str, access: Access) -> None:
        self._address = address
        self._access = access
        self._channel: grpc.aio.Channel | None = None
        self._stubs: dict[type, Any] = {}
        self._is_closed = False

    @property
    def generation(self) -> Any:
        return self._stub(generation_pb2_grpc.GenerationServiceStub)

    @property
    def embedding(self) -> Any:
        return self._stub(embedding_pb2_grpc.EmbeddingServiceStub)

    @property
    def scoring(self) -> Any:
        return self._stub(scoring_pb2_grpc.ScoringServiceStub)

    @property
    def tokenizer(self) -> Any:
        return self._stub(tokenizer_pb2_grpc.TokenizerServiceStub)

    @property
    def models(self) -> Any:
        return self._stub(model_pb2_grpc.ModelServiceStub)

    @property
    def admin(self) -> Any:
        return self._stub(admin_pb2_grpc.AdminServiceStub)

    def _stub(self, kind: type) -> Any:
        """Raises RuntimeError once closed."""
        if self._is_closed:
            raise RuntimeError("the client is closed")
        if self._channel is None:
            self._channel = self._access.open_aio(self._address, CHANNEL_OPTIONS)
        if kind not in self._stubs:
            self._stubs[kind] = kind(self._access.authorized(self._channel))
        return self._stubs[kind]

    async def close(self) -> None:
        """End the connection and every call on it. Idempotent."""
        self._is_closed = True
        if self._channel is not None:
            await self._channel.close(None)
