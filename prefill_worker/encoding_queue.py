"""Encode calls that wait, and the batches that are made of them.

A batch takes one input of each waiting call in turn, so a call may be spread over several batches and a small call is
not held up by a large one before it. Calls come in on the event loop. The compute thread takes batches by itself: it
has the next one at once, and in it what came in while it computed.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from twinstage.errors import ComputeFailed, Overloaded
from twinstage.types import PoolingInput, PoolingTask

MAX_WAITING_CALLS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The results of one call, each an array of little-endian float32 numbers, and where the time went."""

    vectors: tuple[bytes, ...]
    queue_s: float
    compute_s: float


@dataclass(slots=True, eq=False)
class EncodingCall:
    """One call. The event loop has its results; what is left of its inputs is the queue's."""

    inputs: Sequence[PoolingInput]
    task: PoolingTask
    normalize: bool
    result: asyncio.Future[Encoded]
    results: dict[int, bytes] = field(default_factory=dict)
    compute_s: float = 0.0
    arrived_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    left: deque[int] = field(init=False)  # inputs that no batch has taken yet, the longest first
    left_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = [len(entry.token_ids) for entry in self.inputs]
        self.left = deque(sorted(range(len(lengths)), key=lambda index: -lengths[index]))
        self.left_tokens = sum(lengths)

    def goes_with(self, other: EncodingCall) -> bool:
        """Whether both can be computed in one batch."""
        return (self.task, self.normalize) == (other.task, other.normalize)

    def take(self, index: int, result: bytes | None) -> None:
        """The result of one input; None if its numbers are not finite, which fails the call and not its neighbours."""
        if result is None:
            self.fail(ComputeFailed("the model's numbers for an input are not finite"))
        else:
            self.results[index] = result

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def answer_if_complete(self) -> None:
        if len(self.results) == len(self.inputs) and not self.result.done():
            assert self.started_s is not None
            vectors = tuple(self.results[index] for index in range(len(self.inputs)))
            queue_s = self.started_s - self.arrived_s
            self.result.set_result(Encoded(vectors=vectors, queue_s=queue_s, compute_s=self.compute_s))


@dataclass(slots=True, eq=False)
class Batch:
    """Inputs that are computed together, each with its call. All calls have the same task and normalization."""

    items: list[tuple[EncodingCall, int]] = field(default_factory=list)
    tokens: int = 0

    @property
    def calls(self) -> list[EncodingCall]:
        return list(dict.fromkeys(call for call, _ in self.items))

    @property
    def inputs(self) -> list[PoolingInput]:
        return [call.inputs[index] for call, index in self.items]

    def take_from(self, call: EncodingCall, max_tokens: int) -> bool:
        """Take the next input of a call if it fits; the first one always does."""
        size = len(call.inputs[call.left[0]].token_ids)
        if self.items and (self.tokens + size > max_tokens or not call.goes_with(self.items[0][0])):
            return False
        self.items.append((call, call.left.popleft()))
        self.tokens += size
        call.left_tokens -= size
        return True


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """Calls: in the batch that is computed, and waiting in whole or in part."""

    running: int
    waiting: int
    waiting_tokens: int


class EncodingQueue:
    """Thread-safe."""

    def __init__(self, *, max_tokens_per_batch: int) -> None:
        self._max_tokens_per_batch = max_tokens_per_batch
        self._lock = threading.Lock()
        self._waiting: deque[EncodingCall] = deque()
        self._running: list[EncodingCall] = []
        self._has_taker = False

    def add(self, call: EncodingCall) -> bool:
        """Whether nobody takes batches, so that somebody has to begin. Raises Overloaded."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING_CALLS:
                raise Overloaded(f"{MAX_WAITING_CALLS} encode calls wait already")
            self._waiting.append(call)
            begins, self._has_taker = not self._has_taker, True
            return begins

    def discard(self, call: EncodingCall) -> None:
        """What is left of a call is not wanted any more."""
        with self._lock:
            if call in self._waiting:  # an error of `remove` would spell out the call
                self._waiting.remove(call)

    def clear(self) -> list[EncodingCall]:
        """All calls, of which nothing waits any more."""
        with self._lock:
            calls = list(dict.fromkeys((*self._running, *self._waiting)))
            self._waiting.clear()
            return calls

    def take_batch(self) -> Batch | None:
        """The next batch, when the one before it is done; with None, the taker is released."""
        with self._lock:
            batch = self._next_batch()
            self._running = batch.calls
            self._has_taker = bool(batch.items)
            return batch if batch.items else None

    def _next_batch(self) -> Batch:
        """One input of each call in turn, until nothing more fits. Those who got less come first the next time."""
        batch = Batch()
        taken = True
        while taken:
            taken, passed, served = False, deque[EncodingCall](), []
            for call in self._waiting:
                if not batch.take_from(call, self._max_tokens_per_batch):
                    passed.append(call)
                    continue
                taken = True
                if call.left:
                    served.append(call)
            self._waiting = passed + deque(served)
        started_s = time.monotonic()
        for call, _ in batch.items:
            call.started_s = call.started_s or started_s
        return batch

    def load(self) -> QueueLoad:
        with self._lock:
            return QueueLoad(
                running=len(self._running),
                waiting=len(self._waiting),
                waiting_tokens=sum(call.left_tokens for call in self._waiting),
            )
