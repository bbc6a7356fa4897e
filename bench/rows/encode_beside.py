"""Gaps between the tokens of running streams while a model on other workers encodes 10,000 sentences.

The cores are split: the decode worker has one half, the prefill workers of both models the other, and so have the
clients, which would be on other machines. What is left to share is memory bandwidth and the router.

Gaps grow with the streams' contexts, so quiet and busy times are compared at the same ones: each lasts as long as the
other, from the beginning of new streams on, and they take turns.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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
_SEGMENT = 500  # sentences that are encoded beside the same streams
_TEXT = (
    "the sea was calm and a boat left harbour with nets ropes salt bread for three days while gulls followed it "
    "people on quay watched until only mast could be seen then went home to their work in town where bells rang"
)


def measure(context: Context) -> RowResult:
    rounds: list[Round] = []
    num_sentences = _QUICK_SENTENCES if context.quick else _SENTENCES
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
        _clients_on(halves[1]),
        TwinstageClient(cluster.address) as client,
    ):
        _encode(client, 64, seed=0)  # warm
        for round_number in range(context.rounds):
            context.progress(f"encode beside, round {round_number + 1}")
            rounds.append(Round())
            for segment in _segments(num_sentences // context.rounds):
                prompts_of_streams = [prompts.next(_CONTEXT) for _ in range(_STREAMS)]
                rounds[-1].compare(client, prompts_of_streams, num_sentences=segment)
    return result_of(rounds)


@dataclass(slots=True, kw_only=True)
class Round:
    """Gaps in seconds, and how long encoding took."""

    quiet: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    num_sentences: int = 0
    encoding_s: float = 0.0

    def compare(self, client: TwinstageClient, prompts: list[list[int]], *, num_sentences: int) -> None:
        """Encode so many sentences beside streams of these prompts, then let the same streams run alone as long."""
        self.num_sentences += num_sentences
        with _streaming(client, prompts) as streams:
            started_s = time.monotonic()
            _encode(client, num_sentences, seed=self.num_sentences)
            duration_s = time.monotonic() - started_s
            self.busy += streams.gaps_between(started_s, started_s + duration_s)
        self.encoding_s += duration_s
        with _streaming(client, prompts) as streams:
            started_s = time.monotonic()
            time.sleep(duration_s)
            self.quiet += streams.gaps_between(started_s, started_s + duration_s)


@contextmanager
def _streaming(client: TwinstageClient, prompts: list[list[int]]) -> Iterator[Streams]:
    streams = Streams(client)
    streams.start(prompts)
    try:
        yield streams
    finally:
        streams.stop()


@contextmanager
def _clients_on(cpus: Sequence[int]) -> Iterator[None]:
    """The threads that this one starts meanwhile run on these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _segments(num_sentences: int) -> Iterator[int]:
    for start in range(0, num_sentences, _SEGMENT):
        yield min(_SEGMENT, num_sentences - start)


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


def result_of(rounds: Sequence[Round]) -> RowResult:
    quiet = [percentile(one.quiet, 0.99) for one in rounds]
    busy = [percentile(one.busy, 0.99) for one in rounds]
    rates = [one.num_sentences / one.encoding_s for one in rounds]
    num_sentences = sum(one.num_sentences for one in rounds)
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
