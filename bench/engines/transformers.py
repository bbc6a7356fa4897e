"""Stock Transformers on command: `python -m bench.engines.transformers DIRECTORY THREADS`.

As its documentation has it for one process: float32, `DynamicCache`, its default attention, no compilation.
"""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import numpy as np
import torch
import transformers

from bench.engines.protocol import Handler, Prompts, serve


class TransformersEngine:
    """Answers the commands. Keeps the cache of the last prompt that decoding began with."""

    def __init__(self, directory: str, threads: int) -> None:
        torch.set_num_threads(threads)
        model_class: Any = transformers.AutoModelForCausalLM
        self._model = model_class.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        self._prompts = Prompts()
        self._context: tuple[int, Any] | None = None

    def describe(self) -> dict[str, Any]:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {"name": "Transformers fp32", "versions": versions}

    def prefill(self, tokens: int) -> dict[str, Any]:
        prompt = torch.tensor([self._prompts.next(tokens)])
        started_s = time.perf_counter()
        self._next(prompt, transformers.DynamicCache()).tolist()
        return {"seconds": time.perf_counter() - started_s}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        if self._context is None or self._context[0] != context:
            cache = transformers.DynamicCache()
            self._next(torch.tensor([self._prompts.next(context)]), cache)
            self._context = context, cache
        cache = copy.deepcopy(self._context[1])
        cache.batch_repeat_interleave(batch)
        tokens = torch.full((batch, 1), 1_000)
        started_s = time.perf_counter()
        for _ in range(steps):
            tokens = self._next(tokens, cache)
        return {"seconds": time.perf_counter() - started_s}

    @torch.inference_mode()
    def logits(self, windows: list[list[int]], path: str) -> dict[str, Any]:
        """Write float32 logits `[windows, tokens, vocabulary]` after each token of equally long windows to `path`."""
        np.save(path, self._model(input_ids=torch.tensor(windows), use_cache=False).logits.numpy())
        return {}

    @torch.inference_mode()
    def _next(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        """The most likely next tokens `[batch, 1]` after `tokens` `[batch, length]`."""
        logits = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)  # type: ignore[no-any-return]


def load() -> dict[str, Handler]:
    engine = TransformersEngine(sys.argv[1], int(sys.argv[2]))
    return {"describe": engine.describe, "prefill": engine.prefill, "decode": engine.decode, "logits": engine.logits}


if __name__ == "__main__":
    serve(load)
