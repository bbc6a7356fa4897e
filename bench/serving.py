"""Real clusters for rows, and single requests with a clock beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bench.row import Context
from twinstage.cli.cluster import Cluster
from twinstage.cli.cluster_config import ClusterConfig
from twinstage.client import Options, Output, Sampling, Stopping, TwinstageClient
from twinstage.client.results import Summary
from twinstage.errors import InternalError
from twinstage.types import TokenPrompt

READY_S = 180.0


@contextmanager
def serving(
    context: Context,
    *,
    models: Sequence[str] = ("demo",),
    threads: int | None = None,
    kv_cache_bytes: str = "1GiB",
    worker_flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
) -> Iterator[Cluster]:
    """A router, one prefill and one decode worker for each model that generates, as `twinstage serve` starts them.

    By default each worker is bound to its share of the cores; with `threads` it computes with so many, on any of them.
    """
    context.progress("starting a cluster")
    config = ClusterConfig(
        models=tuple(models),
        port=0,
        threads=threads,
        pin_cpus=True,
        kv_cache_bytes=kv_cache_bytes,
        prefill_flags=(*worker_flags, *prefill_flags),
        decode_flags=(*worker_flags, *decode_flags),
        log_directory=context.engines.log_directory,
    )
    with Cluster(config) as cluster:
        cluster.wait_ready(timeout_s=READY_S)
        yield cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """When tokens came, in seconds of the monotonic clock; `times[0]` is the first token's."""

    sent_s: float
    times: tuple[float, ...]
    summary: Summary

    @property
    def time_to_first_token_s(self) -> float:
        return self.times[0] - self.sent_s


def timed_request(client: TwinstageClient, prompt: Sequence[int], *, max_tokens: int) -> TimedRequest:
    """One greedy request that ends after `max_tokens`. Raises InternalError when a stream brings no token."""
    times: list[float] = []
    sent_s = time.monotonic()
    with client.generate_stream(TokenPrompt(token_ids=tuple(prompt)), greedy(max_tokens)) as stream:
        for delta in stream:
            times += [time.monotonic()] * len(delta.token_ids)
    if not times or stream.summary is None:
        raise InternalError("a stream brought no token or no summary")
    return TimedRequest(sent_s=sent_s, times=tuple(times), summary=stream.summary)


def greedy(max_tokens: int) -> Options:
    """Options of a request that runs for exactly `max_tokens` tokens and is told their ids."""
    return Options(
        sampling=Sampling(temperature=0.0),
        stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
        output=Output(return_token_ids=True),
    )
