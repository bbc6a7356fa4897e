"""What is checked on the messages themselves, before anything is copied out of them.

Conversion and admission run on the event loop, so a list of a million entries must not get that far. The limits
(`router/limits.py`) are far above what a request that could be served needs; a message as a whole is limited by
`--max-message-bytes`.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from google.protobuf.message import Message

from router.limits import (
    MAX_ENTRIES,
    MAX_INPUTS,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    MAX_STRUCTURED_OUTPUT_BYTES,
    MAX_TEMPLATE_CHARACTERS,
    MAX_TEMPLATE_OPTIONS_BYTES,
    MAX_TOKEN_IDS,
    MAX_TOOL_BYTES,
    MAX_TOOLS,
)
from router.violations import MAX_LISTED_PER_FIELD, Violations
from router.worker_entry import ServedModel
from twinstage.v1 import common_pb2, embedding_pb2, generation_pb2, scoring_pb2, tokenizer_pb2


class Door:
    """Lets requests of a reasonable shape through.

    A chat template is a program, so those of clients are refused unless the operator wants them
    (`--trust-request-chat-template`). They run in a process of their own (`text/template_process.py`), which costs some
    100 ms of a CPU each time.
    """

    def __init__(self, *, trusts_chat_templates: bool) -> None:
        self._trusts_chat_templates = trusts_chat_templates

    def check_generate(self, request: generation_pb2.GenerateRequest) -> None:
        """Raises InvalidRequest."""
        violations = Violations()
        _check_common(violations, request)
        _check_count(violations, "prompt_token_ids.ids", request.prompt_token_ids.ids, MAX_TOKEN_IDS)
        _check_count(violations, "batch.prompts", request.batch.prompts, MAX_ENTRIES)
        violations.raise_any()

    def check_chat(self, request: generation_pb2.ChatRequest) -> None:
        """Raises InvalidRequest."""
        violations = Violations()
        _check_common(violations, request)
        self._check_conversation(violations, request)
        violations.raise_any()

    def check_render(self, request: tokenizer_pb2.RenderChatRequest) -> None:
        """Raises InvalidRequest."""
        violations = Violations()
        _check_model(violations, request)
        self._check_conversation(violations, request)
        violations.raise_any()

    def _check_conversation(
        self, violations: Violations, request: generation_pb2.ChatRequest | tokenizer_pb2.RenderChatRequest
    ) -> None:
        _check_count(violations, "messages", request.messages, MAX_MESSAGES)
        _check_names(violations, request.messages)
        _check_tools(violations, request)
        _check_bytes(violations, "chat_template_kwargs", request.chat_template_kwargs, MAX_TEMPLATE_OPTIONS_BYTES)
        _check_characters(violations, "chat_template", request.chat_template, MAX_TEMPLATE_CHARACTERS)
        if request.chat_template and not self._trusts_chat_templates:
            violations.add(
                "chat_template",
                "this server takes no templates from clients: leave it out, or have the router started with "
                "--trust-request-chat-template",
            )


def check_encode(request: embedding_pb2.EncodeRequest) -> None:
    """Raises InvalidRequest."""
    violations = Violations()
    _check_model(violations, request)
    _check_count(violations, "inputs", request.inputs, MAX_INPUTS)
    _check_count(violations, "parameters", request.parameters, MAX_INPUTS)
    for index, entry in enumerate(request.inputs[:MAX_INPUTS]):
        _check_count(violations, f"inputs[{index}].token_ids.ids", entry.token_ids.ids, MAX_TOKEN_IDS)
    violations.raise_any()


def check_encode_stream(request: embedding_pb2.EncodeStreamRequest) -> None:
    """Raises InvalidRequest."""
    violations = Violations()
    _check_model(violations, request)
    _check_count(violations, "input.token_ids.ids", request.input.token_ids.ids, MAX_TOKEN_IDS)
    violations.raise_any()


def check_embed(request: embedding_pb2.EmbedRequest) -> None:
    """Raises InvalidRequest."""
    violations = Violations()
    _check_model(violations, request)
    _check_count(violations, "texts", request.texts, MAX_INPUTS)
    violations.raise_any()


def check_score(request: scoring_pb2.ScoreRequest) -> None:
    """Raises InvalidRequest."""
    violations = Violations()
    _check_model(violations, request)
    _check_count(violations, "queries", request.queries, MAX_INPUTS)
    _check_count(violations, "documents", request.documents, MAX_INPUTS)
    violations.raise_any()


def check_rerank(request: scoring_pb2.RerankRequest) -> None:
    """Raises InvalidRequest."""
    violations = Violations()
    _check_model(violations, request)
    _check_count(violations, "documents", request.documents, MAX_INPUTS)
    violations.raise_any()


def check_model_name(name: str, *, field: str = "model") -> None:
    """Raises InvalidRequest."""
    violations = Violations()
    _check_characters(violations, field, name, MAX_NAME_CHARACTERS)
    violations.raise_any()


def check_token_count(field: str, token_ids: Any, model: ServedModel) -> None:
    """No more ids than a sequence of the model can have. Raises InvalidRequest."""
    violations = Violations()
    _check_count(violations, field, token_ids, model.description.max_model_len)
    violations.raise_any()


def _check_common(violations: Violations, request: generation_pb2.GenerateRequest | generation_pb2.ChatRequest) -> None:
    _check_options(violations, request.sampling, request.stopping)
    _check_model(violations, request)
    _check_bytes(violations, "structured_output", request.structured_output, MAX_STRUCTURED_OUTPUT_BYTES)
    _check_backend(violations, "structured_output", request.structured_output)
    if request.structured_output.reasoning.HasField("constraint"):
        inner = request.structured_output.reasoning.constraint
        _check_backend(violations, "structured_output.reasoning.constraint", inner)


def _check_backend(violations: Violations, path: str, message: common_pb2.StructuredOutput) -> None:
    if message.backend not in common_pb2.GrammarBackend.values():
        violations.add(f"{path}.backend", "must be xgrammar or llguidance, or left out")


def _check_model(violations: Violations, request: Any) -> None:
    _check_characters(violations, "model", request.model, MAX_NAME_CHARACTERS)


def _check_names(violations: Violations, messages: Any) -> None:
    too_long = (
        (f"messages[{index}].{field}", text)
        for index, message in enumerate(messages[:MAX_MESSAGES])
        for field, text in (("role", message.role), ("name", message.name))
        if len(text) > MAX_NAME_CHARACTERS
    )
    for field, text in islice(too_long, MAX_LISTED_PER_FIELD):
        _check_characters(violations, field, text, MAX_NAME_CHARACTERS)


def _check_tools(violations: Violations, request: generation_pb2.ChatRequest | tokenizer_pb2.RenderChatRequest) -> None:
    _check_count(violations, "tools", request.tools, MAX_TOOLS)
    size = sum(tool.ByteSize() for tool in request.tools[:MAX_TOOLS])
    if size > MAX_TOOL_BYTES:
        violations.add("tools", f"must have at most {MAX_TOOL_BYTES} bytes, has {size}")
    crowded = ((i, message) for i, message in enumerate(request.messages) if len(message.tool_calls) > MAX_TOOLS)
    for index, message in islice(crowded, MAX_LISTED_PER_FIELD):
        _check_count(violations, f"messages[{index}].tool_calls", message.tool_calls, MAX_TOOLS)


def _check_options(
    violations: Violations, sampling: common_pb2.SamplingOptions, stopping: common_pb2.StoppingOptions
) -> None:
    _check_count(violations, "sampling.logit_bias", sampling.logit_bias, MAX_ENTRIES)
    _check_count(violations, "stopping.stop", stopping.stop, MAX_ENTRIES)
    _check_count(violations, "stopping.stop_token_ids", stopping.stop_token_ids, MAX_ENTRIES)


def _check_count(violations: Violations, field: str, entries: Any, limit: int) -> None:
    if len(entries) > limit:
        violations.add(field, f"must have at most {limit} entries, has {len(entries)}")


def _check_characters(violations: Violations, field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        violations.add(field, f"must have at most {limit} characters, has {len(text)}")


def _check_bytes(violations: Violations, field: str, message: Message, limit: int) -> None:
    size = message.ByteSize()
    if size > limit:
        violations.add(field, f"must have at most {limit} bytes, has {size}")
