"""`twinstage demo`: one question and one search, answered by a cluster that lives as long as they do."""

from __future__ import annotations

import time

from rich.console import Console

from twinstage.cli.cluster import Cluster
from twinstage.cli.cluster_config import ClusterConfig
from twinstage.cli.output import (
    LEVELS,
    LogPrinter,
    console_for_errors,
    human_bytes,
    phases,
    placement_line,
    ranking_table,
    timing_line,
    usage_line,
)
from twinstage.cli.signals import Interruption, stopped_by_signals
from twinstage.client import GenerationStream, Options, Sampling, Stopping, Summary, TwinstageClient
from twinstage.errors import InternalError

QUESTION = "What is the capital of France?"
SEARCH = "a place to swim on a hot day"
DOCUMENTS = (
    "Income tax returns are due at the end of May.",
    "The lake below the village is open from June on.",
    "She tuned her violin before the concert.",
    "The indoor pool has six lanes and a diving tower.",
    "Bread rises faster in a warm kitchen.",
)
ANSWER_TIMEOUT_S = 120.0


def demo(config: ClusterConfig, *, start_timeout_s: float) -> None:
    """Start a cluster, ask, print the answer as it comes and where its time went, search, and stop the cluster."""
    console = console_for_errors()
    printer = LogPrinter(console, level=config.log_level)
    cluster = Cluster(config, on_line=printer)
    started_s = time.monotonic()
    with stopped_by_signals(cluster) as interruption, cluster:
        console.print(f"starting {', '.join(cluster.processes)} and a router", style="bold")
        cluster.wait_ready(start_timeout_s)
        console.print(f"ready after {time.monotonic() - started_s:.1f} s on {cluster.address}", style="bold")
        # Nothing but trouble may come between the words of the answer.
        printer.level = max(config.log_level, "warning", key=LEVELS.index)
        with TwinstageClient(cluster.address) as client:
            _ask(client, interruption)
            _search(client)
    codes = {name: child.exit_code for name, child in cluster.processes.items()}
    if any(codes.values()):
        raise InternalError(f"the cluster did not stop cleanly; exit codes: {codes}")
    console.print(f"stopped {', '.join(codes)}", style="bold")


def _ask(client: TwinstageClient, interruption: Interruption) -> None:
    options = Options(sampling=Sampling(temperature=0.0), stopping=Stopping(max_tokens=64), timeout_s=ANSWER_TIMEOUT_S)
    print(f"\nquestion: {QUESTION}\nanswer:   ", end="", flush=True)
    with client.chat_stream(QUESTION, options) as stream:
        interruption.also = stream.cancel
        finish = _print_answer(stream)
        interruption.also = None
    if stream.summary is not None:
        _print_summary(stream.summary, finish=finish)


def _search(client: TwinstageClient) -> None:
    """Sort documents by what they mean."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"search:   {SEARCH}")
    ranking = client.rerank(SEARCH, DOCUMENTS, timeout_s=ANSWER_TIMEOUT_S)
    console.print(ranking_table(ranking, DOCUMENTS))
    summary = ranking.summary
    console.print(f"usage:    {usage_line(summary)} · {timing_line(summary.timing)} · {placement_line(summary)}\n")


def _print_answer(stream: GenerationStream) -> str:
    finish = ""
    for delta in stream:
        print(delta.text, end="", flush=True)
        if delta.finish is not None:
            finish = delta.finish.reason.value
    print("\n")
    return finish


def _print_summary(summary: Summary, *, finish: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"usage:    {usage_line(summary, finish=finish)}")
    for name, milliseconds in phases(summary.timing):
        console.print(f"  {name:<20}{milliseconds:9.1f} ms")
    placement = summary.placement
    console.print(
        f"moved:    {placement.kv_bytes} bytes of KV ({human_bytes(placement.kv_bytes)}) by {placement.transport} "
        f"from {placement.prefill_worker} to {placement.decode_worker}\n"
    )
