"""Gaps between the tokens of running streams while a model on other workers encodes 10,000 sentences.

The cores are split: the decode worker has one half, the prefill workers of both models the other. What is left to share
is memory bandwidth, the router, and the clients.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator

from bench.engines.protocol import Prompts
from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.rows.gaps import Streams
from bench.serving import serving
from bench.summary import percentile, ratios
from twinstage.client import TwinstageClient
from twinstage.cpus import format_cpus
from twinstage.errors import InternalError
from twinstage.types import Truncation

_STREAMS = 4
_CONTEXT = 128  # tokens of the streams' own prompts
_SENTENCES, _QUICK_SENTENCES = 10_000, 400  # of all rounds together
_WORDS = (5, 160)  # of a sentence
_QUIET_S = 6.0  # before and after, as gaps grow with the streams
_TEXT = (
    "the sea was calm and a boat left harbour with nets ropes salt bread for three days while gulls followed it "
    "people on quay watched until only mast could be seen then went home to their work in town where bells rang"
)


def measure(context: Context) -> RowResult:
    quiet: list[float] = []
    busy: list[float] = []
    rates: list[float] = []
    per_round = (_QUICK_SENTENCES if context.quick else _SENTENCES) // context.rounds
    prompts = Prompts()
    cores = sorted(os.sched_getaffinity(0))
    halves = cores[: max(1, len(cores) // 2)], cores[len(cores) // 2 :]
    decode_flags, prefill_flags = (("--cpus", format_cpus(half), "--threads", str(len(half))) for half in halves)
    with (
        serving(
            context,
            models=("demo", "demo-embedding"),
            worker_flags=context.engines.own_flags,
            prefill_flags=prefill_flags,
            decode_flags=decode_flags,
        ) as cluster,
        TwinstageClient(cluster.address) as client,
    ):
        _encode(client, 64, seed=0)  # warm
        for round_number in range(context.rounds):
            context.progress(f"encode beside, round {round_number + 1}")
            streams = Streams(client)
            streams.start([prompts.next(_CONTEXT) for _ in range(_STREAMS)])
            windows = [time.monotonic()]
            time.sleep(_QUIET_S)
            windows.append(time.monotonic())
            _encode(client, per_round, seed=round_number + 1)
            windows.append(time.monotonic())
            time.sleep(_QUIET_S)
            windows.append(time.monotonic())
            streams.stop()
            before, beside, after = (streams.gaps_between(*window) for window in itertools.pairwise(windows))
            quiet.append(percentile(before + after, 0.99))
            busy.append(percentile(beside, 0.99))
            rates.append(per_round / (windows[2] - windows[1]))
    return _result(quiet, busy, rates, num_sentences=per_round * context.rounds)


def _encode(client: TwinstageClient, count: int, *, seed: int) -> None:
    """Embed so many sentences. Raises InternalError when one fails."""
    cut = Truncation(to_model_limit=True, keep_last=False)
    for result in client.embed_stream(_sentences(count, seed), truncation=cut):
        if result.error is not None:
            raise InternalError(f"a sentence was not embedded: {result.error}")


def _sentences(count: int, seed: int) -> Iterator[str]:
    source = random.Random(seed)
    words = _TEXT.split()
    return (" ".join(source.choices(words, k=source.randint(*_WORDS))) for _ in range(count))


def _result(quiet: list[float], busy: list[float], rates: list[float], *, num_sentences: int) -> RowResult:
    case = f"{_STREAMS} streams, {num_sentences:,} sentences of {_WORDS[0]} to {_WORDS[1]} words"
    gaps = [("quiet", quiet), ("encoding beside", busy)]
    measurements = [
        Measurement(
            case=name,
            engine="Twinstage",
            quantity="inter-token gap p99",
            unit="ms",
            values=[1e3 * value for value in values],
        )
        for name, values in gaps
    ]
    measurements.append(
        Measurement(case="encoding beside", engine="Twinstage", quantity="encoded", unit="sentences/s", values=rates)
    )
    comparison = Comparison(
        case=case,
        what="inter-token gap p99, encoding beside / quiet, cores split",
        values=ratios(busy, quiet),
        target=Target.at_most(1.2),
    )
    return RowResult(measurements=measurements, comparisons=[comparison])


ROW = Row(name="encode_beside", title="Gaps between tokens while another model encodes", measure=measure, limit_s=900)
