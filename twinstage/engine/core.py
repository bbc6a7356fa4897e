"""The engine: sequences come in, each `step` computes a plan for some of them, tokens come out.

                add                                                         add_prefilled
                 │                                                                │
                 v                                                                v
              waiting ──admit──> prefilling ──first token──> (held | decoding <──┘)
                 ^                    │                        │        │
                 └────── preempt ─────┴────────────────────────────────┘
    every way out (finished, failed, aborted, released) goes through `_drop`, which frees the blocks or keeps them

A step is schedule -> run -> apply -> emit. The core belongs to one thread; only the block pool is shared with others.
A prefill worker holds each sequence after its first token (`hold_after_first_token`) until its blocks are handed over,
and as they may be on their way already, those of a sequence that ends by itself stay too, until `abort`;
a decode worker adds sequences that were prefilled elsewhere and prefills only what it preempted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from twinstage.engine.decode_scheduler import DecodeScheduler
from twinstage.engine.output import (
    ComputedChunk,
    EngineConfig,
    EngineLoad,
    SequenceFailure,
    StepOutput,
    StepRecord,
    computed_chunk,
)
from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.engine.prefill_scheduler import PrefillScheduler
from twinstage.engine.prefix_cache import PrefixCache
from twinstage.engine.roster import Roster
from twinstage.engine.sequence import Sequence, SequenceStats, admission_violations, pool_too_small
from twinstage.engine.step_model import Runner, StepModel
from twinstage.errors import (
    ComputeFailed,
    IntegrityError,
    InvalidRequest,
    TwinstageError,
)
from twinstage.kv.block_pool import BlockPool, BlockTable
from twinstage.kv.layout import blocks_for
from twinstage.kv.prefix_index import HashChain, PrefixHasher
from twinstage.types import ProducedToken, RequestId, SequenceSpec, TokenChunk

__all__ = [
    "ComputedChunk",
    "EngineConfig",
    "EngineCore",
    "EngineLoad",
    "SequenceFailure",
    "SequenceStats",
    "StepOutput",
]


class EngineCore:
    """Continuous batching over one runner and one block pool. Not thread-safe."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        config: EngineConfig,
        *,
        hasher: PrefixHasher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hasher` names blocks for the prefix cache; without it nothing is cached."""
        self.pool = pool
        self.config = config
        self._model = StepModel(runner)
        self._clock = clock
        self._prefix_cache = PrefixCache(
            hasher,
            block_size=config.block_size,
            hit_multiple=config.max_tokens_per_step if config.fixed_passes else config.prefix_hit_multiple,
            whole_chunks=config.fixed_passes,
        )
        self._prefill = PrefillScheduler(
            pool,
            block_size=config.block_size,
            chunk_size=config.max_tokens_per_step,
            max_num_sequences=config.max_num_sequences,
            decodes_here=not config.hold_after_first_token,
            prefix_cache=self._prefix_cache,
            fixed_passes=config.fixed_passes,
        )
        self._decode = DecodeScheduler(pool, block_size=config.block_size, max_num_sequences=config.max_num_sequences)
        self._roster = Roster()
        self._arrivals = itertools.count()
        self._num_finished = 0
        self._record = StepRecord()

    # --- what comes in ---------------------------------------------------------------------------

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence to be computed from its first token.

        Raises AlreadyExists when the id is live. Whatever else is wrong is reported as a failure by the next step.
        """
        self._roster.check_new(spec.request_id)
        sequence = Sequence(
            spec=spec,
            table=self.pool.allocate(0, owner=spec.request_id),
            arrival=next(self._arrivals),
            arrived_s=self._clock(),
            output_token_ids=list(spec.resumed_token_ids),
        )
        self._roster.enter(sequence)
        violations = admission_violations(spec, max_model_len=self.config.max_model_len)
        if violations:
            self._fail(sequence, InvalidRequest(violations))
        else:
            self._queue(sequence)

    def add_prefilled(
        self, spec: SequenceSpec, table: BlockTable, token: ProducedToken, *, hashes: HashChain | None = None
    ) -> None:
        """Go on after `token`, the first new one, which the client already has.

        `table` holds the keys and values of prompt and resumed tokens and belongs to the engine once this returns;
        `hashes` are the names of its complete blocks, where somebody has computed them already.
        Raises AlreadyExists when the id is live, IntegrityError when the table is too small; it is the caller's then.
        """
        self._roster.check_new(spec.request_id)
        num_known = len(spec.prompt_token_ids) + len(spec.resumed_token_ids)
        if len(table) < blocks_for(num_known, block_size=self.config.block_size):
            raise IntegrityError(f"{len(table)} blocks do not hold the {num_known} tokens of {spec.request_id}")
        sequence = Sequence(
            spec=spec,
            table=table,
            arrival=next(self._arrivals),
            arrived_s=self._clock(),
            output_token_ids=[*spec.resumed_token_ids, token.token_id],
            num_computed_tokens=num_known,
            was_prefilled_elsewhere=True,
            hashes=hashes,
            num_published_blocks=table.num_shared,
        )
        self._roster.enter(sequence)
        finish = sequence.finish_after(token.token_id, max_model_len=self.config.max_model_len)
        if finish is None:
            self._decode.add(sequence)
        else:  # the prefill worker's limits are wider than ours
            self._record.chunks.append(TokenChunk(request_id=spec.request_id, tokens=(), finish=finish))
            self._finish(sequence)

    def abort(self, request_id: RequestId, *, keep_blocks: bool = False) -> bool:
        """End a sequence in whatever state; whether it was live. Nothing is emitted for it.

        Its blocks are free afterwards, those that were kept when it ended among them; with `keep_blocks` they stay
        out of use until it is aborted again.
        """
        sequence = self._roster.get(request_id)
        if sequence is not None:
            self._drop(sequence, keep_blocks=keep_blocks)
        if not keep_blocks:
            self._roster.free_kept(request_id)
        return sequence is not None

    def release(self, request_id: RequestId) -> None:
        """Free a sequence that is held after its first token. Ignored when it is not held (any more)."""
        if (sequence := self._roster.held(request_id)) is not None:
            self._num_finished += 1
            self._drop(sequence)

    def fail_all(self, error: TwinstageError) -> StepOutput:
        """End every sequence with `error`; returns what the next step would have reported, and that."""
        for sequence in self._roster.all_live():
            self._fail(sequence, error)
        return self._emit()

    def abort_all(self) -> None:
        """End every sequence and free all blocks; nothing is emitted."""
        for request_id in self._roster.all_ids():
            self.abort(request_id)
        self._record = StepRecord()

    # --- what can be asked -----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step may do or report something. Held sequences are no work."""
        return self._prefill.has_work or self._decode.has_work or not self._record.is_empty

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._prefill.prefilling) + len(self._decode.decoding),
            waiting=len(self._prefill.waiting),
            waiting_tokens=self._prefill.num_uncomputed_tokens,
            finished=self._num_finished,
            wanted_blocks=self._prefill.wanted_blocks,
        )

    # --- the step --------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Compute one plan. Sequences whose plan fails are reported in the output; the engine lives on."""
        plan = self._schedule()
        if plan.chunks:
            self._compute(plan)
        return self._emit()

    def _schedule(self) -> StepPlan:
        decision = self._decode.schedule(prefilling=self._prefill.prefilling)
        for sequence in decision.preempted:
            self._requeue(sequence)
        for sequence in decision.impossible:
            self._fail(sequence, pool_too_small(sequence, self.pool.num_blocks, block_size=self.config.block_size))
        self._prefill.admit(decoding=self._decode.decoding)
        room = self.config.max_num_sequences - len(decision.chunks)
        chunks = (*decision.chunks, *self._prefill.schedule(max_chunks=room))
        now_s = self._clock()
        for chunk in chunks:
            if chunk.sequence.started_s is None:
                chunk.sequence.started_s = now_s
        return StepPlan(chunks=chunks)

    def _compute(self, plan: StepPlan) -> None:
        try:
            tokens = self._model.compute(plan)
        except TwinstageError as error:
            for chunk in plan.chunks:
                self._fail(chunk.sequence, error)
            return
        self._record.num_computed_tokens += plan.num_tokens
        for chunk, token in zip(plan.chunks, tokens, strict=True):
            self._apply(chunk, token)

    def _apply(self, chunk: ScheduledChunk, token: ProducedToken | ComputeFailed | None) -> None:
        sequence = chunk.sequence
        is_prefill = sequence in self._prefill.prefilling
        sequence.mark_computed(chunk.end)
        if is_prefill:
            self._record.computed.append(computed_chunk(sequence))
        if token is None:
            return
        if isinstance(token, ComputeFailed):
            self._prefix_cache.withdraw(sequence)
            self._fail(sequence, token)
            return
        self._prefix_cache.publish(sequence)
        sequence.output_token_ids.append(token.token_id)
        finish = sequence.finish_after(token.token_id, max_model_len=self.config.max_model_len)
        self._record.chunks.append(TokenChunk(request_id=sequence.request_id, tokens=(token,), finish=finish))
        if is_prefill:
            self._end_prefill(sequence)
        if finish is not None:
            self._finish(sequence)

    def _emit(self) -> StepOutput:
        output, self._record = self._record.output(), StepRecord()
        return output

    # --- moves between states --------------------------------------------------------------------

    def _queue(self, sequence: Sequence) -> None:
        if self._prefill.can_ever_fit(sequence):
            self._prefill.add(sequence)
        else:
            self._fail(sequence, pool_too_small(sequence, self.pool.num_blocks, block_size=self.config.block_size))

    def _requeue(self, sequence: Sequence) -> None:
        """After a preemption, which released the table."""
        self._record.preempted.append(sequence.request_id)
        self._prefill.remove(sequence)
        self._decode.remove(sequence)
        sequence.restart(self.pool.allocate(0, owner=sequence.request_id))
        self._queue(sequence)

    def _end_prefill(self, sequence: Sequence) -> None:
        self._prefill.remove(sequence)
        if sequence.first_token_s is None and not sequence.was_prefilled_elsewhere:
            sequence.first_token_s = self._clock()
            self._record.prefilled.append(sequence.stats(sequence.first_token_s))
        if self.config.hold_after_first_token:
            self._roster.hold(sequence)
        else:
            self._decode.add(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self._num_finished += 1
        self._record.finished.append(sequence.stats(self._clock()))
        self._drop(sequence, keep_blocks=self.config.hold_after_first_token)

    def _fail(self, sequence: Sequence, error: TwinstageError) -> None:
        self._record.failed.append(SequenceFailure(request_id=sequence.request_id, error=error))
        self._drop(sequence, keep_blocks=self.config.hold_after_first_token)

    def _drop(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """The one way out: forget the sequence, and free its blocks or keep them until `abort`."""
        self._prefill.remove(sequence)
        self._decode.remove(sequence)
        self._roster.leave(sequence, keep_blocks=keep_blocks)
