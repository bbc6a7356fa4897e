"""From the books of a run to what is shown while it goes on, and to its result."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from twinstage.bench.measure import Books
from twinstage.bench.monitor import generator_warnings
from twinstage.bench.options import LoadOptions
from twinstage.bench.results import GeneratorHealth, Goodput, LoadResult, RequestCounts, TokenCounts

_BARS = 40
_STEADY_SHARE = 0.5  # of a run; a shorter time of sending says nothing of a steady state
_STEADY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run in progress. Times in seconds; a percentile is None while there is nothing to take it of."""

    elapsed_s: float
    sent: int
    in_flight: int
    succeeded: int
    failed: int
    output_tokens: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None


def snapshot(books: Books) -> Snapshot:
    ttft, itl = books.ttft.distribution(), books.itl.distribution()
    return Snapshot(
        elapsed_s=books.clock() - books.start_s,
        sent=books.totals.sent,
        in_flight=books.in_flight,
        succeeded=books.totals.succeeded,
        failed=books.totals.failed,
        output_tokens=books.totals.output_tokens,
        ttft_p50_s=ttft.p50_s if ttft else None,
        ttft_p99_s=ttft.p99_s if ttft else None,
        itl_p50_s=itl.p50_s if itl else None,
        itl_p99_s=itl.p99_s if itl else None,
    )


def summarize(
    books: Books,
    *,
    options: LoadOptions,
    model: str,
    prompt_seed: int,
    started_at: float,
    interrupted: bool,
    health: GeneratorHealth,
) -> LoadResult:
    """The result of a run. `started_at` is Unix time."""
    totals, duration_s = books.totals, max(books.end_s - books.start_s, 1e-9)
    itl = books.itl.distribution()
    return LoadResult(
        label=options.label,
        started_at=datetime.datetime.fromtimestamp(started_at, datetime.UTC).isoformat(timespec="seconds"),
        model=model,
        concurrency=options.concurrency,
        rate_per_s=options.rate_per_s,
        prompt_seed=prompt_seed,
        duration_s=duration_s,
        interrupted=interrupted,
        requests=_request_counts(books),
        tokens=TokenCounts(
            prompt=totals.prompt_tokens,
            output=totals.output_tokens,
            cached_prompt=totals.cached_prompt_tokens,
            messages=totals.messages,
        ),
        kv_bytes=totals.kv_bytes,
        requests_per_s=totals.succeeded / duration_s,
        output_tokens_per_s=totals.output_tokens / duration_s,
        total_tokens_per_s=(totals.prompt_tokens + totals.output_tokens) / duration_s,
        steady_output_tokens_per_s=_steady_rate(books, duration_s),
        ttft=books.ttft.distribution(),
        itl=itl,
        tpot=books.tpot.distribution(),
        e2e=books.e2e.distribution(),
        server=books.server,
        goodput=_goodput(books, options, duration_s),
        errors=books.errors,
        generator=health,
        ttft_bars=books.ttft.bars(_BARS),
        itl_bars=books.itl.bars(_BARS),
        timeline_bin_s=books.timeline.bin_s,
        timeline=books.timeline.bins(),
        warnings=(*_warnings(books), *generator_warnings(health, itl)),
    )


def _request_counts(books: Books) -> RequestCounts:
    totals = books.totals
    return RequestCounts(
        sent=totals.sent,
        succeeded=totals.succeeded,
        failed=totals.failed,
        cancelled=totals.cancelled,
        capped=totals.capped,
        wrong_length=totals.wrong_length,
        retried=totals.retried,
    )


def _steady_rate(books: Books, duration_s: float) -> float | None:
    """Output tokens per second while requests were still being sent; None when that was too short a time."""
    if books.sending_end_s is None:
        return None
    sending_s = books.sending_end_s - books.start_s
    if sending_s < max(_STEADY_S, _STEADY_SHARE * duration_s):
        return None
    return books.sending_end_tokens / sending_s


def _goodput(books: Books, options: LoadOptions, duration_s: float) -> Goodput | None:
    if not options.slo.is_set:
        return None
    good, ended = books.totals.good, books.totals.succeeded + books.totals.failed
    return Goodput(good=good, requests_per_s=good / duration_s, share=good / ended if ended else 0.0)


def _warnings(books: Books) -> list[str]:
    totals = books.totals
    warnings: list[str] = []
    if totals.capped:
        warnings.append(
            f"{totals.capped} of {totals.sent} requests of the trace were cut to the model's context; --trace-scale "
            "makes all lengths smaller"
        )
    if totals.wrong_length:
        warnings.append(
            f"the server counted another number of prompt tokens than was meant for {totals.wrong_length} requests"
        )
    return warnings
