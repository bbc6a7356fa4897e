"""C14: a prefill worker of another kind or release is refused at the handshake, and both are told why.

That the tokens of the pairs which fit are those of one process is test_equality.py's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from case_parts import BLOCK_TOKENS, CasePair, check_next_is_right, raw_sender
from fake_workers import until
from harness import ProcessCluster
from router.__main__ import Router
from router.config import RouterSettings
from small_router import spec_of
from twinstage.engine.llm import LLM
from twinstage.errors import HandshakeRefused
from twinstage.kv.layout import KvLayout
from twinstage.rpc.protocol import PROTOCOL_VERSION
from twinstage.settings import read_settings
from twinstage.transfer import frames
from twinstage.types import KvGrant, WorkerDescription
from twinstage.v1 import admin_pb2, admin_pb2_grpc

pytestmark = pytest.mark.xdist_group("cases")


def layout(**changes: object) -> str:
    same = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "block_size": BLOCK_TOKENS, "dtype": "float32"}
    return KvLayout(**{**same, "model_fingerprint": "a revision", **changes}).fingerprint  # type: ignore[arg-type]


OTHERS = {
    "layout": {"layout": layout(num_kv_heads=4)},
    "dtype": {"layout": layout(dtype="bfloat16")},
    "block size": {"layout": layout(block_size=32)},
    "model revision": {"layout": layout(model_fingerprint="another revision")},
    "older prefill worker": {"protocol_version": PROTOCOL_VERSION - 1},
    "newer prefill worker": {"protocol_version": PROTOCOL_VERSION + 1},
}


async def test_a_prefill_worker_of_another_kind_is_refused_by_name(case_pair: CasePair, quick_reference: LLM) -> None:
    async with case_pair.router() as router:
        description = await router.decode.describe(timeout_s=5.0)
        spec = spec_of("c14", 40)
        with router.session.subscribe(spec.request_id):
            grant, _ = await router.session.reserve(spec, deadline_s=30.0)
            assert len({str(who) for who in OTHERS.values()}) == len(OTHERS)
            for kind, who in OTHERS.items():
                message = await asyncio.to_thread(_refusal, grant, description, who)
                words = "speaks protocol version" if "worker" in kind else "KV layouts differ"
                assert words in message, kind
                assert str(who.get("protocol_version", who.get("layout"))) in message, kind
        await check_next_is_right(router, quick_reference, "c14-after")


@pytest.mark.parametrize("change", [-1, 1], ids=["older", "newer"])
async def test_frames_of_another_version_are_refused_by_name(
    case_pair: CasePair, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver's refusal is a frame of its own version, and so names both when the sender reads it."""
    ours = frames.FORMAT_VERSION
    async with case_pair.router() as router:
        description = await router.decode.describe(timeout_s=5.0)
        spec = spec_of("c14-frames", 40)
        with router.session.subscribe(spec.request_id):
            grant, _ = await router.session.reserve(spec, deadline_s=30.0)
            monkeypatch.setattr(frames, "FORMAT_VERSION", ours + change)
            message = await asyncio.to_thread(_refusal, grant, description, {})
            assert f"speaks format version {ours} of the KV channel, this is {ours + change}" in message


@pytest.mark.parametrize("change", [-1, 1], ids=["older router", "newer router"])
async def test_a_router_of_another_release_uses_no_worker_and_says_why(
    case_cluster: ProcessCluster, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round, with a worker of another release, it is test_drain.py's."""
    monkeypatch.setattr("router.workers.PROTOCOL_VERSION", PROTOCOL_VERSION + change)
    addresses = [role.address for role in case_cluster.processes if role.name != "router"]
    flags = [argument for address in addresses for argument in ("--workers", address)]
    router = Router(read_settings(RouterSettings, ["--listen", "127.0.0.1:0", *flags]))
    await router.start()
    try:
        await until(lambda: all(entry.refusal for entry in router.workers.entries), what="all are refused")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
            workers = (await stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=5)).workers
    finally:
        await router.stop()
    assert {worker.id for worker in workers} == {role.name for role in case_cluster.processes if role.name != "router"}
    for worker in workers:
        assert worker.state == admin_pb2.WORKER_STATE_REFUSED
        assert f"speaks version {PROTOCOL_VERSION} of the worker protocol" in worker.detail
        assert f"this router speaks {PROTOCOL_VERSION + change}" in worker.detail


def _refusal(grant: KvGrant, description: WorkerDescription, who: dict[str, object]) -> str:
    with pytest.raises(HandshakeRefused) as caught, raw_sender(grant, description, **who):
        pass
    return str(caught.value)
