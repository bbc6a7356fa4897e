"""The engine: sequences come in, each `step` computes a plan for some of them, tokens come out.

                add                                                         add_prefilled
                 │                                                                │
                 v                                                                v
              waiting ──admit──> prefilling ──first token──> (held | decoding <──┘)     several choices: each by itself
                 ^                    │                        │        │
                 └────── preempt ─────┴────────────────────────────────┘
    every way out (finished, failed, aborted, released) goes through `States.drop`, which frees the blocks or keeps them

A step is schedule -> run -> apply -> emit. The core belongs to one thread; only the block pool is shared with others.
A prefill worker holds each sequence after its first token (`hold_after_first_token`) until its blocks are handed over,
and as they may be on their way already, those of a sequence that ends by itself stay too, until `abort`;
a decode worker adds sequences that were prefilled elsewhere and prefills only what it preempted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from twinstage.engine.output import (
    ComputedChunk,
    EngineConfig,
    EngineLoad,
    ScoredChunk,
    SequenceFailure,
    StepOutput,
    StepRecord,
    computed_chunk,
)
from twinstage.engine.plan import ScheduledChunk, StepPlan
from twinstage.engine.prefix_cache import PrefixCache
from twinstage.engine.sampler import Logits
from twinstage.engine.sequence import Sequence, SequenceStats, admission_violations, check_constrained
from twinstage.engine.speculation import NoSpeculation, Speculation
from twinstage.engine.states import States
from twinstage.engine.step_model import Runner, StepModel
from twinstage.errors import ComputeFailed, IntegrityError, InvalidRequest, TwinstageError
from twinstage.grammar.matcher import SequenceMatcher
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
        copy_block: Callable[[int, int], None] | None = None,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hasher` names blocks for the prefix cache; without it nothing is cached.

        `copy_block` copies the bytes of a block (source, target), which sequences of several choices need that go on
        to decode in this engine. `speculation` guesses tokens ahead.
        """
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
        self._speculation = speculation or NoSpeculation()
        self._states = States(
            pool, config, self._prefix_cache, copy_block=copy_block, on_end=self._speculation.forget, clock=clock
        )
        self._arrivals = itertools.count()

    # --- what comes in ---------------------------------------------------------------------------

    def add(self, spec: SequenceSpec, *, matcher: SequenceMatcher | None = None) -> None:
        """Queue a sequence to be computed from its first token. `matcher`, of its constraint, has its resumed tokens.

        Raises AlreadyExists when the id is live. Whatever else is wrong is reported as a failure by the next step.
        """
        self._states.roster.check_new(spec.request_id)
        check_constrained(spec, matcher)
        table = self.pool.allocate(0, owner=spec.request_id)
        sequence = Sequence(spec=spec, table=table, arrival=next(self._arrivals), arrived_s=self._clock())
        sequence.output_token_ids += spec.resumed_token_ids
        sequence.matcher = matcher
        if not self.config.hold_after_first_token:
            sequence.num_spare_blocks = sequence.blocks_to_fork(self.config.block_size)
        self._states.roster.enter(sequence)
        violations = admission_violations(spec, max_model_len=self.config.max_model_len)
        if violations:
            self._states.fail(sequence, InvalidRequest(violations))
        else:
            self._states.queue(sequence)

    def add_prefilled(
        self,
        spec: SequenceSpec,
        table: BlockTable,
        token: ProducedToken,
        *,
        hashes: HashChain | None = None,
        matcher: SequenceMatcher | None = None,
    ) -> None:
        """Go on after `token`, the first new one, which the client already has. `matcher` as with `add`.

        `table` holds the keys and values of prompt and resumed tokens and belongs to the engine once this returns;
        `hashes` are the names of its complete blocks, where somebody has computed them already.
        Raises AlreadyExists when the id is live, IntegrityError when the table is too small, InvalidRequest when the
        grammar does not allow the token; the table is the caller's then.
        """
        self._states.roster.check_new(spec.request_id)
        check_constrained(spec, matcher)
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
            matcher=matcher,
        )
        sequence.follow(token.token_id)
        self._states.roster.enter(sequence)
        finish = sequence.finish_after(token.token_id, max_model_len=self.config.max_model_len)
        if finish is None:
            self._states.decode.add(sequence)
        else:  # the prefill worker's limits are wider than ours
            self._states.record.chunks.append(TokenChunk(request_id=spec.request_id, tokens=(), finish=finish))
            self._states.finish(sequence)

    def abort(self, request_id: RequestId, *, keep_blocks: bool = False) -> bool:
        """End a sequence in whatever state; whether it was live. Nothing is emitted for it.

        Its blocks are free afterwards, those that were kept when it ended among them; with `keep_blocks` they stay
        out of use until it is aborted again.
        """
        sequence = self._states.roster.get(request_id)
        if sequence is not None:
            self._states.drop(sequence, keep_blocks=keep_blocks)
        if not keep_blocks:
            self._states.roster.free_kept(request_id)
        return sequence is not None

    def release(self, request_id: RequestId) -> None:
        """Free a sequence that is held after its first token. Ignored when it is not held (any more)."""
        if (sequence := self._states.roster.held(request_id)) is not None:
            self._states.num_finished += 1
            self._states.drop(sequence)

    def fail_all(self, error: TwinstageError) -> StepOutput:
        """End every sequence with `error`; returns what the next step would have reported, and that."""
        for sequence in self._states.roster.all_live():
            self._states.fail(sequence, error)
        return self._emit()

    def abort_all(self) -> None:
        """End every sequence and free all blocks; nothing is emitted."""
        for request_id in self._states.roster.all_ids():
            self.abort(request_id)
        self._states.record = StepRecord()

    # --- what can be asked -----------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step may do or report something. Held sequences are no work."""
        return self._states.prefill.has_work or self._states.decode.has_work or not self._states.record.is_empty

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._states.prefill.prefilling) + len(self._states.decode.decoding),
            waiting=len(self._states.prefill.waiting),
            waiting_tokens=self._states.prefill.num_uncomputed_tokens,
            finished=self._states.num_finished,
            wanted_blocks=self._states.prefill.wanted_blocks,
        )

    # --- the step --------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Compute one plan. Sequences whose plan fails are reported in the output; the engine lives on."""
        plan = self._schedule()
        if plan.chunks:
            self._compute(plan)
        return self._emit()

    def _schedule(self) -> StepPlan:
        decision = self._states.decode.schedule(prefilling=self._states.prefill.prefilling)
        for sequence in decision.preempted:
            self._states.requeue(sequence)
        for sequence in decision.impossible:
            self._states.outgrew_pool(sequence)
        self._states.prefill.admit(decoding=self._states.decode.decoding)
        room = self.config.max_num_sequences - len(decision.chunks)
        chunks = (*self._speculation.plan(decision.chunks), *self._states.prefill.schedule(max_chunks=room))
        now_s = self._clock()
        for chunk in chunks:
            if chunk.sequence.started_s is None:
                chunk.sequence.started_s = now_s
        return StepPlan(chunks=chunks)

    def _compute(self, plan: StepPlan) -> None:
        try:
            logits = self._model.run(plan)
        except TwinstageError as error:
            for chunk in plan.chunks:
                self._states.fail(chunk.sequence, error)
            return
        self._states.record.num_computed_tokens += plan.num_tokens
        for chunk, rows in zip(plan.chunks, logits, strict=True):
            try:
                self._apply(chunk, rows)
            except TwinstageError as error:
                if isinstance(error, ComputeFailed):
                    self._prefix_cache.withdraw(chunk.sequence)
                self._states.fail(chunk.sequence, error)

    def _apply(self, chunk: ScheduledChunk, logits: Logits) -> None:
        """Raises what the sequence fails with, as ComputeFailed where the logits are not numbers.

        Tokens before that are in the record.
        """
        sequence = chunk.sequence
        is_prefill = sequence in self._states.prefill.prefilling
        sequence.mark_computed(chunk.known_end)
        if is_prefill:
            self._states.record.computed.append(computed_chunk(sequence))
        if chunk.scores and (logprobs := self._model.score(chunk, logits)) is not None:
            self._states.record.scored.append(ScoredChunk(request_id=sequence.request_id, logprobs=logprobs))
        if not chunk.samples:
            return
        if sequence.spec.num_choices > 1:
            tokens = self._model.draw_choices(sequence, logits[-1])
            self._prefix_cache.publish(sequence)
            self._states.end_shared_prefill(sequence, tokens)
            return
        drawn = self._model.draw(chunk, logits, max_model_len=self.config.max_model_len)
        self._speculation.learn(chunk, accepted=drawn.num_accepted)
        if drawn.tokens:
            self._prefix_cache.publish(sequence)
            chunk_out = TokenChunk(request_id=sequence.request_id, tokens=tuple(drawn.tokens), finish=drawn.finish)
            self._states.record.chunks.append(chunk_out)
        if drawn.error is not None:
            raise drawn.error
        if is_prefill:
            self._states.end_prefill(sequence)
        if drawn.finish is not None:
            self._states.finish(sequence)

    def _emit(self) -> StepOutput:
        output, self._states.record = self._states.record.output(), StepRecord()
        return output
