"""What a load run found out. Times are seconds; a distribution is None where nothing of its kind was seen."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of many durations: how many, mean, extremes and percentiles (nearest rank, within 0.05 %)."""

    count: int
    mean_s: float
    min_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Durations above the bar before, up to `upper_s`: how many."""

    upper_s: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """What became of the requests. `capped` had a trace's lengths cut to the context; `wrong_length` are those whose
    prompt the server counted differently.
    """

    sent: int
    succeeded: int
    failed: int
    cancelled: int = 0
    capped: int = 0
    wrong_length: int = 0
    retried: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens. `output` counts all that arrived, of requests that failed later too."""

    prompt: int
    output: int
    cached_prompt: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCount:
    """Failures of one kind, with the message of the first."""

    code: str
    reason: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that kept every limit of the SLO, per second and as a share of all that were not cancelled."""

    good: int
    requests_per_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBin:
    """One slice of the run, of the run's `timeline_bin_s` seconds. Gaps are None where no token followed another."""

    start_s: float
    output_tokens: int
    finished: int
    failed: int
    in_flight: int
    gap_p50_s: float | None
    gap_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorHealth:
    """The load generator's own part. `loop_share` is the CPU time of its event loop's thread by wall time,
    `cpu_share` that of its whole process; `loop_lag` is how late the loop came to a timer, `start_delay` how long
    after its scheduled time a request was sent.
    """

    loop_share: float
    cpu_share: float
    loop_lag: Distribution | None
    start_delay: Distribution | None


class Outcome(enum.Enum):
    """How a request ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. `offset_s` is when it was due, from the start of the run; `sent_s`, `ttft_s` and `e2e_s` count from
    then. Of a request that did not succeed, `prompt_tokens` is what was meant to be sent.
    """

    offset_s: float
    sent_s: float
    ttft_s: float | None
    mean_gap_s: float | None
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    outcome: Outcome
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One load run. Latencies count from the time for which a request was scheduled, not from when it was sent.

    `ttft` time to first token; `itl` gap between two messages with tokens; `tpot` mean time per output token after
    the first, per request; `e2e` until the stream's end, of requests that succeeded. `server` has what summaries say
    of the phases. `duration_s` goes from the first request's scheduled time to the last answer's end; the `steady`
    rate counts only the time in which new requests were still being sent.
    """

    label: str
    started_at: str
    model: str
    concurrency: int | None
    rate_per_s: float | None
    prompt_seed: int
    duration_s: float
    interrupted: bool
    requests: RequestCounts
    tokens: TokenCounts
    kv_bytes: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    steady_output_tokens_per_s: float | None
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    server: dict[str, Distribution]
    goodput: Goodput | None
    errors: tuple[ErrorCount, ...]
    generator: GeneratorHealth
    ttft_bars: tuple[Bar, ...]
    itl_bars: tuple[Bar, ...]
    timeline_bin_s: float
    timeline: tuple[TimelineBin, ...]
    warnings: tuple[str, ...] = ()
