"""One request on a prefill worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from prefill_worker.events import PrefillEvent
from prefill_worker.handoff import Handoff
from twinstage.lifecycle import Lifecycle, PrefillPhase, prefill_lifecycle
from twinstage.types import RequestId, SequenceSpec


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """One request on its way through the worker. `key` is its name in the engine, unique even when a client retries."""

    key: RequestId
    spec: SequenceSpec
    handoff: Handoff | None = None
    lifecycle: Lifecycle[PrefillPhase] = field(default_factory=prefill_lifecycle)
    events: asyncio.Queue[PrefillEvent | None] = field(default_factory=asyncio.Queue)  # at most two, then None
    transfer_open: bool = False
    in_engine: bool = False
