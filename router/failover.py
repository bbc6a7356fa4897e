"""Failover: what a request has gone through, and whether, where and when it is tried again.

    Attempts    of one request: its failures, whom it does not go back to, and the error that it ends with
    Probation   of the router: suspects compute one at a time, so that the next death of a worker names its cause
    Trial       one attempt: on which workers it may be what kills them

A request that is there when a worker dies may be the reason for it, and so may be everyone else who was there. All of
them become suspects and are tried again, but one after the other, until each has come past the point at which its
worker died: an innocent one needs a prefill and a token for that. A turn begins when everything is there that the
prefill needs, so nobody keeps others waiting while it waits itself. When a worker dies of a suspect that was alone, and
it is not its first one of that role, the request is poison. It is refused, and nobody else is. A death is a connection
that ended or a worker that fell silent; a router cannot tell a network's failure from it, which is why one is no proof.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from router.attempt import AttemptFailed
from router.backoff import Backoff
from router.placement import NEVER_FITS, Pair, Refusal, WorkerKey
from router.workers import WorkerTable
from twinstage.errors import KvExhausted, NoWorker, PoisonedRequest, StreamBroken, TwinstageError, WorkerLost
from twinstage.telemetry.log import get_logger
from twinstage.types import RequestId, Role, WorkerId

MAX_DEAD = 256
PROBATION_WAIT_S = 5.0  # then a suspect goes on beside another one that takes so long

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverPolicy:
    """What the operator chose.

    `worker_wait_s`: how long a request that failed waits for a worker to come back when there is no other one, and
    `resume_wait_s` once its client has tokens, which it cannot ask for again.
    """

    max_attempts: int = 3
    poison_limit: int = 2
    worker_wait_s: float = 1.0
    resume_wait_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Turns:
    """Of the suspects of one model. `computing`: those that compute, in their turn or tired of waiting for it.

    `dead`: lives of workers that ended while somebody computed there, the latest ones.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    computing: set[Trial] = field(default_factory=set)
    dead: deque[WorkerKey] = field(default_factory=lambda: deque(maxlen=MAX_DEAD))


@dataclass(slots=True, eq=False)
class Trial:
    """One attempt, while it lasts. `is_alone`: no other suspect has computed since its turn began."""

    suspected_on: Role | None  # where the last worker died; None: nowhere yet
    _turns: _Turns
    is_alone: bool = False
    is_waiting: bool = False  # for its turn, or failed while it was
    exposed: set[WorkerKey] = field(default_factory=set)  # workers that compute for the request now
    _has_lock: bool = False

    async def turn(self) -> None:
        """Wait before a worker computes for a suspect: for its turn, but not longer than PROBATION_WAIT_S."""
        if self.suspected_on is None:
            return
        self.is_waiting = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBATION_WAIT_S):
                self._has_lock = await self._turns.lock.acquire()
        self.is_waiting = False
        self.is_alone = not self._turns.computing
        for companion in self._turns.computing:  # from now on neither of them is the one that a worker must die of
            companion.is_alone = False
        self._turns.computing.add(self)

    def computing(self, worker: WorkerKey) -> None:
        """From now on the request may be what kills `worker`, unless that is dead already and not yet known to be."""
        if worker not in self._turns.dead:
            self.exposed.add(worker)

    def killed(self, workers: Iterable[WorkerKey]) -> None:
        """These died while they computed for the request."""
        self._turns.dead.extend(worker for worker in workers if worker not in self._turns.dead)

    def left(self, worker: WorkerKey) -> None:
        """The worker is done with the request."""
        self.exposed.discard(worker)

    def progressed(self, role: Role) -> None:
        """A token came from a worker of this role: a suspect that came past where its worker died may have company."""
        if role is self.suspected_on or role is Role.DECODE:
            self.end()

    def end(self) -> None:
        """Let the next suspect have its turn. Idempotent."""
        self.is_alone = False
        self._turns.computing.discard(self)
        if self._has_lock:
            self._has_lock = False
            self._turns.lock.release()


class Probation:
    """The turns of suspects, for each model by its name. Belongs to one event loop."""

    def __init__(self) -> None:
        self._turns: dict[str, _Turns] = {}

    @contextlib.contextmanager
    def trial(self, model: str, suspected_on: Role | None) -> Iterator[Trial]:
        """The scope of an attempt. It awaits its `turn` before a worker computes for it."""
        trial = Trial(suspected_on, self._turns.setdefault(model, _Turns()))
        try:
            yield trial
        finally:
            trial.end()


