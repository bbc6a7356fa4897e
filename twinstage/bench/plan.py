"""What is sent, and when: decided purely, from options, seeds and a trace. Prompts are described, not yet made.

A prompt is a row of segments. The content of a segment is a pure function of its key, so two prompts share a prefix
exactly as far as their first segments are equal.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from twinstage.bench.options import Arrivals, LoadOptions
from twinstage.bench.trace import BLOCK_TOKENS, TraceEntry
from twinstage.client.options import Sampling
from twinstage.errors import ConfigError
from twinstage.types import GREEDY_TEMPERATURE

_LEAST_REQUESTS = 20
_DEFAULT_ROUNDS = 4  # of a closed loop
_DEFAULT_OPEN_S = 20.0  # of arrivals


@dataclass(frozen=True, slots=True)
class Segment:
    """`tokens` tokens of the content that `key` stands for."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request. `offset_s` is when it is sent, in seconds from the start; None: as soon as there is room."""

    offset_s: float | None
    segments: tuple[Segment, ...]
    output_tokens: int
    sampling: Sampling
    was_capped: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)


def number_of_requests(options: LoadOptions) -> int | None:
    """How many requests a run has; None when its duration or its trace decides."""
    if options.requests is not None or options.duration_s is not None or options.trace is not None:
        return options.requests
    if options.concurrency is not None:
        return max(_LEAST_REQUESTS, _DEFAULT_ROUNDS * options.concurrency)
    assert options.rate_per_s is not None
    return max(_LEAST_REQUESTS, round(_DEFAULT_OPEN_S * options.rate_per_s))


def plan(
    options: LoadOptions, *, namespace: str, max_model_len: int | None, trace: Sequence[TraceEntry] | None
) -> Iterator[PlannedRequest]:
    """The requests of a run in order, without end unless their number or a trace gives one.

    Prompts of different namespaces (warm-up, the levels of a sweep) have nothing in common but the shared prefix and
    what a trace shares. Raises ConfigError when lengths do not fit into the model's context.
    """
    if trace is not None:
        requests = _of_trace(options, trace, namespace=namespace, max_model_len=max_model_len)
    else:
        _check_lengths(options, max_model_len)
        requests = _random(options, namespace)
    if not options.is_closed and options.rate_per_s is not None:
        offsets = arrival_offsets(options.rate_per_s, options.arrivals, seed=options.seed)
        requests = (replace(request, offset_s=offset_s) for request, offset_s in zip(requests, offsets, strict=False))
    return itertools.islice(requests, number_of_requests(options))


def arrival_offsets(rate_per_s: float, arrivals: Arrivals, *, seed: int) -> Iterator[float]:
    """When requests arrive, in seconds from the first, which is at 0."""
    if arrivals is Arrivals.CONSTANT:
        for index in itertools.count():
            yield index / rate_per_s
    generator = random.Random(f"arrivals/{seed}")
    offset_s = 0.0
    while True:
        yield offset_s
        offset_s += generator.expovariate(rate_per_s)


def _random(options: LoadOptions, namespace: str) -> Iterator[PlannedRequest]:
    generator = random.Random(f"lengths/{options.seed}")
    for index in itertools.count():
        prompt_tokens = generator.randint(options.prompt_tokens.low, options.prompt_tokens.high)
        output_tokens = generator.randint(options.output_tokens.low, options.output_tokens.high)
        shared_tokens = min(options.shared_prefix_tokens, prompt_tokens)
        segments = (Segment("prefix", shared_tokens), Segment(f"{namespace}/{index}", prompt_tokens - shared_tokens))
        yield PlannedRequest(
            offset_s=None,
            segments=tuple(segment for segment in segments if segment.tokens),
            output_tokens=output_tokens,
            sampling=_sampling(options, index),
        )


def _of_trace(
    options: LoadOptions, trace: Sequence[TraceEntry], *, namespace: str, max_model_len: int | None
) -> Iterator[PlannedRequest]:
    assert options.trace is not None
    scale, speed = options.trace.scale, options.trace.speed
    for index, entry in enumerate(trace):
        wanted = max(1, round(entry.prompt_tokens / scale)), max(1, round(entry.output_tokens / scale))
        prompt_tokens, output_tokens = fit(*wanted, max_model_len=max_model_len)
        yield PlannedRequest(
            offset_s=None if options.is_closed else entry.offset_s / speed,
            segments=_blocks(entry, prompt_tokens, scale=scale) or (Segment(f"{namespace}/{index}", prompt_tokens),),
            output_tokens=output_tokens,
            sampling=_sampling(options, index),
            was_capped=(prompt_tokens, output_tokens) != wanted,
        )


def fit(prompt_tokens: int, output_tokens: int, *, max_model_len: int | None) -> tuple[int, int]:
    """Lengths that a context has room for. What is too long loses output down to half of the context, then prompt."""
    if max_model_len is None or prompt_tokens + output_tokens <= max_model_len:
        return prompt_tokens, output_tokens
    output_tokens = min(output_tokens, max(max_model_len - prompt_tokens, max_model_len // 2))
    return min(prompt_tokens, max_model_len - output_tokens), output_tokens


def _blocks(entry: TraceEntry, prompt_tokens: int, *, scale: float) -> tuple[Segment, ...]:
    """A segment for each block of the trace, scaled as lengths are, up to `prompt_tokens` in all."""
    segments: list[Segment] = []
    start = 0
    for number, block_id in enumerate(entry.block_ids, start=1):
        is_last = number == len(entry.block_ids)
        end = prompt_tokens if is_last else min(round(number * BLOCK_TOKENS / scale), prompt_tokens)
        if end > start:
            segments.append(Segment(f"block/{block_id}", end - start))
            start = end
    return tuple(segments)


def _sampling(options: LoadOptions, index: int) -> Sampling:
    """Every request has a seed of its own, derived from the run's; none where nothing is drawn."""
    temperature = options.sampling.temperature
    if options.sampling.seed is not None or (temperature is not None and temperature < GREEDY_TEMPERATURE):
        return options.sampling
    return replace(options.sampling, seed=random.Random(f"sampling/{options.seed}/{index}").getrandbits(31))


def _check_lengths(options: LoadOptions, max_model_len: int | None) -> None:
    longest = options.prompt_tokens.high + options.output_tokens.high
    if max_model_len is not None and longest > max_model_len:
        raise ConfigError(
            f"--prompt-tokens {options.prompt_tokens} and --output-tokens {options.output_tokens} need up to {longest} "
            f"tokens; the model's context has {max_model_len}"
        )
