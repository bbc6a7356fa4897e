"""Embedding with all-MiniLM-L6-v2 through the service, beside sentence-transformers' `encode` in this process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.serving import READY_S
from twinstage.cli.cluster import Cluster
from twinstage.cli.cluster_config import ClusterConfig
from twinstage.client import TwinstageClient
from twinstage.models.resolve import resolve_model
from twinstage.types import Truncation

_SENTENCES, _QUICK_SENTENCES, _ALONE = 256, 64, 15
_TEXT = (
    "the river carried small boats past a village where every baker knew what people wanted to eat before winter and "
    "nobody asked how many letters a postman reads while dogs sleep under old trees near quiet stations at night"
)
_PEER = "sentence-transformers"
_PRECISIONS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--weights", "int8"),
}  # flags of workers
_LEAST_RATIO = {"float32": 1.6, "bfloat16": 2.0, "int8": 2.0}
_MOST_ALONE = 0.8
_LEAST_COSINE = 0.999

_Embed = Callable[[list[str]], Any]


def measure(context: Context) -> RowResult:
    texts = make_sentences(_QUICK_SENTENCES if context.quick else _SENTENCES)
    peer = _load_peer(context.engines.threads) if context.peers is not None else None
    notes = [] if peer is not None else ["Without sentence-transformers, which is not installed or not wanted."]
    seconds: dict[tuple[str, str], list[float]] = {}
    vectors: dict[str, np.ndarray[Any, Any]] = {}
    with ExitStack() as stack:
        embed: dict[str, _Embed] = {
            precision: _embedder(stack.enter_context(_serving(context, precision))) for precision in _PRECISIONS
        }
        if peer is not None:
            embed[_PEER] = lambda some: peer.encode(some, show_progress_bar=False)
        for round_number in range(-1, context.rounds):
            context.progress(f"encode, round {round_number + 1}")
            for engine, run in embed.items():
                for case, batches in (("many", [texts]), ("alone", [[text] for text in texts[:_ALONE]])):
                    taken = sorted(_seconds(run, batch) for batch in batches)
                    if round_number >= 0:
                        seconds.setdefault((case, engine), []).append(taken[len(taken) // 2])
                vectors[engine] = np.asarray(run(texts))
    cosines = {
        precision: float((vectors["float32"] * vectors[precision]).sum(axis=1).min())
        for precision in _PRECISIONS
        if precision != "float32"
    }
    return result_of(seconds, len(texts), cosines, notes)


def result_of(
    seconds: dict[tuple[str, str], list[float]], count: int, cosines: dict[str, float], notes: list[str]
) -> RowResult:
    """`seconds` of each round by case ("many", "alone") and engine; `cosines` are the least ones to float32."""
    name = f"{count} sentences of 5 to 160 words"
    measurements, comparisons = [], []
    for (case, engine), values in seconds.items():
        label = engine if engine == _PEER else f"Twinstage {engine}"
        if case == "many":
            rates = [count / value for value in values]
            measurements.append(
                Measurement(case=name, engine=label, quantity="throughput", unit="sentences/s", values=rates)
            )
        else:
            milliseconds = [1000 * value for value in values]
            measurements.append(
                Measurement(case="one sentence", engine=label, quantity="p50", unit="ms", values=milliseconds)
            )
    for engine, least in _LEAST_RATIO.items():
        if ("many", _PEER) in seconds:
            pairs = zip(seconds["many", _PEER], seconds["many", engine], strict=True)
            comparisons.append(
                Comparison(
                    case=name,
                    what=f"throughput, Twinstage {engine} / {_PEER}",
                    values=[theirs / own for theirs, own in pairs],
                    target=Target.at_least(least),
                )
            )
        if ("alone", _PEER) in seconds:
            pairs = zip(seconds["alone", _PEER], seconds["alone", engine], strict=True)
            comparisons.append(
                Comparison(
                    case="one sentence",
                    what=f"p50, Twinstage {engine} / {_PEER}",
                    values=[own / theirs for theirs, own in pairs],
                    target=Target.at_most(_MOST_ALONE),
                )
            )
    comparisons += [
        Comparison(
            case=name,
            what=f"least cosine, Twinstage {precision} to float32",
            values=[cosine],
            target=Target.at_least(_LEAST_COSINE),
        )
        for precision, cosine in cosines.items()
    ]
    return RowResult(measurements=measurements, comparisons=comparisons, notes=notes)


def make_sentences(count: int) -> list[str]:
    """Sentences of 5 to 160 words, always the same."""
    generator = random.Random(7)
    return [" ".join(generator.choices(_TEXT.split(), k=generator.randint(5, 160))) for _ in range(count)]


@contextmanager
def _serving(context: Context, precision: str) -> Iterator[TwinstageClient]:
    context.progress(f"starting a cluster in {precision}")
    config = ClusterConfig(
        models=("demo-embedding",),
        port=0,
        threads=context.engines.threads,
        prefill_flags=_PRECISIONS[precision],
        log_directory=context.engines.log_directory,
    )
    with Cluster(config) as cluster:
        cluster.wait_ready(timeout_s=READY_S)
        with TwinstageClient(cluster.address) as client:
            yield client


def _embedder(client: TwinstageClient) -> _Embed:
    cut = Truncation(to_model_limit=True, keep_last=False)
    return lambda texts: client.embed(texts, truncation=cut).vectors


def _seconds(run: _Embed, texts: list[str]) -> float:
    started_s = time.perf_counter()
    run(texts)
    return time.perf_counter() - started_s


def _load_peer(threads: int) -> Any:
    try:
        import torch
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return None
    torch.set_num_threads(threads)
    return SentenceTransformer(str(resolve_model("demo-embedding").directory), device="cpu")


ROW = Row(name="encode", title="Embedding", measure=measure, limit_s=400, quick=False)
