"""What tests of the KV channel share that speak to a receiver frame by frame, as no sender of ours would."""

from __future__ import annotations

import pytest
import xxhash

from transfer_ends import Ends, RawSender, commit_of
from twinstage.transfer.sender import HandoverDone
from twinstage.types import KvGrant

BOTH = pytest.mark.parametrize("transport", ["shm", "tcp"])
ALL = pytest.mark.parametrize("transport", ["shm", "tcp", "tls"])
BLOCK = 4096


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def assert_untouched(ends: Ends) -> None:
    assert all(bytes(ends.target.block(index)) == bytes(BLOCK) for index in range(ends.target.num_blocks))


def assert_channel_works(ends: Ends, block_id: int = 15) -> None:
    """A new transfer by the ordinary sender still goes through."""
    grant = ends.grant((block_id,))
    ends.receiver.expect(grant)
    transfer = ends.sender.open(grant, ends.results.callback(grant.transfer_id))
    transfer.write([3], 0)
    transfer.commit(commit_of(grant.transfer_id))
    assert isinstance(ends.results.wait(grant.transfer_id), HandoverDone)
    assert ends.target.block(block_id) == ends.source.block(3)


class raw_grant:  # noqa: N801 - a context manager
    """A grant that a hand-made sender has opened."""

    def __init__(self, ends: Ends, blocks: tuple[int, ...], **grant: int) -> None:
        self.grant = ends.grant(blocks, **grant)
        ends.receiver.expect(self.grant)
        self.sender = RawSender(self.grant, block_bytes=ends.target.block_bytes)

    def __enter__(self) -> tuple[KvGrant, RawSender]:
        self.sender.open(self.grant)
        return self.grant, self.sender

    def __exit__(self, *error: object) -> None:
        self.sender.close()
