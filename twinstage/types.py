"""The value types of the domain: what a request is at each stage, what workers produce, what is reported.

A request changes its type as it becomes more certain:

    RawGenerationRequest  what a client sent; anything may be missing or wrong
    AdmittedRequest       validated, tokenized, every default resolved; owned by the router
    SequenceSpec          what workers need to know of it: token ids and numbers, no text

Everything here is frozen. Durations are seconds (`_s`), sizes are bytes (`_bytes`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)

GREEDY_TEMPERATURE = 1e-5  # below this, sampling is greedy
SECONDS_PER_PRIORITY_LEVEL = 10.0  # a level is worth so much of waiting, so that no priority starves another


class Task(enum.Enum):
    """What a model is for."""

    GENERATE = "generate"
    EMBED = "embed"


class Role(enum.Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT_LIMIT = "context_limit"
    TIME_LIMIT = "time_limit"
    TOOL_CALLS = "tool_calls"
    REPETITION = "repetition"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of a generation; at most one of the two matches is set, and only with `STOP`."""

    reason: FinishReason
    matched_token_id: int | None = None
    matched_text: str | None = None


# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSampling:
    """Sampling fields as a client sent them; None where it left one out."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawStopping:
    """Stopping fields as a client sent them; None where it left one out."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    time_limit_s: float | None = None
    has_repetition_detection: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RawOutput:
    """Output fields as a client sent them; None where it left one out."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """A prompt as text."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """A prompt as token ids, used as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation to render; `add_generation_prompt` None means the default."""

    messages: tuple[ChatMessage, ...]
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPrompt:
    """Several prompts in one call."""

    prompts: tuple[TextPrompt | TokenPrompt, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt | BatchPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGenerationRequest:
    """What a client sent to Generate or Chat. `prompt` is None when the input was left out."""

    prompt: Prompt | None
    model: str = ""
    request_id: str = ""
    sampling: RawSampling = field(default_factory=RawSampling)
    stopping: RawStopping = field(default_factory=RawStopping)
    output: RawOutput = field(default_factory=RawOutput)
    has_structured_output: bool = False
    priority: int = 0
    cache_salt: str = ""


class EmbeddingFormat(enum.Enum):
    """How the numbers of a vector are sent."""

    FLOAT = "float"
    PACKED_FLOAT32 = "packed_float32"
    PACKED_FLOAT16 = "packed_float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """What happens to an input that is too long: cut to the model's limit, cut to `tokens`, or neither (an error).

    `keep_last` cuts the beginning of the input, otherwise its end is cut.
    """

    to_model_limit: bool = False
    tokens: int | None = None
    keep_last: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEncodeRequest:
    """What a client sent to Encode, Embed or EncodeStream. An input is None when it was left out.

    `inputs_field` is the path of the inputs in the client's message, for violations.
    """

    inputs: tuple[TextPrompt | TokenPrompt | None, ...]
    inputs_field: str = "inputs"
    model: str = ""
    request_id: str = ""
    truncation: Truncation = field(default_factory=Truncation)
    normalize: bool = True
    dimensions: int | None = None
    format: EmbeddingFormat = EmbeddingFormat.FLOAT


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How tokens are drawn; every default resolved. `top_k` 0 keeps all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    choice_index: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """What a worker needs to know of a request: token ids and numbers, no text.

    `resumed_token_ids` were generated by an earlier attempt that failed; they count towards `max_tokens`, and
    the next token has position `len(resumed_token_ids)`. `stop_token_ids` includes the model's end-of-sequence
    tokens unless they are ignored; they are suppressed until `min_tokens` tokens exist. Requests share cached prefixes
    only with those of equal `cache_salt`.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParameters
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    priority: int = 0
    resumed_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How the router turns tokens into text."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedRequest:
    """A validated request. `arrived_s` and `deadline_s` are readings of the router's monotonic clock."""

    spec: SequenceSpec
    model: str
    text: TextOptions
    arrived_s: float
    deadline_s: float
    tokenize_s: float
    time_limit_s: float | None = None


# --- what workers produce -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenAlternative:
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probability (natural, before temperature and penalties) and rank (1 = most likely) of a produced token."""

    logprob: float
    rank: int
    top: tuple[TokenAlternative, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducedToken:
    """A token that a worker sampled."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """New tokens of one request; `finish` is set when the generation ended with them."""

    request_id: RequestId
    tokens: tuple[ProducedToken, ...]
    finish: Finish | None = None


# --- descriptions ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A model as a worker serves it. `embedding_dimensions` is 0 unless the task is EMBED."""

    name: str
    fingerprint: str
    task: Task
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    embedding_dimensions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """What a worker says of itself; constant while it lives. `epoch` is drawn at every start.

    `numerics` names all that decides the bits of its results, in deterministic mode; empty otherwise.
    """

    worker_id: WorkerId
    epoch: int
    role: Role
    protocol_version: int
    model: ModelDescription
    kv_layout_fingerprint: str
    total_kv_blocks: int
    kv_block_size: int
    kv_block_bytes: int
    max_num_sequences: int
    transports: tuple[str, ...]
    numerics: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """The load of a worker at one moment.

    The free blocks include the `cached` ones, which the prefix cache knows until they are needed. Since the start,
    `looked_up` blocks of prompts were looked for there, and the `found` ones need not be computed or sent.
    `unfinished` requests hold or wait for something, in whatever phase; `leaked` blocks are held by none of them.
    """

    free_kv_blocks: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    finished: int = 0
    kv_bytes_received: int = 0
    draining: bool = False
    cached_kv_blocks: int = 0
    prefix_looked_up_blocks: int = 0
    prefix_found_blocks: int = 0
    unfinished: int = 0
    leaked_kv_blocks: int = 0


# --- the hand-over --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEndpoint:
    """A way to reach a decode worker's blocks: `shm` with the path of a unix socket, or `tcp` with host:port.

    `host_id` identifies the host; shared memory needs the same one on both sides.
    """

    transport: str
    address: str
    host_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGrant:
    """The right to fill some blocks of a decode worker, once.

    The handle is (`worker_id`, `epoch`, `transfer_id`, `generation`): a restarted worker has another epoch, and a
    block that was given to somebody else since has another generation. `block_ids` are in prompt order and follow the
    first `num_cached_blocks` of the prompt, which the decode worker has already and which nobody may write.
    """

    worker_id: WorkerId
    epoch: int
    transfer_id: int
    generation: int
    token: bytes
    block_ids: tuple[int, ...]
    layout_fingerprint: str
    endpoints: tuple[KvEndpoint, ...]
    lease_s: float
    num_cached_blocks: int = 0


# --- what is reported -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request consumed."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where the time of a request went."""

    queue_s: float = 0.0
    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    kv_transfer_s: float = 0.0
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which workers served a request, and what moved between them."""

    prefill_worker: str = ""
    decode_worker: str = ""
    transport: str = ""
    kv_bytes: int = 0
    decode_computed_prompt_tokens: int = 0
    retries: int = 0
