"""One request on a decode worker, what its router is told when it is over, and the books of all requests."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field

from decode_worker.sessions import SequenceTotals, Session
from twinstage.engine.choices import choice_id
from twinstage.engine.sequence import SequenceStats
from twinstage.errors import DeadlineExceeded, TwinstageError
from twinstage.kv.block_pool import BlockTable
from twinstage.lifecycle import DecodePhase, Lifecycle, decode_lifecycle
from twinstage.types import KvGrant, RequestId, SequenceSpec

DEADLINE_MARGIN_S = 0.1  # by which the deadline may be over earlier on another process


@dataclass(slots=True, kw_only=True, eq=False)
class DecodeRequest:
    """One request on this worker. `key` is its name in the engine, unique even when a router retries."""

    key: RequestId
    spec: SequenceSpec
    session: Session
    table: BlockTable
    grant: KvGrant
    lease: asyncio.TimerHandle
    deadline_s: float  # monotonic; the request's own
    lifecycle: Lifecycle[DecodePhase] = field(default_factory=decode_lifecycle)
    kv_bytes_received: int = 0
    names: tuple[RequestId, ...] = ()  # of its choices in the engine
    running: set[int] = field(default_factory=set)  # choices that have not ended, as far as is known
    finished: list[SequenceStats] = field(default_factory=list)  # of choices that ended by themselves

    def __post_init__(self) -> None:
        self.names = tuple(choice_id(self.key, index) for index in range(self.spec.num_choices))
        self.running = set(range(self.spec.num_choices))


def totals_of(request: DecodeRequest) -> SequenceTotals:
    """What the router is told of a request of which the last choice has finished."""
    return SequenceTotals(
        request_id=request.spec.request_id,
        queue_s=max(stats.queue_s for stats in request.finished),
        decode_s=max(stats.decode_s for stats in request.finished),
        kv_bytes_received=request.kv_bytes_received,
        computed_prompt_tokens=sum(stats.computed_prompt_tokens for stats in request.finished),
        proposed_draft_tokens=sum(stats.proposed_draft_tokens for stats in request.finished),
        accepted_draft_tokens=sum(stats.accepted_draft_tokens for stats in request.finished),
    )


def blamed(request: DecodeRequest, error: TwinstageError) -> TwinstageError:
    """What ended a hand-over: its error, unless the request's deadline is over; then router and sender give up, too."""
    if time.monotonic() < request.deadline_s - DEADLINE_MARGIN_S:
        return error
    return DeadlineExceeded(f"the request's deadline came before its KV blocks: {error}")


class RequestBook:
    """The requests of a worker while they live, and those that ended while somebody may still touch their blocks."""

    def __init__(self) -> None:
        self._live: dict[RequestId, DecodeRequest] = {}
        self._choices: dict[RequestId, tuple[DecodeRequest, int]] = {}  # by name in the engine
        self._expected: dict[int, DecodeRequest] = {}  # by transfer, until it is committed
        self._freeing: dict[int, tuple[RequestId, ...]] = {}  # names that hold blocks, by number
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._live) + len(self._freeing)

    def knows(self, owner: str) -> bool:
        """Whether blocks may be held in this name."""
        return owner in self._live or owner in self._choices or any(owner in names for names in self._freeing.values())

    def enter(self, request: DecodeRequest) -> None:
        """A request whose blocks were granted."""
        self._live[request.key] = request
        self._choices |= {name: (request, index) for index, name in enumerate(request.names)}
        self._expected[request.grant.transfer_id] = request

    def get(self, key: RequestId) -> DecodeRequest | None:
        """The live request of that name."""
        return self._live.get(key)

    def choice(self, name: RequestId) -> tuple[DecodeRequest, int] | None:
        """The live request, and which of its choices the engine knows by `name`."""
        return self._choices.get(name)

    def live(self, session: Session | None = None) -> list[DecodeRequest]:
        """All live requests, or those of one session."""
        return [request for request in self._live.values() if session in (None, request.session)]

    def expected(self, transfer_id: int) -> DecodeRequest | None:
        """The live request that waits for this transfer."""
        return self._expected.get(transfer_id)

    def committed(self, transfer_id: int) -> DecodeRequest | None:
        """The transfer is complete; returns its request if that lives."""
        return self._expected.pop(transfer_id, None)

    def end(self, request: DecodeRequest) -> None:
        """The request lives no more."""
        del self._live[request.key]
        for name in request.names:
            self._choices.pop(name, None)
        self._expected.pop(request.grant.transfer_id, None)

    def end_choice(self, request: DecodeRequest, index: int) -> None:
        """One choice of a request lives no more."""
        request.running.discard(index)
        self._choices.pop(request.names[index], None)

    def hold(self, names: tuple[RequestId, ...]) -> int:
        """Somebody may still touch the blocks of what ends by these names, until the number returned is `freed`."""
        number = next(self._numbers)
        self._freeing[number] = names
        return number

    def freed(self, number: int) -> None:
        self._freeing.pop(number, None)