class Attempts:
    """The history of one request."""

    def __init__(self, policy: FailoverPolicy, *, request_id: RequestId) -> None:
        self._policy = policy
        self._request_id = request_id
        self._backoff = Backoff()
        self.failures = 0
        self.error: TwinstageError | None = None  # of the last attempt
        self.excluded: frozenset[WorkerKey] = frozenset()  # gone for this request
        self.avoided: frozenset[WorkerKey] = frozenset()  # taken when there is no other
        self.suspected_on: Role | None = None
        self._took: dict[Role, list[WorkerId]] = {}  # workers that died while they computed for the request

    def failed(self, failed: AttemptFailed, trial: Trial, *, decode: WorkerKey | None, tokens: int) -> None:
        """Take note of a failure. Raises PoisonedRequest when this death is the request's own doing."""
        is_lost = isinstance(failed.error, WorkerLost)
        # Who only waited for its turn, and lost its worker to the suspect that had it, has not been tried.
        self.failures += not (trial.is_waiting and is_lost)
        self.error = failed.error
        self.excluded |= failed.workers if failed.is_final else frozenset()
        self.avoided |= failed.workers
        logger.warning("attempt failed", error=str(self.error), reason=self.error.reason, tokens=tokens)
        died = failed.workers & trial.exposed if is_lost else frozenset()
        if not died:
            return
        trial.killed(died)
        self.suspected_on = Role.DECODE if decode in died else Role.PREFILL
        # A poison kills at the same point again; a worker of either role is what accidents take, too.
        took = self._took.setdefault(self.suspected_on, [])
        took += [worker.worker_id for worker in died]
        if trial.is_alone and len(took) >= self._policy.poison_limit:
            logger.error("poisoned request refused", request_id=self._request_id, workers=took, tokens=tokens)
            raise PoisonedRequest(
                f"{len(took)} workers were lost while they computed for this request, the last one for it alone; "
                f"it is not tried again"
            )

    async def placed(
        self,
        place: Callable[[], Pair | Refusal],
        workers: WorkerTable,
        *,
        model: str,
        tokens_sent: Callable[[], int],
        is_bound: bool = False,
    ) -> Pair:
        """What `place` says; a request that has failed waits a moment when that is a refusal.

        One that `is_bound` to this router, as part of a stream, waits as those do that have sent tokens. Raises
        NoWorker, KvExhausted, or what the last attempt failed with.
        """
        patience_s = self._policy.resume_wait_s if is_bound else self.patience_s(tokens_sent=tokens_sent())
        until_s = time.monotonic() + patience_s
        has_paused = False
        while True:
            pair = place()
            if isinstance(pair, Pair):
                if has_paused or self.avoided.isdisjoint((pair.prefill, pair.decode)):
                    return pair
                has_paused = True
                await self._backoff.wait()  # before it goes back to a worker that has failed it: longer each time
            elif pair in NEVER_FITS or not await workers.changed(until_s=until_s):
                raise self.error or refused(pair, model)

    def continued(self) -> Attempts:
        """The same history for a part of the request that goes on by itself."""
        part = Attempts(self._policy, request_id=self._request_id)
        part.failures, part.error = self.failures, self.error
        part.excluded, part.avoided = self.excluded, self.avoided
        part.suspected_on = self.suspected_on
        part._took = {role: list(workers) for role, workers in self._took.items()}
        return part

    @property
    def are_over(self) -> bool:
        return self.failures >= self._policy.max_attempts

    def patience_s(self, *, tokens_sent: int) -> float:
        """How long to wait for a worker. A request that has not failed is refused at once: another router may do."""
        if self.error is None:
            return 0.0
        return self._policy.resume_wait_s if tokens_sent else self._policy.worker_wait_s

    def look(self, present: Iterable[WorkerKey]) -> None:
        """These workers are there now. Who is gone and comes back, be it as the same one, has another chance."""
        self.excluded &= frozenset(present)


def broken_off(error: Exception, *, tokens_sent: int) -> Exception:
    """What a client is told of `error`: one that has tokens cannot simply ask again.

    To be called when no more tokens follow: of several choices or prompts, others make some while one of them fails.
    """
    if not tokens_sent or not isinstance(error, TwinstageError) or not error.retryable:
        return error
    return StreamBroken(
        f"a worker failed after {tokens_sent} tokens had been sent, and the request was not continued: {error}",
        tokens_sent=tokens_sent,
    )


def refused(refusal: Refusal, model: str) -> TwinstageError:
    """What a client is told whose request cannot be placed."""
    if refusal is Refusal.TOO_LARGE:
        return KvExhausted(f"{refusal.value}; send a shorter one")
    if refusal is Refusal.TOO_MANY_CHOICES:
        return KvExhausted(f"{refusal.value}; ask for fewer")
    return NoWorker(f"{refusal.value} for model {model!r}; try again")
