"""Admitting one request whose fields were checked: tokenize, check the length, resolve every default."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import Executor

from router.admission.answers import ParserChoice, answer_format, behind_reasoning
from router.admission.defaults import resolve_max_tokens, resolve_repetition, resolve_sampling
from router.admission.prompts import check_lengths, tokenize_all, tokenize_rendered
from router.worker_entry import ServedModel
from twinstage.errors import FieldViolation, InvalidRequest
from twinstage.text.answers.registry import special_tokens_of
from twinstage.text.template_process import TemplateProcesses
from twinstage.types import (
    AdmittedRequest,
    AnswerFormat,
    ChatPrompt,
    Prompt,
    RawGenerationRequest,
    RequestId,
    SequenceSpec,
    TextOptions,
    TokenPrompt,
)
from twinstage.types.constraints import OutputConstraint


class Admission:
    """Admits requests; tokenizes in `executor`, off the event loop, and renders requests' own templates elsewhere."""

    def __init__(
        self, executor: Executor, templates: TemplateProcesses | None = None, parsers: ParserChoice | None = None
    ) -> None:
        self._executor = executor
        self.parsers = parsers or ParserChoice()  # of answers
        self._templates = templates or TemplateProcesses()

    async def admit(
        self,
        raw: RawGenerationRequest,
        model: ServedModel,
        *,
        request_id: str,
        arrived_s: float,
        deadline_s: float,
        constraint: OutputConstraint | None = None,
    ) -> list[AdmittedRequest]:
        """One request for each prompt: tokenized, of a length that fits, every default resolved.

        The fields were checked by `check_fields`, and `constraint` is what became of the structured output. Times are
        readings of the loop's clock. Raises InvalidRequest with all prompts that do not fit.
        """
        assert raw.prompt is not None
        started_s = time.monotonic()
        prompts = await self._token_ids(raw.prompt, model)
        tokenize_s = time.monotonic() - started_s
        check_lengths(raw.prompt, prompts, stopping=raw.stopping, limit=model.description.max_model_len)
        times = {"arrived_s": arrived_s, "deadline_s": deadline_s, "tokenize_s": tokenize_s}
        # The defaults of each are resolved for itself: of equal prompts without a seed, each draws another one.
        return [
            self._resolved(raw, model, RequestId(request_id), token_ids, times, constraint) for token_ids in prompts
        ]

    def _resolved(
        self,
        raw: RawGenerationRequest,
        model: ServedModel,
        request_id: RequestId,
        token_ids: tuple[int, ...],
        times: Mapping[str, float],
        constraint: OutputConstraint | None,
    ) -> AdmittedRequest:
        """The request for one prompt."""
        answer = answer_format(raw.prompt, model, self.parsers, token_ids=token_ids) if raw.prompt else None
        if constraint is not None and answer is not None:
            constraint, answer = behind_reasoning(constraint, answer, model.tokenizer)
        return AdmittedRequest(
            spec=_resolve_spec(raw, model, request_id=request_id, token_ids=token_ids, constraint=constraint),
            model=model.name,
            text=_text_options(raw, answer),
            time_limit_s=raw.stopping.time_limit_s,
            answer_format=answer,
            **times,
        )

    async def _token_ids(self, prompt: Prompt, model: ServedModel) -> list[tuple[int, ...]]:
        """The token ids of each prompt. Raises InvalidRequest."""
        if isinstance(prompt, TokenPrompt):  # nothing to do, so nothing to wait for
            return [prompt.token_ids]
        loop = asyncio.get_running_loop()
        if isinstance(prompt, ChatPrompt) and prompt.chat_template:
            text = await self._templates.render(model.tokenizer.bundle, prompt)
            return [await loop.run_in_executor(self._executor, tokenize_rendered, prompt, text, model)]
        return await loop.run_in_executor(self._executor, tokenize_all, prompt, model)


def _text_options(raw: RawGenerationRequest, answer: AnswerFormat | None) -> TextOptions:
    return TextOptions(
        stop=raw.stopping.stop,
        include_stop_str_in_output=raw.stopping.include_stop_str_in_output,
        skip_special_tokens=raw.output.skip_special_tokens,
        return_token_ids=raw.output.return_token_ids,
        kept_special_tokens=special_tokens_of(answer),
        repetition=resolve_repetition(raw.stopping.repetition),
    )


def _resolve_spec(
    raw: RawGenerationRequest,
    model: ServedModel,
    *,
    request_id: RequestId,
    token_ids: tuple[int, ...],
    constraint: OutputConstraint | None,
) -> SequenceSpec:
    end_of_sequence = () if raw.stopping.ignore_eos else model.description.eos_token_ids
    stop_token_ids = frozenset(end_of_sequence) | frozenset(raw.stopping.stop_token_ids)
    if constraint is not None and not stop_token_ids.isdisjoint(constraint.reasoning_end_ids):
        # It would be forbidden where the reasoning may not end, and end the output where it may.
        description = "a token of the marker that ends the reasoning ends the generation, too; name another marker"
        raise InvalidRequest([FieldViolation("structured_output.reasoning.end", description)])
    return SequenceSpec(
        request_id=request_id,
        prompt_token_ids=token_ids,
        sampling=resolve_sampling(raw.sampling, model),
        num_choices=raw.sampling.n or 1,
        max_tokens=resolve_max_tokens(raw, model),
        min_tokens=raw.stopping.min_tokens or 0,
        stop_token_ids=stop_token_ids,
        logprobs=raw.output.logprobs,
        priority=raw.priority,
        cache_salt=raw.cache_salt,
        prompt_logprobs=raw.output.prompt_logprobs,
        constraint=constraint,
    )
