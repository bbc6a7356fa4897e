"""What an engine is told and what it reports. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinstage.engine.sequence import Sequence, SequenceStats
from twinstage.errors import ConfigError, TwinstageError
from twinstage.types import PromptLogprobs, RequestId, TokenChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits of an engine; lengths in tokens. Raises ConfigError when one is not positive."""

    max_num_sequences: int  # rows of a step
    max_tokens_per_step: int  # prompt tokens of a step, and the size of a chunk; decoded tokens come on top
    max_model_len: int
    block_size: int
    prefix_hit_multiple: int = 1  # tokens; what the prefix cache has of a prompt is used up to a multiple of it
    hold_after_first_token: bool = False  # and keep the blocks of sequences that end, until they are aborted
    fixed_passes: bool = False  # plan for a runner that computes every token in one way only (`engine/fixed_passes.py`)

    def __post_init__(self) -> None:
        for name in ("max_num_sequences", "max_tokens_per_step", "max_model_len", "block_size", "prefix_hit_multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is. `wanted_blocks` is what the next waiting sequence needs."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # known tokens yet to be computed, of waiting and prefilling sequences
    finished: int = 0
    wanted_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedChunk:
    """Progress of a prompt: the first `num_computed_tokens` of `total_tokens` are in `block_ids` (for all of them)."""

    request_id: RequestId
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChunk:
    """Log probabilities of some of a sequence's prompt tokens; they come in order."""

    request_id: RequestId
    logprobs: PromptLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFailure:
    """A sequence that ended with an error. Its blocks are free, unless the engine holds them (`EngineConfig`)."""

    request_id: RequestId
    error: TwinstageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step did. `prefilled` has the sequences that got their first token here, the finished ones among them."""

    chunks: tuple[TokenChunk, ...] = ()
    scored: tuple[ScoredChunk, ...] = ()  # of sequences in `computed`
    computed: tuple[ComputedChunk, ...] = ()
    prefilled: tuple[SequenceStats, ...] = ()
    finished: tuple[SequenceStats, ...] = ()
    failed: tuple[SequenceFailure, ...] = ()
    preempted: tuple[RequestId, ...] = ()  # before anything else of this step
    num_computed_tokens: int = 0  # 0: nothing could run; all that is live waits for blocks

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.computed or self.prefilled or self.finished or self.failed)


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """The output of a step while it is made; what happens between steps goes into the next one."""

    chunks: list[TokenChunk] = field(default_factory=list)
    scored: list[ScoredChunk] = field(default_factory=list)
    computed: list[ComputedChunk] = field(default_factory=list)
    prefilled: list[SequenceStats] = field(default_factory=list)
    finished: list[SequenceStats] = field(default_factory=list)
    failed: list[SequenceFailure] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    num_computed_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.computed or self.prefilled or self.finished or self.failed)

    def output(self) -> StepOutput:
        return StepOutput(
            chunks=tuple(self.chunks),
            scored=tuple(self.scored),
            computed=tuple(self.computed),
            prefilled=tuple(self.prefilled),
            finished=tuple(self.finished),
            failed=tuple(self.failed),
            preempted=tuple(self.preempted),
            num_computed_tokens=self.num_computed_tokens,
        )


def computed_chunk(sequence: Sequence) -> ComputedChunk:
    """How far a sequence is."""
    return ComputedChunk(
        request_id=sequence.request_id,
        block_ids=sequence.table.block_ids,
        num_computed_tokens=sequence.num_computed_tokens,
        total_tokens=sequence.num_tokens,
    )
