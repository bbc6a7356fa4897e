"""A load generator for serving systems: closed and open loop, over gRPC and over OpenAI-compatible HTTP.

    options -> plan (what is sent, when) -> runner -> target (one server) -> measure -> results -> report

    result = await run_load(LoadOptions(addresses=("localhost:50051",), concurrency=16, requests=200))
    print(result.output_tokens_per_s, result.ttft.p50_s)

Needs neither torch nor Transformers.
"""

from __future__ import annotations

from twinstage.bench.options import Arrivals, LoadOptions, PromptForm, Protocol, Slo, TokenRange, TraceOptions
from twinstage.bench.results import Distribution, LoadResult, RequestRecord
from twinstage.bench.runner import run_load
from twinstage.bench.sweep import run_sweep

__all__ = [
    "Arrivals",
    "Distribution",
    "LoadOptions",
    "LoadResult",
    "PromptForm",
    "Protocol",
    "RequestRecord",
    "Slo",
    "TokenRange",
    "TraceOptions",
    "run_load",
    "run_sweep",
]
