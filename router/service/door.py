"""What is checked on the messages themselves, before anything is copied out of them.

Conversion and admission run on the event loop, so a list of a million entries must not get that far. The limits are
far above what a request that could be served needs; a message as a whole is limited by `--max-message-bytes`.
"""

from __future__ import annotations

from typing import Any

from router.violations import Violations
from router.worker_entry import ServedModel
from twinstage.v1 import common_pb2, generation_pb2, tokenizer_pb2

MAX_ENTRIES = 1024  # of logit_bias, stop, stop_token_ids and batch
MAX_MESSAGES = 4096


class Door:
    """Lets requests of a reasonable shape through.

    A chat template is a program that the router runs, so those of clients are refused unless the operator trusts them
    (`--trust-request-chat-template`): a sandbox keeps a program from secrets, not from using up time and memory.
    """

    def __init__(self, *, trusts_chat_templates: bool) -> None:
        self._trusts_chat_templates = trusts_chat_templates

    def check_generate(self, request: generation_pb2.GenerateRequest) -> None:
        """Raises InvalidRequest."""
        violations = Violations()
        _check_options(violations, request.sampling, request.stopping)
        _check_count(violations, "batch.prompts", request.batch.prompts, MAX_ENTRIES)
        violations.raise_any()

    def check_chat(self, request: generation_pb2.ChatRequest) -> None:
        """Raises InvalidRequest."""
        violations = Violations()
        _check_options(violations, request.sampling, request.stopping)
        self._check_conversation(violations, request)
        violations.raise_any()

    def check_render(self, request: tokenizer_pb2.RenderChatRequest) -> None:
        """Raises InvalidRequest."""
        violations = Violations()
        self._check_conversation(violations, request)
        violations.raise_any()

    def _check_conversation(
        self, violations: Violations, request: generation_pb2.ChatRequest | tokenizer_pb2.RenderChatRequest
    ) -> None:
        _check_count(violations, "messages", request.messages, MAX_MESSAGES)
        if request.chat_template and not self._trusts_chat_templates:
            violations.add(
                "chat_template",
                "this server takes no templates from clients: leave it out, or have the router started with "
                "--trust-request-chat-template",
            )


def check_token_count(field: str, token_ids: Any, model: ServedModel) -> None:
    """No more ids than a sequence of the model can have. Raises InvalidRequest."""
    violations = Violations()
    _check_count(violations, field, token_ids, model.description.max_model_len)
    violations.raise_any()


def _check_options(
    violations: Violations, sampling: common_pb2.SamplingOptions, stopping: common_pb2.StoppingOptions
) -> None:
    _check_count(violations, "sampling.logit_bias", sampling.logit_bias, MAX_ENTRIES)
    _check_count(violations, "stopping.stop", stopping.stop, MAX_ENTRIES)
    _check_count(violations, "stopping.stop_token_ids", stopping.stop_token_ids, MAX_ENTRIES)


def _check_count(violations: Violations, field: str, entries: Any, limit: int) -> None:
    if len(entries) > limit:
        violations.add(field, f"must have at most {limit} entries, has {len(entries)}")
