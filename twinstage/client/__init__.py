"""The Python client of a Twinstage router. Needs neither torch nor Transformers."""

from __future__ import annotations

from twinstage.client.aio import AsyncGenerationStream, AsyncTwinstageClient
from twinstage.client.client import GenerationStream, TwinstageClient
from twinstage.client.options import Options, Output, Repetition, Sampling, Stopping
from twinstage.client.results import (
    Continuation,
    Delta,
    Embeddings,
    Generation,
    ModelInfo,
    PrefixCacheReset,
    PromptInfo,
    PromptLogprobs,
    Summary,
    TokenText,
    WorkerInfo,
)
from twinstage.client.tls import tls_credentials
from twinstage.client.tools import tool_from_function, tool_from_schema
from twinstage.types import ChatMessage, ChatPrompt, Tool, ToolCall, ToolCallDelta, ToolChoice, ToolChoiceMode

__all__ = [
    "AsyncGenerationStream",
    "AsyncTwinstageClient",
    "ChatMessage",
    "ChatPrompt",
    "Continuation",
    "Delta",
    "Embeddings",
    "Generation",
    "GenerationStream",
    "ModelInfo",
    "Options",
    "Output",
    "PrefixCacheReset",
    "PromptInfo",
    "PromptLogprobs",
    "Repetition",
    "Sampling",
    "Stopping",
    "Summary",
    "TokenText",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolChoiceMode",
    "TwinstageClient",
    "WorkerInfo",
    "tls_credentials",
    "tool_from_function",
    "tool_from_schema",
]
