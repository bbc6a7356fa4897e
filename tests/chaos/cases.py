"""The requests of the load, and what one engine alone, without a cluster, answers to each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, cast

from fused_models import tiny_config
from tiny_models import IM_END_ID, VOCABULARY_SIZE, make_tiny_model
from token_bits import TokenBits, bits_of_produced
from twinstage.engine.llm import LLM, GenerationLimits, LlmOptions
from twinstage.types import Finish, FinishReason, SamplingParameters, TextOptions
from twinstage.v1 import common_pb2, generation_pb2

MAX_MODEL_LEN = 4096
# Beginnings that several prompts share. Their lengths lie on, before and behind the border of a block of 16 tokens.
_PREFIX_LENGTHS = (15, 64, 161)
_SUBJECTS = ("the sea", "a clockmaker", "winter wheat", "the night train", "an old map", "copper", "two rivers")
_GREEDY = SamplingParameters(temperature=0.0)


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

    Of several choices, one is `observed`; of the others the tokens are counted.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = True
    sampling: SamplingParameters = _GREEDY
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    logprobs: int | None = None
    priority: int = 0
    num_choices: int = 1
    observed: int = 0

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
            output=common_pb2.OutputOptions(logprobs=self.logprobs, return_token_ids=True),
            priority=self.priority,
        )
        if isinstance(self.prompt, str):
            request.prompt = self.prompt
        else:
            request.prompt_token_ids.ids[:] = self.prompt
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that a client must get to see. `bits` is empty when no log probabilities were asked for."""

    num_prompt_tokens: int
    num_other_tokens: int = 0  # of choices that are not observed
    token_ids: tuple[int, ...]
    text: str
    finish: Finish
    bits: tuple[TokenBits, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCase:
    """A request and its answer."""

    case: Case
    answer: Answer
    request: generation_pb2.GenerateRequest = field(repr=False)


def answered_cases(model: Path, *, count: int, longest: int, weights: str, deterministic: bool) -> list[AnsweredCase]:
    """`count` requests of at most `longest` tokens of output, with their answers. Takes about 1 ms a token."""
    options = LlmOptions(
        weights=weights, deterministic=deterministic, threads=1, kv_cache_bytes=64 << 20, max_model_len=MAX_MODEL_LEN
    )
    with LLM(str(model), options) as llm:
        return [_answered(llm, case) for case in _with_stops(llm, draw_cases(Random(count), count, longest))]


def draw_cases(random: Random, count: int, longest: int) -> Iterator[Case]:
    """Requests of all kinds and lengths, most of them short."""
    lengths = [length for length in (1, 2, 3, 17, 40, 120, 300, 700, 1500) if length <= longest]
    weights = [1, 1, 1, 2, 3, 4, 4, 3, 2][: len(lengths)]
    prefixes = [_tokens(random, length) for length in _PREFIX_LENGTHS]
    for _ in range(count):
        num_choices = random.choice((1, 1, 1, 1, 2, 3))
        yield Case(
            num_choices=num_choices,
            observed=random.randrange(num_choices),
            prompt=_prompt(random, prefixes, longest),
            max_tokens=random.choices(lengths, weights)[0],
            ignore_eos=random.random() < 0.8,
            sampling=_sampling(random),
            logprobs=random.choice((None, None, None, 0, 2, 5)),
            priority=random.choice((0, 0, 0, 0, 5, -5)),
        )


def _prompt(random: Random, prefixes: list[tuple[int, ...]], longest: int) -> str | tuple[int, ...]:
    kind = random.random()
    if kind < 0.25:
        return f"{random.choice(('What is', 'Once there was', 'Numbers such as'))} {random.choice(_SUBJECTS)}"
    if kind < 0.6:
        return (*random.choice(prefixes), *_tokens(random, random.randint(1, 40)))
    lengths = (1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 250, 400, 2 * longest // 3, longest)
    return _tokens(random, random.choice(lengths))


def _tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(3, VOCABULARY_SIZE) for _ in range(count))


def _sampling(random: Random) -> SamplingParameters:
    if random.random() < 0.35:
        return _GREEDY
    seeded = SamplingParameters(
        temperature=random.choice((0.7, 1.0, 1.3)), top_p=random.choice((1.0, 0.9)), seed=random.getrandbits(32)
    )
    changes: tuple[dict[str, float], ...] = (
        {},
        {"top_k": 20},
        {"min_p": 0.02},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
    )
    return replace(seeded, **cast("dict[str, Any]", random.choice(changes)))


def _with_stops(llm: LLM, cases: Iterable[Case]) -> Iterator[Case]:
    """Every fifth case ends by a string of its own text, every tenth wishes to end but must not at first."""
    for number, case in enumerate(cases):
        if number % 10 == 9 and case.max_tokens > 4:
            bias = {IM_END_ID: 3.0}
            yield replace(
                case, ignore_eos=False, min_tokens=4, sampling=replace(case.sampling, logit_bias=bias), stop=()
            )
        elif number % 5 == 4 and len(text := _answered(llm, case).answer.text) > 12:
            start = len(text) // 2
            yield replace(case, stop=("~no such text~", text[start : start + 4]), include_stop=number % 2 == 0)
        else:
            yield case


def _answered(llm: LLM, case: Case) -> AnsweredCase:
    results = llm.generate(
        [case.prompt],
        case.sampling,
        n=case.num_choices,
        limits=GenerationLimits(max_tokens=case.max_tokens, min_tokens=case.min_tokens, ignore_eos=case.ignore_eos),
        logprobs=case.logprobs,
        text=TextOptions(stop=case.stop, include_stop_str_in_output=case.include_stop),
    )
    result = results[case.observed]
    answer = Answer(
        num_other_tokens=sum(len(other.token_ids) for other in results if other is not result),
        num_prompt_tokens=len(result.prompt_token_ids),
        token_ids=result.token_ids,
        text=result.text,
        finish=result.finish,
        bits=tuple(bits_of_produced(result.tokens)) if case.logprobs is not None else (),
    )
    return AnsweredCase(case=case, answer=answer, request=case.request())


FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CONTEXT_LIMIT: common_pb2.FINISH_REASON_CONTEXT_LIMIT,
}
