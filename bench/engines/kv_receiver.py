"""The receiving end of a KV channel on command: `python -m bench.engines.kv_receiver BLOCKS BLOCK_BYTES`.

grant              -> {"grant": {...}}   room for all blocks, by both transports
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bench.engines.protocol import Handler, serve
from twinstage.errors import TransferError
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.receiver import HandoverCommit, KvIdentity, KvReceiver, ReceivedBlocks
from twinstage.types import KvGrant, WorkerId

IDENTITY = KvIdentity(worker_id=WorkerId("decode"), epoch=1, layout_fingerprint="bench", protocol_version=1)


class _Delegate:
    """The sender is told of the result, and nobody else wants to know it."""

    def opened(self, transfer_id: int) -> None:
        pass

    def committed(self, transfer_id: int, commit: HandoverCommit, received: ReceivedBlocks) -> None:
        pass

    def failed(self, transfer_id: int, error: TransferError) -> None:
        print(f"transfer {transfer_id}: {error}", file=sys.stderr)


class Receiver:
    """Answers the commands."""

    def __init__(self, num_blocks: int, block_bytes: int, directory: Path) -> None:
        self._memory = BlockMemory.create(num_blocks=num_blocks, block_bytes=block_bytes)
        np.frombuffer(self._memory.view(), dtype=np.uint8)[:] = 1  # a worker's pool has been used before
        self._ids = itertools.count(1)
        self._receiver = KvReceiver(
            self._memory,
            IDENTITY,
            secret=None,
            delegate=_Delegate(),
            shm_directory=directory,
            tcp_listen=("127.0.0.1", 0),
        )
        self._receiver.start()

    def describe(self) -> dict[str, Any]:
        return {"name": "KV receiver", "versions": {}}

    def grant(self, transport: str) -> dict[str, Any]:
        transfer_id = next(self._ids)
        grant = KvGrant(
            worker_id=IDENTITY.worker_id,
            epoch=IDENTITY.epoch,
            transfer_id=transfer_id,
            generation=transfer_id,
            token=os.urandom(32),
            block_ids=tuple(range(self._memory.num_blocks)),
            layout_fingerprint=IDENTITY.layout_fingerprint,
            endpoints=tuple(endpoint for endpoint in self._receiver.endpoints if endpoint.transport == transport),
            lease_s=60.0,
        )
        self._receiver.expect(grant)
        return {"grant": {**asdict(grant), "token": grant.token.hex()}}


def load() -> dict[str, Handler]:
    directory = tempfile.mkdtemp(prefix="kv", dir="/tmp")  # a socket's path must be short
    receiver = Receiver(int(sys.argv[1]), int(sys.argv[2]), Path(directory))
    return {"describe": receiver.describe, "grant": receiver.grant}


if __name__ == "__main__":
    serve(load)
