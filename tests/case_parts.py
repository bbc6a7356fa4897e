"""What tests of the cases share: the pair that they run on, hand-made senders to it, and what a good request gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from harness import ProcessCluster, RoleProcess
from small_router import SmallRouter, expected_of, small_router, spec_of
from transfer_ends import RawSender
from twinstage.engine.llm import LLM
from twinstage.types import KvGrant, RequestId, SequenceSpec, WorkerDescription

BLOCK_TOKENS = 16
BLOCK_BYTES = BLOCK_TOKENS * 2 * 2 * 2 * 16 * 4  # tokens x layers x key and value x kv heads x dimensions x bytes
POOL_BLOCKS = 128
MAX_MODEL_LEN = 512
FLAGS = ("--kv-cache-bytes", str(POOL_BLOCKS * BLOCK_BYTES), "--weights", "fp32", "--max-tokens-per-step", "64")


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePair:
    """A prefill and a decode worker that know one transport only; to the router, it is the name of their model."""

    transport: str
    prefill: RoleProcess
    decode: RoleProcess
    cluster: ProcessCluster

    @asynccontextmanager
    async def router(self) -> AsyncIterator[SmallRouter]:
        """A small router of this pair. At the end both hold nothing, and the processes are those of the start."""
        async with small_router([self.prefill, self.decode]) as router:
            yield router
            await router.all_blocks_free()
        assert self.prefill.process.poll() is None
        assert self.decode.process.poll() is None


@contextmanager
def raw_sender(grant: KvGrant, decode: WorkerDescription, **who: object) -> Iterator[RawSender]:
    """A hand-made sender, connected to the worker that gave the grant, and as a worker of its kind unless `who`."""
    identity = {"layout": decode.kv_layout_fingerprint, "protocol_version": decode.protocol_version, **who}
    sender = RawSender(grant, block_bytes=decode.kv_block_bytes, secret=None, **identity)
    try:
        yield sender
    finally:
        sender.close()


async def check_next_is_right(router: SmallRouter, reference: LLM, name: str) -> None:
    """An ordinary request on the same workers gives what it should."""
    spec = spec_of(name, 50)
    tokens, finish = expected_of(reference, spec)
    generation = await router.generate(spec)
    assert (generation.token_ids, generation.finish) == (tuple(token.token_id for token in tokens), finish)


def named(spec: SequenceSpec, name: str) -> SequenceSpec:
    """The same request by another name."""
    return replace(spec, request_id=RequestId(name))
