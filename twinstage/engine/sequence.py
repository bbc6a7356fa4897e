"""One generation inside an engine: its tokens, its blocks, how far it is computed, and when what happened.

`num_computed_tokens` counts the leading tokens of `token_ids` whose keys and values are in `table`:

    waiting     table empty, nothing computed
    prefilling  table has room for all of token_ids; computed chunk by chunk, after the beginning that was found
    decoding    everything is computed but the last token

A preempted sequence is a waiting one with output tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from twinstage.errors import FieldViolation, InternalError, KvExhausted
from twinstage.grammar.matcher import SequenceMatcher, refused
from twinstage.kv.block_pool import BlockTable
from twinstage.kv.fork import spare_blocks
from twinstage.kv.layout import blocks_for
from twinstage.kv.prefix_index import HashChain
from twinstage.kv.shortage import Shortage
from twinstage.types import SECONDS_PER_PRIORITY_LEVEL, Finish, FinishReason, RequestId, SequenceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """Where the time of a sequence went in this engine, in seconds.

    `queue_s` until it was first computed, `prefill_s` from then to its first token here (0 when it came prefilled),
    `decode_s` from then to now. `computed_prompt_tokens` counts recomputed ones again. Of `proposed_draft_tokens`,
    guesses of what comes next, `accepted_draft_tokens` were right.
    """

    request_id: RequestId
    queue_s: float
    prefill_s: float
    decode_s: float
    computed_prompt_tokens: int
    proposed_draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """The mutable state of one generation. Belongs to the engine thread."""

    spec: SequenceSpec
    table: BlockTable
    arrival: int  # counts up within the engine
    arrived_s: float
    output_token_ids: list[int] = field(default_factory=list)  # resumed ones first
    num_computed_tokens: int = 0
    was_prefilled_elsewhere: bool = False
    started_s: float | None = None  # first computed
    first_token_s: float | None = None  # first token sampled here
    computed_prompt_tokens: int = 0
    hashes: HashChain | None = None  # names of the leading blocks, as far as anybody asked
    num_published_blocks: int = 0  # leading ones that the prefix index has heard of
    num_spare_blocks: int = 0  # that it needs when it is forked into its choices
    num_scored_tokens: int = 1  # leading tokens of the prompt whose log probabilities, if wanted, have been reported
    num_proposed_tokens: int = 0  # guesses of what comes next that were checked here
    num_accepted_tokens: int = 0  # those that were right
    shortage: Shortage | None = None  # why it waits for blocks
    passed_by_blocks: int = 0  # given to others meanwhile that came later
    looked_up_at: int | None = None  # `BlockPool.changes` when the prefix index was last asked for more
    matcher: SequenceMatcher | None = None  # of structured output; has taken `output_token_ids`

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def rank(self) -> tuple[float, int]:
        """Smaller is served first: first come, first served, where each level of priority counts as a head start.

        The rank of a sequence never changes, so nobody waits for ever behind higher priorities that come later.
        """
        return (self.arrived_s - SECONDS_PER_PRIORITY_LEVEL * self.spec.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        return len(self.spec.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output, a new list."""
        return [*self.spec.prompt_token_ids, *self.output_token_ids]

    def token_ids_between(self, start: int, end: int) -> list[int]:
        """`token_ids[start:end]` without making the rest."""
        prompt = self.spec.prompt_token_ids
        num_prompt = len(prompt)
        return [*prompt[start:end], *self.output_token_ids[max(0, start - num_prompt) : max(0, end - num_prompt)]]

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def blocks_to_fork(self, block_size: int) -> int:
        """Blocks that its choices need besides those of the tokens it has."""
        return spare_blocks(self.num_tokens, num_choices=self.spec.num_choices, block_size=block_size)

    @property
    def wants_scores(self) -> bool:
        """Whether log probabilities of prompt tokens are still to be reported, for which their logits are needed."""
        if self.spec.prompt_logprobs is None or self.was_prefilled_elsewhere:
            return False
        return self.num_scored_tokens < len(self.spec.prompt_token_ids)

    def restart(self, table: BlockTable) -> None:
        """Begin again with an empty `table`; the tokens stay."""
        self.table = table
        self.num_computed_tokens = 0
        self.num_published_blocks = 0
        self.shortage = None
        self.looked_up_at = None

    def mark_computed(self, end: int) -> None:
        """The tokens before `end` are computed now."""
        num_prompt = len(self.spec.prompt_token_ids)
        self.computed_prompt_tokens += min(end, num_prompt) - min(self.num_computed_tokens, num_prompt)
        self.num_computed_tokens = end

    def follow(self, token_id: int) -> None:
        """Let the grammar of the output know its last token. Raises InvalidRequest when it may not come."""
        if self.matcher is None or token_id in self.spec.stop_token_ids:
            return
        if not self.matcher.accept(token_id):
            raise refused(f"does not allow token {token_id} after {len(self.output_token_ids) - 1} tokens")

    def finish_after(self, token_id: int, *, max_model_len: int) -> Finish | None:
        """How the generation ends with `token_id`, its last output token; None when it goes on."""
        num_output = len(self.output_token_ids)
        if token_id in self.spec.stop_token_ids and num_output >= self.spec.min_tokens:
            return Finish(reason=FinishReason.STOP, matched_token_id=token_id)
        if self.matcher is not None and self.matcher.is_over:
            return Finish(reason=FinishReason.STOP)
        if num_output >= self.spec.max_tokens:
            return Finish(reason=FinishReason.LENGTH)
        if self.num_tokens >= max_model_len:
            return Finish(reason=FinishReason.CONTEXT_LIMIT)
        return None

    def stats(self, now_s: float) -> SequenceStats:
        """The stats so far."""
        started_s = now_s if self.started_s is None else self.started_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        decoding_since_s = started_s if self.was_prefilled_elsewhere else first_token_s
        return SequenceStats(
            request_id=self.request_id,
            queue_s=started_s - self.arrived_s,
            prefill_s=decoding_since_s - started_s,
            decode_s=now_s - decoding_since_s,
            computed_prompt_tokens=self.computed_prompt_tokens,
            proposed_draft_tokens=self.num_proposed_tokens,
            accepted_draft_tokens=self.num_accepted_tokens,
        )


