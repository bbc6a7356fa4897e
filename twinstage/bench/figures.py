"""Figures for people, the same on the terminal and in the HTML report: rows of text."""

from __future__ import annotations

from twinstage.bench.results import Distribution, LoadResult

LATENCY_TITLES = ("", "mean", "p50", "p90", "p95", "p99", "max")
SWEEP_TITLES = (
    "load",
    "done",
    "failed",
    "requests/s",
    "output tokens/s",
    "TTFT p50",
    "TTFT p99",
    "inter-token p50",
    "inter-token p99",
    "end to end p50",
    "good",
)


def human_seconds(seconds: float | None) -> str:
    """A duration with three digits that count: 740 us, 31.2 ms, 4.05 s; "-" for none."""
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        value = seconds * factor
        if value < 999.5:
            return f"{value:.{0 if value >= 99.95 or not value else 1 if value >= 9.995 else 2}f} {unit}"
    return f"{seconds:.{1 if seconds >= 99.95 else 2}f} s"


def latency_rows(result: LoadResult) -> list[tuple[str, ...]]:
    """What clients see, then what the server says of the phases."""
    named: list[tuple[str, Distribution | None]] = [
        ("time to first token", result.ttft),
        ("inter-token gap", result.itl),
        ("time per output token", result.tpot),
        ("end to end", result.e2e),
    ]
    named += [(f"server: {name.replace('_', ' ')}", distribution) for name, distribution in result.server.items()]
    return [(name, *_cells(distribution)) for name, distribution in named if distribution is not None]


def total_rows(result: LoadResult) -> list[tuple[str, str]]:
    """Counts and rates by name."""
    counts, tokens = result.requests, result.tokens
    rows = [
        ("load", result.label + (" (interrupted)" if result.interrupted else "")),
        ("model", result.model),
        ("duration", human_seconds(result.duration_s)),
        ("requests", _counts_in_words(result)),
        ("requests/s", f"{result.requests_per_s:.2f}"),
        ("output tokens/s", f"{result.output_tokens_per_s:.1f}"),
        ("all tokens/s", f"{result.total_tokens_per_s:.1f}"),
    ]
    if result.steady_output_tokens_per_s is not None:
        rows.append(("output tokens/s while sending", f"{result.steady_output_tokens_per_s:.1f}"))
    rows.append(("tokens", f"{tokens.prompt:,} in, {tokens.output:,} out in {tokens.messages:,} messages"))
    if tokens.prompt:
        share = tokens.cached_prompt / tokens.prompt
        rows.append(("prompt tokens from a cache", f"{tokens.cached_prompt:,} ({share:.0%})"))
    if result.kv_bytes:
        rows.append(("KV moved", f"{result.kv_bytes / 2**20:,.1f} MiB"))
    if result.goodput is not None:
        good = result.goodput
        rows.append(("goodput", f"{good.requests_per_s:.2f} requests/s: {good.good:,} kept the SLO ({good.share:.1%})"))
    if counts.retried:
        rows.append(("retried by the router", f"{counts.retried:,}"))
    rows.append(("load generator", _generator_in_words(result)))
    return rows


def sweep_row(result: LoadResult) -> tuple[str, ...]:
    """One level of a sweep, under `SWEEP_TITLES`."""
    ttft, itl, e2e = result.ttft, result.itl, result.e2e
    return (
        result.label,
        f"{result.requests.succeeded:,}",
        f"{result.requests.failed:,}",
        f"{result.requests_per_s:.2f}",
        f"{result.output_tokens_per_s:.1f}",
        human_seconds(ttft.p50_s if ttft else None),
        human_seconds(ttft.p99_s if ttft else None),
        human_seconds(itl.p50_s if itl else None),
        human_seconds(itl.p99_s if itl else None),
        human_seconds(e2e.p50_s if e2e else None),
        f"{result.goodput.share:.1%}" if result.goodput else "-",
    )


def _cells(distribution: Distribution) -> tuple[str, ...]:
    values = (
        distribution.mean_s,
        distribution.p50_s,
        distribution.p90_s,
        distribution.p95_s,
        distribution.p99_s,
        distribution.max_s,
    )
    return tuple(human_seconds(value) for value in values)


def _counts_in_words(result: LoadResult) -> str:
    counts = result.requests
    parts = [f"{counts.sent:,} sent", f"{counts.succeeded:,} succeeded", f"{counts.failed:,} failed"]
    if counts.cancelled:
        parts.append(f"{counts.cancelled:,} cancelled")
    return ", ".join(parts)


def _generator_in_words(result: LoadResult) -> str:
    health = result.generator
    parts = [f"event loop busy {health.loop_share:.0%}"]
    if health.loop_lag is not None:
        parts.append(f"late by {human_seconds(health.loop_lag.p99_s)} at p99")
    if health.start_delay is not None:
        parts.append(f"requests sent {human_seconds(health.start_delay.p99_s)} after their time at p99")
    return ", ".join(parts)
