"""The scopes of one attempt: who is to blame when it fails, and what is given back when it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from router.ledger import Placement
from router.placement import WorkerKey
from router.worker_entry import WorkerLife
from twinstage.errors import DeadlineExceeded, Draining, TransferError, TwinstageError, WorkerLost
from twinstage.rpc.clients import DecodeSubscription, Reservation
from twinstage.types import KvGrant, SequenceSpec

Result = TypeVar("Result")

# From the end of a transfer on one worker until the other one must have said why it ended.
SENDERS_WORD_S = 2.0
RECEIVERS_WORD_S = 0.5


@dataclass(frozen=True, slots=True)
class Receiver:
    """The decode worker that waits for a hand-over from `sender`."""

    sender: WorkerLife
    worker: WorkerLife
    reservation: Reservation
    subscription: DecodeSubscription
    placement: Placement  # what the ledger counts for it
    num_choices: int

    async def granted(self) -> tuple[KvGrant, float]:
        """The grant, and the seconds that the request waited for blocks. Raises AttemptFailed."""
        with blaming(self.worker.key):
            grant, queue_s = await self.reservation.granted()
        # Those that the worker had already are not this request's alone; of the last one, each choice has its own.
        self.placement.granted(len(grant.block_ids) + self.num_choices - 1)
        return grant, queue_s

    @contextlib.asynccontextmanager
    async def unless_broken(self) -> AsyncIterator[None]:
        """A block that ends with AttemptFailed when the decode worker fails the request meanwhile.

        A sender that gives a transfer up says so to the decode worker and, with the reason, to the router. The reason
        may be that the first token was also the last one, so it is waited for when the decode worker's word is first.
        """
        errors: list[TwinstageError] = []

        def end(error: TwinstageError) -> None:
            errors.append(error)
            # Near a deadline that is what a decode worker calls a transfer that ended.
            is_of_transfer = isinstance(error, TransferError | DeadlineExceeded)
            patience_s = SENDERS_WORD_S if is_of_transfer else 0.0
            scope.reschedule(asyncio.get_running_loop().time() + patience_s)

        try:
            async with asyncio.timeout(None) as scope:
                with self.subscription.hearing_failure(end):
                    yield
        except TimeoutError:
            if not scope.expired():
                raise
            with blaming(self.worker.key, self.sender.key):
                raise errors[0] from None

    async def explained(self, work: Awaitable[Result]) -> Result:
        """What `work` of the sender returns. Raises AttemptFailed of whoever broke the transfer.

        To the sender, a decode worker that gives up is a transfer that failed; the decode worker itself says why.
        """
        try:
            with blaming(self.sender.key, self.worker.key):
                return await work
        except AttemptFailed as failed:
            if isinstance(failed.error, TransferError):
                await self._reason_of_its_own()
            raise

    async def _reason_of_its_own(self) -> None:
        """Raises AttemptFailed when the decode worker soon says that it failed by something else than the transfer."""
        with blaming(self.worker.key), contextlib.suppress(TimeoutError, TransferError, DeadlineExceeded):
            async with asyncio.timeout(RECEIVERS_WORD_S):
                await self.subscription.broken()


async def unless_broken(work: Awaitable[Result], receiver: Receiver | None) -> Result:
    """What `work` of the prefill worker returns, unless its transfer to `receiver` fails. Raises AttemptFailed then."""
    if receiver is None:
        return await work
    async with receiver.unless_broken():
        return await receiver.explained(work)


class AttemptFailed(Exception):
    """An attempt ended with an error that another one may not meet; `workers` may be at fault."""

    def __init__(self, error: TwinstageError, workers: frozenset[WorkerKey]) -> None:
        super().__init__(str(error))
        self.error = error
        self.workers = workers

    @property
    def is_final(self) -> bool:
        """Whether the workers are gone for this request, rather than having failed it once."""
        return isinstance(self.error, WorkerLost | Draining)


@contextlib.contextmanager
def blaming(worker: WorkerKey, peer: WorkerKey | None = None) -> Iterator[None]:
    """Turn an error that a retry may cure into AttemptFailed of `worker`; a transfer may have failed by its peer."""
    try:
        yield
    except TwinstageError as error:
        if not error.retryable:
            raise
        at_fault = [worker, peer] if isinstance(error, TransferError) and peer is not None else [worker]
        raise AttemptFailed(error, frozenset(at_fault)) from error


@contextlib.contextmanager
def stand_by(
    decode: WorkerLife | None, spec: SequenceSpec, *, sender: WorkerLife, deadline_s: float
) -> Iterator[Receiver | None]:
    """A place on the decode worker, which is asked for blocks. Leaving it ends whatever the request still has there."""
    if decode is None:
        yield None
        return
    assert decode.session is not None
    blocks = decode.candidate().blocks_for(len(spec.prompt_token_ids) + len(spec.resumed_token_ids))
    with (
        decode.ledger.placed(sequences=spec.num_choices, blocks=blocks + spec.num_choices - 1) as placement,
        decode.session.subscribe(spec.request_id) as subscription,
        contextlib.ExitStack() as stack,
    ):
        with blaming(decode.key):
            reservation = stack.enter_context(decode.session.reserving(spec, deadline_s=deadline_s))
        yield Receiver(sender, decode, reservation, subscription, placement, spec.num_choices)
