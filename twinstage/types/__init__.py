"""The value types of the domain: what a request is at each stage, what workers produce, what is reported.

A request changes its type as it becomes more certain:

    RawGenerationRequest  what a client sent; anything may be missing or wrong
    AdmittedRequest       validated, tokenized, every default resolved; owned by the router
    SequenceSpec          what workers need to know of it: token ids and numbers, no text

Everything here is frozen. Durations are seconds (`_s`), sizes are bytes (`_bytes`).
"""

from __future__ import annotations

from twinstage.types.basics import GREEDY_TEMPERATURE, SECONDS_PER_PRIORITY_LEVEL, RequestId, Role, Task, WorkerId
from twinstage.types.pooling import POOLING_TASKS, PoolingInput, PoolingTask
from twinstage.types.reports import Placement, Timing, Usage
from twinstage.types.requests import (
    BatchPrompt,
    ChatMessage,
    ChatPrompt,
    EmbeddingFormat,
    PoolingParameters,
    Prompt,
    RawEncodeRequest,
    RawGenerationRequest,
    RawOutput,
    RawRepetition,
    RawSampling,
    RawScoreRequest,
    RawStopping,
    TextPrompt,
    TokenPrompt,
    Truncation,
)
from twinstage.types.sequences import (
    AdmittedRequest,
    RepetitionLimits,
    SamplingParameters,
    SequenceSpec,
    TextOptions,
)
from twinstage.types.tokens import (
    Finish,
    FinishReason,
    ProducedToken,
    PromptLogprobs,
    TokenAlternative,
    TokenChunk,
    TokenLogprobs,
)
from twinstage.types.tools import AnswerFormat, Tool, ToolCall, ToolCallDelta, ToolChoice, ToolChoiceMode
from twinstage.types.workers import KvEndpoint, KvGrant, ModelDescription, WorkerDescription, WorkerLoad

__all__ = [
    "GREEDY_TEMPERATURE",
    "POOLING_TASKS",
    "SECONDS_PER_PRIORITY_LEVEL",
    "AdmittedRequest",
    "AnswerFormat",
    "BatchPrompt",
    "ChatMessage",
    "ChatPrompt",
    "EmbeddingFormat",
    "Finish",
    "FinishReason",
    "KvEndpoint",
    "KvGrant",
    "ModelDescription",
    "Placement",
    "PoolingInput",
    "PoolingParameters",
    "PoolingTask",
    "ProducedToken",
    "Prompt",
    "PromptLogprobs",
    "RawEncodeRequest",
    "RawGenerationRequest",
    "RawOutput",
    "RawRepetition",
    "RawSampling",
    "RawScoreRequest",
    "RawStopping",
    "RepetitionLimits",
    "RequestId",
    "Role",
    "SamplingParameters",
    "SequenceSpec",
    "Task",
    "TextOptions",
    "TextPrompt",
    "Timing",
    "TokenAlternative",
    "TokenChunk",
    "TokenLogprobs",
    "TokenPrompt",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolChoiceMode",
    "Truncation",
    "Usage",
    "WorkerDescription",
    "WorkerId",
    "WorkerLoad",
]
