"""The Python client of a Twinstage router. Needs neither torch nor Transformers."""

from __future__ import annotations

from twinstage.client.aio import AsyncTwinstageClient
from twinstage.client.aio_stream import AsyncGenerationStream
from twinstage.client.client import TwinstageClient
from twinstage.client.options import Options, Output, Reasoning, Repetition, Sampling, Stopping, StructuredOutput
from twinstage.client.results import (
    Continuation,
    Delta,
    EmbeddedText,
    Embeddings,
    Generation,
    Load,
    ModelInfo,
    ModelLoad,
    PrefixCacheReset,
    PromptInfo,
    PromptLogprobs,
    RankedDocument,
    Ranking,
    RenderedChat,
    RequestLoad,
    Scores,
    Summary,
    TokenText,
    Trace,
    TraceSpan,
    WorkerInfo,
)
from twinstage.client.stream import GenerationStream
from twinstage.client.tls import tls_credentials
from twinstage.client.tools import tool_from_function, tool_from_schema
from twinstage.types import ChatMessage, ChatPrompt, Tool, ToolCall, ToolCallDelta, ToolChoice, ToolChoiceMode
from twinstage.types.constraints import GrammarBackend

__all__ = [
    "AsyncGenerationStream",
    "AsyncTwinstageClient",
    "ChatMessage",
    "ChatPrompt",
    "Continuation",
    "Delta",
    "EmbeddedText",
    "Embeddings",
    "Generation",
    "GenerationStream",
    "GrammarBackend",
    "Load",
    "ModelInfo",
    "ModelLoad",
    "Options",
    "Output",
    "PrefixCacheReset",
    "PromptInfo",
    "PromptLogprobs",
    "RankedDocument",
    "Ranking",
    "Reasoning",
    "RenderedChat",
    "Repetition",
    "RequestLoad",
    "Sampling",
    "Scores",
    "Stopping",
    "StructuredOutput",
    "Summary",
    "TokenText",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolChoiceMode",
    "Trace",
    "TraceSpan",
    "TwinstageClient",
    "WorkerInfo",
    "tls_credentials",
    "tool_from_function",
    "tool_from_schema",
]
