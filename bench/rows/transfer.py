"""KV blocks over the channel between two processes, as a share of what memcpy reaches for the same bytes.

The time goes from the offer to the acknowledgement; checksums are computed at both ends and compared. memcpy copies
from and to memory that was used before, in one thread.
"""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import Any

import numpy as np

from bench.engines.client import EngineProcess
from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.summary import ratios
from twinstage.errors import InternalError
from twinstage.kv.memory import BlockMemory
from twinstage.transfer.sender import HandoverCommit, HandoverDone, KvIdentity, KvSender, TransferOutcome
from twinstage.types import KvEndpoint, KvGrant, RequestId, WorkerId

_BLOCK_BYTES = 737_280  # 16 tokens of SmolLM2-135M in float32
_BLOCKS = 128  # 2,048 tokens
_TARGETS = {"shm": 0.85, "tcp": 0.35}
_RESULT_S = 60.0
_IDENTITY = KvIdentity(worker_id=WorkerId("prefill"), epoch=1, layout_fingerprint="bench", protocol_version=1)
_IN_ROUND = 3  # transfers of a round; the fastest counts, as for memcpy


def measure(context: Context) -> RowResult:
    receiver = context.engines.start("kv_receiver", blocks=str(_BLOCKS), block_bytes=str(_BLOCK_BYTES))
    memory = BlockMemory.create(num_blocks=_BLOCKS, block_bytes=_BLOCK_BYTES)
    source = np.frombuffer(memory.view(), dtype=np.uint8)
    source[:] = np.random.default_rng(7).integers(0, 256, source.size, dtype=np.uint8)
    target = np.ones_like(source)
    sender = KvSender(memory, _IDENTITY, secret=None)
    seconds: dict[str, list[float]] = {name: [] for name in ("memcpy", *_TARGETS)}
    try:
        for round_number in range(-1, context.rounds):
            context.progress(f"transfer, round {round_number + 1}")
            copied = min(_copy(source, target) for _ in range(_IN_ROUND))
            sent = {name: min(_transfer(sender, receiver, name) for _ in range(_IN_ROUND)) for name in _TARGETS}
            if round_number >= 0:
                for name, value in (("memcpy", copied), *sent.items()):
                    seconds[name].append(value)
    finally:
        sender.close()
        del source
        memory.close()
    return result_of(seconds)


def result_of(seconds: dict[str, list[float]]) -> RowResult:
    """`seconds` of memcpy and each transport, a value per round."""
    num_bytes = _BLOCKS * _BLOCK_BYTES
    case = f"{num_bytes / 1e6:.0f} MB"
    return RowResult(
        measurements=[
            Measurement(
                case=case,
                engine=name,
                quantity="copying",
                unit="GB/s",
                values=[num_bytes / 1e9 / value for value in values],
            )
            for name, values in seconds.items()
        ],
        comparisons=[
            Comparison(
                case=case,
                what=f"{name}, share of memcpy",
                values=ratios(seconds["memcpy"], seconds[name]),
                target=Target.at_least(target),
            )
            for name, target in _TARGETS.items()
        ],
    )


def _copy(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> float:
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


def _transfer(sender: KvSender, receiver: EngineProcess, transport: str) -> float:
    grant = _grant_from(receiver.call("grant", transport=transport)["grant"])
    outcomes: SimpleQueue[TransferOutcome] = SimpleQueue()
    started_s = time.perf_counter()
    transfer = sender.open(grant, outcomes.put)
    transfer.write(range(_BLOCKS), 0)
    transfer.commit(HandoverCommit(request_id=RequestId("bench"), num_tokens=16 * _BLOCKS, first_tokens=((0, 1),)))
    outcome = outcomes.get(timeout=_RESULT_S)
    taken_s = time.perf_counter() - started_s
    if not isinstance(outcome, HandoverDone) or outcome.transport != transport:
        raise InternalError(f"the transfer over {transport} did not succeed: {outcome}")
    return taken_s


def _grant_from(document: dict[str, Any]) -> KvGrant:
    return KvGrant(
        **{
            **document,
            "token": bytes.fromhex(document["token"]),
            "block_ids": tuple(document["block_ids"]),
            "endpoints": tuple(KvEndpoint(**endpoint) for endpoint in document["endpoints"]),
        }
    )


ROW = Row(name="transfer", title="Transfer of KV blocks", measure=measure, limit_s=120)
