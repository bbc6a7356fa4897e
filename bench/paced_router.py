"""A router on workers that compute nothing (`bench/engines/paced_workers.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from bench.engines.client import EngineProcess
from twinstage.cli.child import Child
from twinstage.client import AsyncTwinstageClient
from twinstage.errors import InternalError

_READY_S = 60.0
_MANY_ROWS = 512  # sequences that a decode worker serves at once, unless told otherwise


@contextmanager
def paced_router(
    workers: EngineProcess, *, decode: int, interval_ms: float, rows: int = _MANY_ROWS, flags: Sequence[str] = ()
) -> Iterator[tuple[int, str, str]]:
    """A router with `flags` on one prefill and some decode workers.

    Gives its process id, its address, and the address of the prefill worker. A decode worker makes a token every
    `interval_ms` for each of its first `rows` sequences.
    """
    started = workers.call("start", prefill=1, decode=decode, interval_ms=interval_ms, rows=rows)
    addresses = [part for address in started["addresses"] for part in ("--workers", address)]
    child = Child("router", "router", ["--listen", "127.0.0.1:0", *addresses, *flags], ready_event="router ready")
    ready: SimpleQueue[bool] = SimpleQueue()
    child.read_log(
        log_path=None,
        on_line=lambda *_: None,
        on_ready=lambda _: ready.put(True),
        on_exit=lambda _: ready.put(False),
    )
    try:
        if not ready.get(timeout=_READY_S):
            raise InternalError(child.end_in_words())
        asyncio.run(_until_connected(child.address, 1 + decode))
        yield child.pid, child.address, started["prefill_address"]
    finally:
        child.send(15)
        if not child.join(20):
            child.send(9)
            child.join(20)
        workers.call("stop")


async def _until_connected(address: str, count: int) -> None:
    async with asyncio.timeout(_READY_S), AsyncTwinstageClient(address) as client:
        while sum(worker.state == "ready" for worker in await client.workers()) < count:  # noqa: ASYNC110 - over RPC
            await asyncio.sleep(0.05)