def admission_violations(spec: SequenceSpec, *, max_model_len: int) -> list[FieldViolation]:
    """What makes it impossible to generate even one token."""
    violations = []
    num_known = len(spec.prompt_token_ids) + len(spec.resumed_token_ids)
    if spec.num_choices < 1:
        violations.append(FieldViolation("sequence.num_choices", "must be at least 1"))
    if not spec.prompt_token_ids:
        violations.append(FieldViolation("sequence.prompt_token_ids", "must not be empty"))
    if num_known >= max_model_len:
        description = f"{num_known} tokens leave no room for another one: the limit is {max_model_len}"
        violations.append(FieldViolation("sequence.prompt_token_ids", description))
    if len(spec.resumed_token_ids) >= spec.max_tokens:
        violations.append(FieldViolation("sequence.max_tokens", "must be more than the resumed tokens"))
    return violations


def check_constrained(spec: SequenceSpec, matcher: SequenceMatcher | None) -> None:
    """Raise InternalError for a constraint that nobody would see to."""
    if (spec.constraint is None) != (matcher is None):
        raise InternalError(f"request {spec.request_id} has come without the matcher of its constraint")


def pool_too_small(sequence: Sequence, num_blocks: int, *, block_size: int) -> KvExhausted:
    """The error of a sequence that outgrew the whole pool."""
    needed = blocks_for(sequence.num_tokens, block_size=block_size) + sequence.num_spare_blocks
    return KvExhausted(
        f"{sequence.num_tokens} tokens need {needed} KV blocks, more than the {num_blocks} of this worker"
    )
