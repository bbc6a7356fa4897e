"""C19: SIGTERM for a prefill worker whose prompt is computed and not yet handed over: the request completes first."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from case_parts import BLOCK_BYTES, FLAGS, CasePair
from kv_link import KvLink
from small_router import expected_of, small_router, spec_of
from twinstage.engine.llm import LLM
from twinstage.errors import Draining

pytestmark = pytest.mark.xdist_group("cases")

LIMIT_S = 20.0


async def test_a_prefill_worker_ends_after_its_transfers(
    case_pair: CasePair, quick_model: Path, quick_reference: LLM
) -> None:
    """That new requests go elsewhere is test_rolling_restart.py's; here they are told to."""
    transport, cluster = case_pair.transport, case_pair.cluster
    flags = ("--kv-transports", transport, "--served-model-name", transport, "--drain-timeout", str(LIMIT_S), *FLAGS)
    prefill = cluster.launch_worker("prefill", str(quick_model), *flags, name=f"prefill-c19-{transport}")
    await asyncio.to_thread(cluster.wait_ready, prefill)
    with KvLink(transport, block_bytes=BLOCK_BYTES) as link:
        async with small_router([prefill, case_pair.decode]) as router:
            router.through = link.through
            spec = spec_of("c19", 200, max_tokens=20)
            tokens, _ = expected_of(quick_reference, spec)
            link.hold()
            with router.session.subscribe(spec.request_id) as subscription:
                grant, _ = await router.session.reserve(spec, deadline_s=30.0)
                with router.prefill.prefill(spec, link.through(grant), timeout_s=30.0) as call:
                    first = await call.first_token()
                    prefill.send(signal.SIGTERM)
                    told_s = time.monotonic()
                    async with asyncio.timeout(10):
                        async for load in router.prefill.watch_load(interval_s=1.0):
                            if load.draining:
                                break
                    assert load.unfinished == 1
                    late = spec_of("c19-late", 10, max_tokens=1)
                    with router.prefill.prefill(late, None, timeout_s=5.0) as refused, pytest.raises(Draining):
                        await refused.first_token()
                    await asyncio.sleep(0.2)
                    assert prefill.process.poll() is None, "it ended before its transfer"
                    link.run_free()
                    await call.handed_over()
                token_ids = [token.token_id for token in first.chunks[0].tokens]
                finish = None
                while finish is None:
                    update = await subscription.receive()
                    (chunk,) = update.chunks
                    token_ids += [token.token_id for token in chunk.tokens]
                    finish = chunk.finish
            assert token_ids == [token.token_id for token in tokens]
            assert await asyncio.to_thread(prefill.stop) == 0, prefill.log_tail()
            assert time.monotonic() - told_s < LIMIT_S
    cluster.processes.remove(prefill)
    stopped = [event for event in prefill.events() if event.get("event") == "worker stopped"]
    assert [event["leaked_blocks"] for event in stopped] == [0]
