"""From the start of a process to ready, with a prepared model: a prefill worker beside llama.cpp's server."""

from __future__ import annotations

import time
from queue import SimpleQueue

from bench.peers import PeerMissing
from bench.peers.commands import llama_server
from bench.peers.servers import PeerServer
from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.summary import summarize
from twinstage.cli.child import Child
from twinstage.errors import InternalError
from twinstage.models.resolve import resolve_model

_READY_S = 120.0
_END_S = 20.0
_ALLOWED_S = 3.0  # the target: at most this much later than llama.cpp's server
_SLOTS, _CONTEXT = 16, 512


def measure(context: Context) -> RowResult:
    resolve_model("demo", progress=context.progress)
    own, theirs, notes = [], [], []
    is_beside = context.peers is not None
    for round_number in range(-1, context.rounds):
        context.progress(f"start to ready, round {round_number + 1}")
        seconds = _start_worker(context)
        if round_number < 0:
            continue  # the first one brought the files into memory, and compiled what is compiled once
        own.append(seconds)
        if is_beside:
            try:
                theirs.append(_start_llama(context))
            except PeerMissing as error:
                is_beside = False
                notes.append(f"Without llama.cpp's server: {error}")
    return result_of(own, theirs if is_beside else [], notes, precision=context.engines.precision)


def result_of(own: list[float], theirs: list[float], notes: list[str], *, precision: str) -> RowResult:
    """Seconds of each round; `theirs` is empty without the peer."""
    found = {f"Twinstage prefill worker, {precision}": own, "llama.cpp server Q8_0": theirs}
    measurements = [
        Measurement(case="prepared model", engine=name, quantity="start to ready", unit="s", values=values)
        for name, values in found.items()
        if values
    ]
    comparisons = []
    if theirs:
        comparisons.append(
            Comparison(
                case="prepared model",
                what=f"start to ready, Twinstage worker {precision} - llama.cpp server Q8_0",
                values=[ours - other for ours, other in zip(own, theirs, strict=True)],
                target=Target.at_most(_ALLOWED_S),
                unit="s",
            )
        )
        notes = [*notes, f"The ratio of the medians is {summarize(own).median / summarize(theirs).median:.1f}."]
    return RowResult(measurements=measurements, comparisons=comparisons, notes=notes)


def _start_worker(context: Context) -> float:
    flags = ["--model", "demo", "--listen", "127.0.0.1:0", "--threads", str(context.engines.threads)]
    ends: SimpleQueue[float | None] = SimpleQueue()
    started_s = time.monotonic()
    child = Child("prefill", "prefill_worker", [*flags, *context.engines.own_flags], ready_event="worker ready")
    child.read_log(
        log_path=context.engines.log_directory / "worker.log",
        on_line=lambda *_: None,
        on_ready=lambda _: ends.put(time.monotonic()),
        on_exit=lambda _: ends.put(None),
    )
    try:
        ready_s = ends.get(timeout=_READY_S)
    finally:
        child.send(15)
        if not child.join(_END_S):
            child.send(9)
            child.join(_END_S)
    if ready_s is None:
        raise InternalError(child.end_in_words())
    return ready_s - started_s


def _start_llama(context: Context) -> float:
    assert context.peers is not None
    how = llama_server(context.peers, slots=_SLOTS, context_tokens=_CONTEXT, threads=context.engines.threads)
    with PeerServer(how) as server:
        return server.ready_s


ROW = Row(name="start", title="Start of a worker", measure=measure, limit_s=240, peers=("llama",))
