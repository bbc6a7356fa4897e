"""The requests of the load, and what one engine alone, without a cluster, answers to each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fused_models import tiny_config
from tiny_models import IM_END_ID, make_tiny_model
from token_bits import TokenBits, bits_of_produced
from twinstage.engine.llm import LLM, GenerationLimits, LlmOptions
from twinstage.rpc.convert_structured import structured_output_to_proto
from twinstage.types import Finish, FinishReason, SamplingParameters, TextOptions
from twinstage.types.constraints import RawStructuredOutput
from twinstage.v1 import common_pb2, generation_pb2

if TYPE_CHECKING:
    from chaos.pooling import PoolingAnswer, PoolingCase

MAX_MODEL_LEN = 4096
Prompt = str | tuple[int, ...]
GREEDY = SamplingParameters(temperature=0.0)


def make_chaos_model(directory: Path) -> Path:
    """Write a random Llama that is slow enough for faults to meet requests in progress: about 1 ms a token."""
    config = tiny_config(
        "llama",
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=8,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    return make_tiny_model(directory, config, weight_scale=3.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request. `logprobs` None asks for none; `stop` strings are looked for in the text.

    Prompts that are asked `beside` it make a batch. Of several continuations, one is `observed`; of the others the
    tokens are counted.
    """

    prompt: Prompt
    beside: tuple[Prompt, ...] = ()
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = True
    sampling: SamplingParameters = GREEDY
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: RawStructuredOutput | None = None
    priority: int = 0
    num_choices: int = 1
    observed: int = 0

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt, *self.beside)

    @property
    def observed_prompt(self) -> int:
        return self.observed // self.num_choices

    def request(self) -> generation_pb2.GenerateRequest:
        sampling = self.sampling
        request = generation_pb2.GenerateRequest(
            sampling=common_pb2.SamplingOptions(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or None,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                seed=sampling.seed,
                logit_bias=dict(sampling.logit_bias),
                n=self.num_choices if self.num_choices > 1 else None,
            ),
            stopping=common_pb2.StoppingOptions(
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                stop=self.stop,
                include_stop_str_in_output=self.include_stop,
                ignore_eos=self.ignore_eos,
            ),
            output=common_pb2.OutputOptions(
                logprobs=self.logprobs, prompt_logprobs=self.prompt_logprobs, return_token_ids=True
            ),
            structured_output=structured_output_to_proto(self.structure) if self.structure is not None else None,
            priority=self.priority,
        )
        if self.beside:
            request.batch.prompts.extend(_prompt_input(prompt) for prompt in self.prompts)
        elif isinstance(self.prompt, str):
            request.prompt = self.prompt
        else:
            request.prompt_token_ids.ids[:] = self.prompt
        return request


def _prompt_input(prompt: Prompt) -> generation_pb2.PromptInput:
    if isinstance(prompt, str):
        return generation_pb2.PromptInput(prompt=prompt)
    return generation_pb2.PromptInput(prompt_token_ids=common_pb2.TokenIds(ids=prompt))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that a client must get to see. `bits` and `prompt_bits` are empty where none were asked for."""

    num_prompt_tokens: int  # of all prompts
    num_other_tokens: int = 0  # of choices that are not observed
    token_ids: tuple[int, ...]
    text: str
    finish: Finish
    bits: tuple[TokenBits, ...] = ()
    prompt_bits: tuple[TokenBits, ...] = ()  # of the observed continuation's prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCase:
    """A request and its answer."""

    case: Case | PoolingCase
    answer: Answer | PoolingAnswer


def answered_cases(model: Path, cases: Iterable[Case], *, weights: str, deterministic: bool) -> list[AnsweredCase]:
    """The requests with their answers. Takes about 1 ms a token."""
    options = LlmOptions(
        weights=weights, deterministic=deterministic, threads=1, kv_cache_bytes=64 << 20, max_model_len=MAX_MODEL_LEN
    )
    with LLM(str(model), options) as llm:
        return [AnsweredCase(case=case, answer=_answer(llm, case)) for case in _with_stops(llm, cases)]


def _with_stops(llm: LLM, cases: Iterable[Case]) -> Iterator[Case]:
    """Every fifth case ends by a string of its own text, every tenth wishes to end but must not at first."""
    for number, case in enumerate(cases):
        if case.structure is not None:
            yield case
        elif number % 10 == 9 and case.max_tokens > 4:
            bias = {IM_END_ID: 3.0}
            yield replace(
                case, ignore_eos=False, min_tokens=4, sampling=replace(case.sampling, logit_bias=bias), stop=()
            )
        elif number % 5 == 4 and len(text := _answer(llm, case).text) > 12:
            start = len(text) // 2
            yield replace(case, stop=("~no such text~", text[start : start + 4]), include_stop=number % 2 == 0)
        else:
            yield case


def _answer(llm: LLM, case: Case) -> Answer:
    results = llm.generate(
        case.prompts,
        case.sampling,
        n=case.num_choices,
        limits=GenerationLimits(max_tokens=case.max_tokens, min_tokens=case.min_tokens, ignore_eos=case.ignore_eos),
        logprobs=case.logprobs,
        prompt_logprobs=case.prompt_logprobs,
        structured_output=case.structure,
        text=TextOptions(stop=case.stop, include_stop_str_in_output=case.include_stop),
    )
    result = results[case.observed]
    return Answer(
        num_other_tokens=sum(len(other.token_ids) for other in results if other is not result),
        num_prompt_tokens=sum(len(each.prompt_token_ids) for each in results[:: case.num_choices]),
        token_ids=result.token_ids,
        text=result.text,
        finish=result.finish,
        bits=tuple(bits_of_produced(result.tokens)) if case.logprobs is not None else (),
        prompt_bits=tuple(bits_of_produced(results[case.observed_prompt * case.num_choices].prompt_logprobs)),
    )


FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_LIMIT: common_pb2.FINISH_REASON_CONTEXT_LIMIT,
}
