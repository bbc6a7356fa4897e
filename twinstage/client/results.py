"""What the client returns: frozen values, free of protos."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinstage.errors import TwinstageError
from twinstage.types import ChatMessage, Finish, Placement, Role, Task, Timing, ToolCallDelta, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAlternativeText:
    """One of the most likely tokens at a position."""

    token_id: int
    text: str
    logprob: float
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A produced token with its log probability and rank (1 = most likely).

    Where a character takes several tokens, the bytes of all of them are the character in UTF-8.
    """

    token_id: int
    text: str
    logprob: float
    rank: int
    top: tuple[TokenAlternativeText, ...] = ()
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """A prompt's own tokens from position `start` on; nothing comes before the token at 0, so it has no probability."""

    prompt_index: int = 0
    start: int
    tokens: tuple[TokenText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInfo:
    """What the router made of a request."""

    request_id: str
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New text of one continuation; `finish` is set in the last delta of each.

    Of a chat, `text` is content; what the model thinks before, and the tools it calls, come beside it.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenText, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The totals of a request."""

    usage: Usage
    timing: Timing
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """One whole continuation of a prompt, or answer to a conversation.

    `message` is the answer as a message that can be sent back, with its reasoning and tool calls.
    """

    index: int
    text: str
    finish: Finish
    message: ChatMessage | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to a unary call: one continuation per prompt and choice.

    `prompt_logprobs` has an entry per prompt where `Output.prompt_logprobs` asked for it.
    """

    request_id: str
    model: str
    results: tuple[Continuation, ...]
    summary: Summary
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first continuation."""
        return self.results[0].text if self.results else ""

    @property
    def message(self) -> ChatMessage:
        """The first answer of a chat, as a message that can be sent back."""
        message = self.results[0].message if self.results else None
        return message or ChatMessage(role="assistant", content=self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """One vector per text, in order."""

    request_id: str
    model: str
    vectors: tuple[tuple[float, ...], ...] = field(repr=False)
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedText:
    """One text of a stream: its vector, or the error that it met. The stream goes on after an error."""

    index: int
    vector: tuple[float, ...] = field(default=(), repr=False)
    prompt_tokens: int = 0
    error: TwinstageError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One score per document, in order; the higher, the better."""

    request_id: str
    model: str
    scores: tuple[float, ...]
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedDocument:
    """A document by its index in the request."""

    index: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Documents, best first."""

    request_id: str
    model: str
    documents: tuple[RankedDocument, ...]
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker as the router sees it. `state` is "connecting", "ready", "draining", "lost" or "refused"."""

    worker_id: str
    address: str
    role: Role | None
    state: str
    model: str
    total_kv_blocks: int
    free_kv_blocks: int
    running: int
    waiting: int
    finished: int
    kv_bytes_received: int
    transports: tuple[str, ...]
    detail: str = ""
    cached_kv_blocks: int = 0
    prefix_looked_up_blocks: int = 0
    prefix_found_blocks: int = 0
    unfinished: int = 0
    leaked_kv_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheReset:
    """A worker that has forgotten what was in `dropped_blocks` of its KV blocks."""

    worker_id: str
    dropped_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model and how many workers serve it; `labels` are those of a classifier, as its probabilities are ordered."""

    name: str
    task: Task | None
    max_model_len: int
    vocab_size: int
    fingerprint: str
    embedding_dimensions: int
    prefill_workers: int
    decode_workers: int
    ready: bool
    capabilities: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation as its model reads it."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """Requests in the router: in progress and waiting, and the most of both."""

    live: int
    max_live: int
    queued: int
    max_queued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """The workers of a model that are ready, together."""

    model: str
    prefill_workers: int
    decode_workers: int
    prefill_running: int
    prefill_waiting: int
    prefill_waiting_tokens: int
    decode_running: int
    decode_waiting: int
    decode_total_kv_blocks: int
    decode_free_kv_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much there is to do, at `time_s` seconds since the epoch."""

    time_s: float
    generation: RequestLoad
    embedding: RequestLoad
    models: tuple[ModelLoad, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Something that was done for a request, by the router or the worker whose id is `process`.

    `start_s` counts from the arrival of the request; `attempt` is 0 for what is done once.
    """

    name: str
    process: str
    start_s: float
    duration_s: float
    attempt: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The way of one request through the processes. `duration_s` is None while it is in progress."""

    request_id: str
    trace_id: str
    parent_span_id: str
    model: str
    arrived_at_s: float
    duration_s: float | None
    error_reason: str
    spans: tuple[TraceSpan, ...]
