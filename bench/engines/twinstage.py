"""Twinstage's own engine on command: `python -m bench.engines.twinstage MODEL THREADS [OPTION=VALUE...]`.

The engine core of one process, as `twinstage.engine.llm.LLM` assembles it, with scheduler and sampler, but without
router and transfer. Options are those of `LlmOptions` that are text, such as `weights=int8`, and `deterministic=yes`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.engines.protocol import Handler, Prompts, serve
from twinstage.engine.core import StepOutput
from twinstage.engine.llm import LLM, LlmOptions
from twinstage.errors import InternalError
from twinstage.types import ProducedToken, RequestId, SamplingParameters, SequenceSpec

_KV_BYTES = 1_500 * 2**20  # 8 sequences of 2,000 tokens in float32, and a prompt of as many beside them
_MORE_TOKENS = 4_000  # nothing ends by itself while it is measured


class TwinstageEngine:
    """Answers the commands."""

    def __init__(self, model: str, threads: int, options: dict[str, str]) -> None:
        self._deterministic = options.pop("deterministic", "no") == "yes"
        self._llm = LLM(
            model,
            LlmOptions(
                threads=threads,
                kv_cache_bytes=_KV_BYTES,
                deterministic=self._deterministic,
                **options,  # type: ignore[arg-type]
            ),
        )
        self._core = self._llm.core
        self._options = options
        self._prompts = Prompts()
        self._numbers = itertools.count()
        self._contexts: dict[int, list[bytes]] = {}

    def describe(self) -> dict[str, Any]:
        import torch
        import transformers

        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        mode = ", deterministic" if self._deterministic else ""
        return {"name": f"Twinstage {self._options.get('weights', 'stock')}{mode}", "versions": versions}

    def prefill(self, tokens: int) -> dict[str, Any]:
        spec = self._spec(self._prompts.next(tokens), max_tokens=1)
        started_s = time.perf_counter()
        self._core.add(spec)
        while not self._step().chunks:
            pass
        return {"seconds": time.perf_counter() - started_s}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        with self._decoding(batch, context):
            started_s = time.perf_counter()
            for _ in range(steps):
                output = self._step()
                if len(output.chunks) != batch:
                    raise InternalError(f"a step made {len(output.chunks)} tokens for {batch} sequences")
            return {"seconds": time.perf_counter() - started_s}

    def gaps(self, streams: int, context: int, prompt: int, quiet_steps: int) -> dict[str, Any]:
        """Seconds between tokens of running streams: alone, and while a prompt is prefilled in the same process."""
        with self._decoding(streams, context):
            self._step()
            quiet = [self._step_seconds()[0] for _ in range(quiet_steps)]
            spec = self._spec(self._prompts.next(prompt), max_tokens=1)
            self._core.add(spec)
            busy = []
            while True:
                seconds, output = self._step_seconds()
                busy.append(seconds)
                if any(chunk.request_id == spec.request_id for chunk in output.chunks):
                    return {"quiet": quiet, "busy": busy}

    @contextmanager
    def _decoding(self, batch: int, context: int) -> Iterator[None]:
        """`batch` sequences that have `context` tokens and go on with each step."""
        blocks = self._context_blocks(context)
        try:
            for _ in range(batch):
                spec = self._spec(self._prompts.next(context))
                table = self._llm.pool.allocate(len(blocks), owner=spec.request_id)
                for block_id, data in zip(table.block_ids, blocks, strict=True):
                    self._llm.memory.block(block_id)[:] = data
                self._core.add_prefilled(spec, table, ProducedToken(token_id=1_000))
            yield
        finally:
            self._core.abort_all()

    def _context_blocks(self, context: int) -> list[bytes]:
        """Keys and values of one computed prompt; which tokens they are of makes no difference to the time."""
        if context not in self._contexts:
            spec = self._spec(self._prompts.next(context))
            self._core.add(spec)
            while not (output := self._step()).chunks:
                pass
            block_ids = output.computed[-1].block_ids
            self._contexts[context] = [bytes(self._llm.memory.block(block_id)) for block_id in block_ids]
            self._core.abort_all()
        return self._contexts[context]

    def _step_seconds(self) -> tuple[float, StepOutput]:
        started_s = time.perf_counter()
        output = self._step()
        return time.perf_counter() - started_s, output

    def _step(self) -> StepOutput:
        output = self._core.step()
        if output.failed:
            raise output.failed[0].error
        return output

    def _spec(self, prompt: list[int], max_tokens: int = _MORE_TOKENS) -> SequenceSpec:
        return SequenceSpec(
            request_id=RequestId(f"bench-{next(self._numbers)}"),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParameters(temperature=0.0),
            max_tokens=max_tokens,
        )


def load() -> dict[str, Handler]:
    model, threads, *options = sys.argv[1:]
    engine = TwinstageEngine(model, int(threads), dict(option.split("=", 1) for option in options))
    return {
        "describe": engine.describe,
        "prefill": engine.prefill,
        "decode": engine.decode,
        "gaps": engine.gaps,
    }


if __name__ == "__main__":
    serve(load)
