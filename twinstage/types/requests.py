"""What a client sent; anything may be missing or wrong."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twinstage.types.constraints import RawStructuredOutput
from twinstage.types.pooling import PoolingTask
from twinstage.types.tools import Tool, ToolCall, ToolChoice


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
class RawRepetition:
    """Limits of repetition as a client sent them; None where it left one out."""

    min_pattern_size: int | None = None
    max_pattern_size: int | None = None
    min_count: int | None = None


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
    repetition: RawRepetition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawOutput:
    """Output fields as a client sent them; None where it left one out."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation.

    `tool_calls` and `reasoning` are the assistant's; a message of role "tool" answers the call `tool_call_id`.
    """

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


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
    """A conversation to render; `add_generation_prompt`, `tool_choice` and the like None mean the default."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str = ""
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
    structured_output: RawStructuredOutput | None = None
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
class PoolingParameters:
    """How an input is encoded, as far as its client said. Of `prompt_name`, None takes the model's default, "" none."""

    task: PoolingTask | None = None
    truncation: Truncation | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None

    def over(self, other: PoolingParameters) -> PoolingParameters:
        """These where they say something, else what `other` says."""
        return PoolingParameters(
            task=self.task or other.task,
            truncation=self.truncation or other.truncation,
            normalize=other.normalize if self.normalize is None else self.normalize,
            dimensions=other.dimensions if self.dimensions is None else self.dimensions,
            prompt_name=other.prompt_name if self.prompt_name is None else self.prompt_name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEncodeRequest:
    """What a client sent to Encode, Embed or EncodeStream. An input is None when it was left out.

    `inputs_field` is the path of the inputs in the client's message, for violations. Without `task` it is the model's
    own. Of `prompt_name`, None takes the model's default and "" none. With `parameters` these say all of that instead:
    one for all inputs, or one per input.
    """

    inputs: tuple[TextPrompt | TokenPrompt | None, ...]
    inputs_field: str = "inputs"
    model: str = ""
    request_id: str = ""
    truncation: Truncation = field(default_factory=Truncation)
    normalize: bool = True
    dimensions: int | None = None
    format: EmbeddingFormat = EmbeddingFormat.FLOAT
    task: PoolingTask | None = None
    prompt_name: str | None = None
    parameters: tuple[PoolingParameters, ...] = ()

    @property
    def all_parameters(self) -> tuple[PoolingParameters, ...]:
        """At least one."""
        if self.parameters:
            return self.parameters
        return (
            PoolingParameters(
                task=self.task,
                truncation=self.truncation,
                normalize=self.normalize,
                dimensions=self.dimensions,
                prompt_name=self.prompt_name,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RawScoreRequest:
    """What a client sent to Score or Rerank. `query_field` is the path of the queries in the client's message."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    query_field: str = "queries"
    model: str = ""
    request_id: str = ""
    truncation: Truncation = field(default_factory=Truncation)
    top_n: int | None = None
