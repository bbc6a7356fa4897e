"""The engine in one process, without router or transfer: the reference that the disaggregated path must equal.

llm = LLM("demo")
for result in llm.generate(["Hello"], SamplingParameters(temperature=0.0), max_tokens=16):
    print(result.text)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from twinstage.engine.choices import choice_id
from twinstage.engine.core import EngineCore
from twinstage.engine.llm_job import GenerationResult, Job
from twinstage.engine.open_speculation import OpenSpeculation, Target, open_speculation
from twinstage.engine.output import EngineConfig, StepOutput
from twinstage.engine.runner import choose_runner
from twinstage.engine.speculation import SpeculationOptions
from twinstage.errors import ConfigError, IntegrityError, InternalError, InvalidRequest
from twinstage.grammar.compiled import CompiledGrammars
from twinstage.grammar.resolve import resolve_constraint
from twinstage.grammar.shape import shape_violations
from twinstage.kv.block_pool import BlockPool
from twinstage.kv.memory import BlockMemory
from twinstage.kv.prefix_index import PrefixHasher
from twinstage.models.choose import load_chosen
from twinstage.models.resolve import resolve_model
from twinstage.text.bundle import read_bundle
from twinstage.text.stream import TextStream
from twinstage.text.tokenizer import TextTokenizer
from twinstage.types import RequestId, SamplingParameters, SequenceSpec, TextOptions
from twinstage.types.constraints import OutputConstraint, RawStructuredOutput

if TYPE_CHECKING:
    from twinstage.models.adapt import PagedModel
    from twinstage.models.fused.model import FusedModel

__all__ = ["LLM", "GenerationLimits", "GenerationResult", "LlmOptions"]

_DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmOptions:
    """How to load and run a model; lengths in tokens. `weights` is one of stock, auto, fp32 and int8.

    `threads` None leaves the process's number as it is.
    `prefix_cache` lets later prompts begin with what earlier ones computed; `prefix_hit_multiple` as in EngineConfig.
    Off by default, as results are compared with those of this class: it computes everything anew.
    `speculation` guesses tokens ahead, which changes how fast tokens come and not which.
    `deterministic`: the same request gives the same tokens and logprobs, bit by bit, whatever else is computed with it.
    """

    revision: str | None = None
    cache_directory: Path | None = None
    max_model_len: int | None = None
    weights: str = "stock"  # the reference
    dtype: str = "float32"
    kv_dtype: str = "auto"
    threads: int | None = None
    block_size: int = 16
    kv_cache_bytes: int = 512 * 1024 * 1024
    max_num_sequences: int = 64
    max_tokens_per_step: int = 512
    prefix_cache: bool = False
    prefix_hit_multiple: int = 1
    deterministic: bool = False
    speculation: SpeculationOptions | None = None
    progress: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """When a generation ends. `stop_token_ids` come on top of the model's own, which `ignore_eos` switches off."""

    max_tokens: int = _DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


