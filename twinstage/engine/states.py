"""Where each sequence of an engine is, and every move between those states."""

from __future__ import annotations

from collections.abc import Callable

from twinstage.engine.choices import begin_choices, chunks_of_each, chunks_of_one
from twinstage.engine.decode_scheduler import DecodeScheduler
from twinstage.engine.output import EngineConfig, SequenceFailure, StepRecord
from twinstage.engine.prefill_scheduler import PrefillScheduler
from twinstage.engine.prefix_cache import PrefixCache
from twinstage.engine.roster import Roster
from twinstage.engine.sequence import Sequence, pool_too_small
from twinstage.errors import TwinstageError
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.fork import fork
from twinstage.types import ProducedToken


class States:
    """The sequences of one engine: waiting, prefilling, held or decoding. What happens to them goes into `record`."""

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        prefix_cache: PrefixCache,
        *,
        copy_block: Callable[[int, int], None] | None,
        on_end: Callable[[Sequence], None],
        clock: Callable[[], float],
    ) -> None:
        """`on_end` hears of every sequence that is forgotten."""
        self._pool = pool
        self._config = config
        self._copy_block = copy_block
        self._on_end = on_end
        self._clock = clock
        self.prefill = PrefillScheduler(
            pool,
            block_size=config.block_size,
            chunk_size=config.max_tokens_per_step,
            max_num_sequences=config.max_num_sequences,
            decodes_here=not config.hold_after_first_token,
            prefix_cache=prefix_cache,
            fixed_passes=config.fixed_passes,
        )
        self.decode = DecodeScheduler(pool, block_size=config.block_size, max_num_sequences=config.max_num_sequences)
        self.roster = Roster()
        self.num_finished = 0
        self.record = StepRecord()

    def queue(self, sequence: Sequence) -> None:
        if self.prefill.can_ever_fit(sequence):
            self.prefill.add(sequence)
        else:
            self.outgrew_pool(sequence)

    def outgrew_pool(self, sequence: Sequence) -> None:
        """It can never be computed here."""
        self.fail(sequence, pool_too_small(sequence, self._pool.num_blocks, block_size=self._config.block_size))

    def requeue(self, sequence: Sequence) -> None:
        """After a preemption, which released the table."""
        self.record.preempted.append(sequence.request_id)
        self.prefill.remove(sequence)
        self.decode.remove(sequence)
        sequence.restart(self._pool.allocate(0, owner=sequence.request_id))
        self.queue(sequence)

    def end_prefill(self, sequence: Sequence) -> None:
        self._note_first_token(sequence)
        if self._config.hold_after_first_token:
            self.roster.hold(sequence)
        else:
            self.decode.add(sequence)

    def _note_first_token(self, sequence: Sequence) -> None:
        self.prefill.remove(sequence)
        if sequence.first_token_s is None and not sequence.was_prefilled_elsewhere:
            sequence.first_token_s = self._clock()
            self.record.prefilled.append(sequence.stats(sequence.first_token_s))

    def end_shared_prefill(self, sequence: Sequence, tokens: list[ProducedToken]) -> None:
        """Each choice has its first token. Those that go on are sequences from now on, unless all are held as one."""
        self._note_first_token(sequence)
        begun = begin_choices(sequence, tokens, max_model_len=self._config.max_model_len)
        going_on = [choice for choice, finish in begun if finish is None]
        if self._config.hold_after_first_token:
            self.record.chunks += chunks_of_one(sequence, begun, tokens)
            (self.roster.hold if going_on else self.finish)(sequence)
            return
        self.record.chunks += chunks_of_each(begun, tokens)
        ended = [choice.stats(self._clock()) for choice, finish in begun if finish is not None]
        self.record.finished += ended
        self.num_finished += len(ended)
        self._fork(sequence, going_on)

    def _fork(self, sequence: Sequence, choices: list[Sequence]) -> None:
        """Let `choices` take the place of the sequence whose prompt they share."""
        assert self._copy_block is not None
        tables = fork(
            sequence.table,
            [choice.request_id for choice in choices],
            num_tokens=sequence.num_computed_tokens,
            block_size=self._config.block_size,
            copy_block=self._copy_block,
        )
        self.drop(sequence)
        for choice, table in zip(choices, tables, strict=True):
            choice.table = table
            self.roster.enter(choice)
            self.decode.add(choice)

    def finish(self, sequence: Sequence) -> None:
        self.num_finished += 1
        self.record.finished.append(sequence.stats(self._clock()))
        self.drop(sequence, keep_blocks=self._config.hold_after_first_token)

    def fail(self, sequence: Sequence, error: TwinstageError) -> None:
        self.record.failed.append(SequenceFailure(request_id=sequence.request_id, error=error))
        self.drop(sequence, keep_blocks=self._config.hold_after_first_token)

    def drop(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """The one way out: forget the sequence, and free its blocks or keep them until `abort`."""
        self.prefill.remove(sequence)
        self.decode.remove(sequence)
        self._on_end(sequence)
        self.roster.leave(sequence, keep_blocks=keep_blocks)
