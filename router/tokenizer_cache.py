"""The tokenizers of all models, fetched once from whichever worker has them."""

from __future__ import annotations

import asyncio

from twinstage.errors import HandshakeRefused, ModelError
from twinstage.rpc.clients import WorkerConnection
from twinstage.text.bundle import TokenizerBundle
from twinstage.text.tokenizer import TextTokenizer

BUNDLE_TIMEOUT_S = 30.0


class TokenizerCache:
    """Tokenizers by the fingerprint of their bundle."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, TextTokenizer] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def get(self, connection: WorkerConnection, fingerprint: str) -> TextTokenizer:
        """The tokenizer with this fingerprint, fetched over `connection` when it is new.

        Raises HandshakeRefused when the worker sends something else, and what the connection raises.
        """
        async with self._locks.setdefault(fingerprint, asyncio.Lock()):
            if fingerprint not in self._tokenizers:
                data = await connection.tokenizer_bundle(fingerprint, timeout_s=BUNDLE_TIMEOUT_S)
                self._tokenizers[fingerprint] = await asyncio.to_thread(_read, data, fingerprint)
            return self._tokenizers[fingerprint]


def _read(data: bytes, fingerprint: str) -> TextTokenizer:
    try:
        bundle = TokenizerBundle.from_bytes(data)
        if bundle.fingerprint != fingerprint:
            raise HandshakeRefused(f"sent tokenizer bundle {bundle.fingerprint} in the place of {fingerprint}")
        return TextTokenizer(bundle)
    except ModelError as error:
        raise HandshakeRefused(f"sent a tokenizer bundle that cannot be read: {error}") from error