class LLM:
    """A model with an engine of its own. `generate` may be called again and again, from one thread.

    Raises ConfigError and ModelError as the loading does.
    """

    def __init__(self, model: str, options: LlmOptions | None = None) -> None:
        options = options or LlmOptions()
        resolved = resolve_model(
            model, options.revision, cache_directory=options.cache_directory, progress=options.progress
        )
        self.tokenizer = TextTokenizer(read_bundle(resolved.directory))
        self._grammars = CompiledGrammars(self.tokenizer.bundle)
        self._model = load_chosen(
            resolved,
            weights=options.weights,
            cache_directory=options.cache_directory,
            max_model_len=options.max_model_len,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            threads=options.threads,
            progress=options.progress,
        )
        self.max_model_len = self._model.max_model_len
        self._layout = self._model.kv_layout(options.block_size)
        num_blocks = options.kv_cache_bytes // self._layout.block_bytes
        if num_blocks < 1:
            raise ConfigError(f"kv_cache_bytes must be at least {self._layout.block_bytes}, the size of one block")
        self.pool = BlockPool(num_blocks)
        self.memory = BlockMemory.create(num_blocks=num_blocks, block_bytes=self._layout.block_bytes)
        chosen = choose_runner(
            self._model,
            self._layout,
            self.memory,
            deterministic=options.deterministic,
            chunk_size=options.max_tokens_per_step,
        )
        self.numerics = chosen.numerics  # what decides the bits of a result, in deterministic mode
        config = EngineConfig(
            max_num_sequences=options.max_num_sequences,
            max_tokens_per_step=options.max_tokens_per_step,
            max_model_len=self.max_model_len,
            block_size=options.block_size,
            prefix_hit_multiple=options.prefix_hit_multiple,
            fixed_passes=chosen.fixed_passes,
        )
        hasher = PrefixHasher(self._layout.fingerprint, block_size=options.block_size) if options.prefix_cache else None
        self._guesses = _open_guesses(options, resolved.name, self._model, self.tokenizer, chosen.fixed_passes)
        self.core = EngineCore(
            chosen.runner,
            self.pool,
            config,
            hasher=hasher,
            copy_block=self.memory.copy_block,
            speculation=self._guesses.speculation if self._guesses is not None else None,
        )
        self._request_numbers = itertools.count()
        self._closed = False

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParameters | None = None,
        *,
        n: int = 1,
        max_tokens: int = _DEFAULT_MAX_TOKENS,
        limits: GenerationLimits | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        text: TextOptions | None = None,
        structured_output: RawStructuredOutput | None = None,
    ) -> list[GenerationResult]:
        """Continue every prompt (text or token ids), all together, and return the results in the same order.

        Of each prompt there are `n` results in a row, which differ in the random numbers alone. Every output obeys
        `structured_output`, whose grammar is compiled here, without limits of time and memory. `limits` replaces
        `max_tokens` where more is to be said. Raises the error of the first prompt that fails, after ending the others;
        no block stays in use in any case. Raises InternalError after `close`.
        """
        if self._closed:
            raise InternalError("this LLM is closed")
        limits = limits or GenerationLimits(max_tokens=max_tokens)
        constraint = self._constraint(structured_output)
        specs: list[SequenceSpec] = []
        jobs: dict[RequestId, Job] = {}  # by choice
        for prompt in prompts:
            spec = self._spec(prompt, sampling or SamplingParameters(), limits)
            specs.append(
                replace(spec, logprobs=logprobs, prompt_logprobs=prompt_logprobs, num_choices=n, constraint=constraint)
            )
            for index in range(n):
                stream = TextStream(self.tokenizer, text or TextOptions(), limits.min_tokens)
                jobs[choice_id(spec.request_id, index)] = Job(spec, stream)
        try:
            for spec in specs:
                matcher = self._grammars.start_now(constraint) if constraint is not None else None
                self.core.add(spec, matcher=matcher)
            while self.core.has_work:
                self._deliver(self.core.step(), jobs)
        finally:
            self.core.abort_all()
        # Choices share their prompt, so each has its log probabilities, which were computed for the first one.
        return [job.result(scores=jobs[job.spec.request_id].scores) for job in jobs.values()]

    def close(self) -> None:
        """End the model's threads, check the pool's books and give the KV memory back. Idempotent.

        Raises IntegrityError when a block leaked.
        """
        self._closed = True
        self._model.close()
        if self._guesses is not None:
            self._guesses.close()
        self._grammars.close()
        self.pool.check_integrity()
        self.memory.close()
        if self.pool.num_free != self.pool.num_blocks:
            raise IntegrityError(f"{self.pool.num_blocks - self.pool.num_free} KV blocks are still in use")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _spec(
        self, prompt: str | Sequence[int], sampling: SamplingParameters, limits: GenerationLimits
    ) -> SequenceSpec:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        model_stops = () if limits.ignore_eos else self.tokenizer.bundle.eos_token_ids
        return SequenceSpec(
            request_id=RequestId(f"local-{next(self._request_numbers)}"),
            prompt_token_ids=tuple(token_ids),
            sampling=sampling,
            max_tokens=limits.max_tokens,
            min_tokens=limits.min_tokens,
            stop_token_ids=limits.stop_token_ids.union(model_stops),
        )

    def _constraint(self, raw: RawStructuredOutput | None) -> OutputConstraint | None:
        if raw is None:
            return None
        if violations := list(shape_violations(raw)):
            raise InvalidRequest(violations)
        return resolve_constraint(raw, self.tokenizer)

    def _deliver(self, output: StepOutput, jobs: dict[RequestId, Job]) -> None:
        if output.failed:
            raise output.failed[0].error
        if output.is_empty and output.num_computed_tokens == 0:
            raise InternalError("the engine has work but computes nothing")
        for scored in output.scored:
            jobs[scored.request_id].scores.extend(scored.logprobs.tokens())
        for stats in output.finished:
            jobs[stats.request_id].stats = stats
        for chunk in output.chunks:
            job = jobs[chunk.request_id]
            job.take(job.stream.push(chunk))
            if job.finish is not None and chunk.finish is None:  # a stop string, which workers know nothing of
                self.core.abort(chunk.request_id)


def _open_guesses(
    options: LlmOptions, name: str, model: PagedModel | FusedModel, tokenizer: TextTokenizer, fixed_passes: bool
) -> OpenSpeculation | None:
    if options.speculation is None:
        return None
    target = Target(
        name=name,
        bundle=tokenizer.bundle,
        vocab_size=model.vocab_size,
        weight_bytes=model.weight_bytes,
        max_model_len=model.max_model_len,
        block_size=options.block_size,
        fixed_passes=fixed_passes,
        threads=options.threads,
        cache_directory=options.cache_directory,
        progress=options.progress,
    )
    return open_speculation(options.speculation, target)
