"""llama.cpp on command, through its C interface: `python -m bench.engines.llama_cpp MODEL.gguf THREADS`.

Runs in llama.cpp's own virtual environment. Sequences have KV streams of their own (`kv_unified` off), which is
faster for several sequences and lets a prompt be computed once and copied to all of them. Flash attention is tried on
and off in every case, and what was faster is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from bench.engines.protocol import Handler, Prompts, serve

_FLASH = {
    "flash attention": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "no flash attention": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_ROOM = 64  # tokens that a context has room for beyond what is measured
_BATCH = 2048  # llama.cpp's own default; a longer prompt is given to it in parts
_TRIALS = 2


class LlamaContext:
    """A context for `sequences` sequences of `length` tokens each."""

    def __init__(self, model: Any, *, sequences: int, length: int, threads: int, flash: int) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = sequences * -(-(length + _ROOM) // 256) * 256
        parameters.n_seq_max = sequences
        parameters.n_batch = _BATCH
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.flash_attn_type = flash
        parameters.kv_unified = False
        parameters.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise MemoryError(f"llama.cpp makes no context for {sequences} sequences of {length} tokens")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._sequences = sequences
        self._tokens: list[int] = []
        self._prompt_length = 0

    def prefill(self, prompt: list[int]) -> int:
        """Compute a prompt as sequence 0 and return the token after it."""
        for start in range(0, len(prompt), _BATCH):
            part = prompt[start : start + _BATCH]
            last = start + len(part) == len(prompt)
            for index, token in enumerate(part):
                self._put(index, token, start + index, 0, wanted=last and index == len(part) - 1)
            self._run(len(part))
        return int(llama_cpp.llama_sampler_sample(self._sampler, self._context, self._batch.n_tokens - 1))

    def logits(self, window: list[int], vocabulary: int) -> np.ndarray:
        """Logits `[tokens, vocabulary]` after each token of a window that fits one batch."""
        self.forget()
        for index, token in enumerate(window):
            self._put(index, token, index, 0, wanted=True)
        self._run(len(window))
        found = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(found, shape=(len(window), vocabulary)).copy()

    def forget(self) -> None:
        """Empty the cache."""
        llama_cpp.llama_memory_clear(self._memory, False)

    def begin(self, prompt: list[int]) -> None:
        """Give every sequence `prompt` as its context."""
        self._tokens = [self.prefill(prompt)] * self._sequences
        for sequence in range(1, self._sequences):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        self._prompt_length = len(prompt)

    def decode(self, steps: int) -> None:
        """Go on for some steps, all sequences in a batch."""
        for position in range(self._prompt_length, self._prompt_length + steps):
            for index, token in enumerate(self._tokens):
                self._put(index, token, position, index, wanted=True)
            self._run(self._sequences)
            self._tokens = [
                llama_cpp.llama_sampler_sample(self._sampler, self._context, index) for index in range(self._sequences)
            ]

    def rewind(self) -> None:
        """Forget what `decode` added."""
        for sequence in range(self._sequences):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, self._prompt_length, -1)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_sampler_free(self._sampler)
        llama_cpp.llama_free(self._context)

    def _put(self, index: int, token: int, position: int, sequence: int, *, wanted: bool) -> None:
        batch = self._batch
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = wanted

    def _run(self, num_tokens: int) -> None:
        self._batch.n_tokens = num_tokens
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")


class LlamaEngine:
    """Answers the commands. Keeps the context of the last case, as its prompt takes long to compute."""

    def __init__(self, model_path: Path, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(model_path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise FileNotFoundError(f"llama.cpp cannot load {model_path}")
        self._precision = model_path.stem.rsplit(".", 1)[-1]
        self._threads = threads
        self._prompts = Prompts()
        self._case: object = None
        self._context: LlamaContext | None = None
        self._choice = ""

    def describe(self) -> dict[str, Any]:
        features = llama_cpp.llama_print_system_info().decode().replace(" = 1", "").strip(" |")
        versions = {"llama-cpp-python": llama_cpp.__version__, "llama.cpp built with": features}
        return {"name": f"llama.cpp {self._precision}", "versions": versions}

    def prefill(self, tokens: int) -> dict[str, Any]:
        def trial(context: LlamaContext) -> float:
            prompt = self._prompts.next(tokens)
            context.forget()
            return _seconds(lambda: context.prefill(prompt))

        context = self._prepare(("prefill", tokens), sequences=1, length=tokens, trial=trial)
        return {"seconds": trial(context), "choice": self._choice}

    def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
        def trial(llama: LlamaContext, num_steps: int = 2) -> float:
            try:
                return _seconds(lambda: llama.decode(num_steps))
            finally:
                llama.rewind()

        prompt = self._prompts.next(context)
        llama = self._prepare(
            ("decode", batch, context, steps),
            sequences=batch,
            length=context + steps,
            trial=trial,
            begin=lambda llama: llama.begin(prompt),
        )
        return {"seconds": trial(llama, steps), "choice": self._choice}

    def logits(self, windows: list[list[int]], path: str) -> dict[str, Any]:
        """Write float32 logits `[windows, tokens, vocabulary]` after each token of equally long windows to `path`."""
        vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        context = LlamaContext(
            self._model, sequences=1, length=len(windows[0]), threads=self._threads, flash=_FLASH["flash attention"]
        )
        try:
            np.save(path, np.stack([context.logits(window, vocabulary) for window in windows]))
        finally:
            context.close()
        return {}

    def _prepare(
        self,
        case: object,
        *,
        sequences: int,
        length: int,
        trial: Callable[[LlamaContext], float],
        begin: Callable[[LlamaContext], None] = lambda llama: None,
    ) -> LlamaContext:
        """The context of a case, with the kind of attention that a few trials show to be faster."""
        if self._context is not None and case == self._case:
            return self._context
        if self._context is not None:
            self._context.close()
            self._context = None
        found: list[tuple[float, str, LlamaContext]] = []
        for choice, flash in _FLASH.items():
            context = LlamaContext(self._model, sequences=sequences, length=length, threads=self._threads, flash=flash)
            begin(context)
            trial(context)  # the first one also touches the memory
            found.append((min(trial(context) for _ in range(_TRIALS)), choice, context))
        found.sort(key=lambda entry: entry[0])
        for _, _, context in found[1:]:
            context.close()
        _, self._choice, self._context = found[0]
        self._case = case
        return self._context


def _seconds(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def load() -> dict[str, Handler]:
    engine = LlamaEngine(Path(sys.argv[1]), int(sys.argv[2]))
    return {
        "describe": engine.describe,
        "prefill": engine.prefill,
        "decode": engine.decode,
        "logits": engine.logits,
    }


if __name__ == "__main__":
    serve(load)
