"""Output tokens per second through the whole service: 16 clients at once, and one, 128 tokens in and 128 out.

A router, one prefill and one decode worker that share the cores, reached through gRPC; the peers' servers through HTTP.
Every server gets the same prompts, sent as token ids by the load generator of `twinstage bench`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace

from bench.pausing import awake
from bench.peers import PEERS, PeerMissing
from bench.peers.servers import MODEL, PeerServer, llama_server
from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.serving import serving
from bench.summary import ratios, summarize
from twinstage.bench import LoadOptions, LoadResult, Protocol, TokenRange, run_load
from twinstage.errors import InternalError

_TOKENS = TokenRange(128, 128)
_VOCABULARY = 49_152
_SLOTS, _CONTEXT = 16, 512
QUANTITIES: Mapping[str, tuple[str, Callable[[LoadResult], float]]] = {
    "output": ("tokens/s", lambda result: result.output_tokens_per_s),
    "time to first token p50": ("ms", lambda result: 1e3 * result.ttft.p50_s if result.ttft else 0.0),
    "inter-token gap p50": ("ms", lambda result: 1e3 * result.itl.p50_s if result.itl else 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server under load. A peer's `process` is stopped while others are measured; ours does nothing when idle."""

    name: str
    address: str
    protocol: Protocol
    model: str = ""
    process: PeerServer | None = None

    def load(self, *, concurrency: int, requests: int, prompt_seed: int, output: TokenRange = _TOKENS) -> LoadResult:
        """Raises InternalError when a request failed."""
        options = LoadOptions(
            addresses=(self.address,),
            protocol=self.protocol,
            model=self.model,
            concurrency=concurrency,
            requests=requests,
            warmup_requests=0,
            prompt_tokens=_TOKENS,
            output_tokens=output,
            vocabulary_size=_VOCABULARY,
            prompt_seed=prompt_seed,
        )
        with awake(self.process) if self.process is not None else nullcontext():
            result = asyncio.run(run_load(options))
        if result.requests.failed or result.ttft is None or result.itl is None:
            raise InternalError(f"{self.name} failed {result.requests.failed} requests: {result.errors}")
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`requests` clients' calls in a round; `targets` by the beginning of the peer's name."""

    name: str
    concurrency: int
    requests: int
    targets: Mapping[str, float]
    has_latency_targets: bool = False


_CASES = (
    Case(
        name="16 concurrent",
        concurrency=16,
        requests=32,
        targets={"vLLM": 3.0, "llama.cpp": 1.5},
        has_latency_targets=True,
    ),
    Case(name="one client", concurrency=1, requests=1, targets={"llama.cpp": 1.0}),
)


def measure(context: Context) -> RowResult:
    found: dict[tuple[str, str], list[LoadResult]] = {}
    notes: list[str] = []
    with ExitStack() as stack:
        servers = start_servers(context, stack, notes)
        for server in servers:
            context.progress(f"warming {server.name}")
            server.load(concurrency=4, requests=4, prompt_seed=99, output=TokenRange(8, 8))
        for case in _CASES:
            if context.quick:
                case = replace(case, requests=case.concurrency)
            for round_number in range(context.rounds):
                for server in servers:
                    context.progress(f"{case.name}, round {round_number + 1}, {server.name}")
                    result = server.load(
                        concurrency=case.concurrency,
                        requests=case.requests,
                        prompt_seed=1_000 * case.concurrency + round_number,
                    )
                    found.setdefault((case.name, server.name), []).append(result)
    return result_of(found, [server.name for server in servers], notes=notes, versions=_versions(context, notes))


def start_servers(context: Context, stack: ExitStack, notes: list[str], *, with_vllm: bool = True) -> list[Server]:
    """Ours first, then the peers' where they are wanted and there; `notes` says which are not."""
    threads = context.engines.threads
    cluster = stack.enter_context(serving(context, worker_flags=context.engines.own_flags))
    servers = [Server(name="Twinstage", address=cluster.address, protocol=Protocol.TWINSTAGE)]
    if context.peers is None:
        return servers
    try:
        how = llama_server(context.peers, slots=_SLOTS, context_tokens=_CONTEXT, threads=threads)
        servers.append(_peer(stack.enter_context(PeerServer(how))))
    except PeerMissing as error:
        notes.append(f"Without llama.cpp's server: {error}")
    if with_vllm:
        try:
            servers.append(_peer(context.peers.vllm()))
        except PeerMissing as error:
            notes.append(f"Without vLLM: {error}")
    return servers


def _versions(context: Context, notes: Sequence[str]) -> dict[str, str]:
    """Of the peers that took part."""
    if context.peers is None:
        return {}
    distributions = {"llama.cpp's server": "llama", "vLLM": "vllm"}
    return {
        PEERS[name].distribution: context.peers.version(name)
        for what, name in distributions.items()
        if not any(note.startswith(f"Without {what}") for note in notes)
    }


def _peer(server: PeerServer) -> Server:
    server.pause()
    return Server(name=server.name, address=server.address, protocol=Protocol.OPENAI, model=MODEL, process=server)


def result_of(
    found: Mapping[tuple[str, str], Sequence[LoadResult]],
    names: Sequence[str],
    *,
    notes: Sequence[str],
    versions: dict[str, str],
) -> RowResult:
    """`found` by case and server, a load run per round; the first name is ours."""
    measurements = [
        Measurement(case=case, engine=name, quantity=quantity, unit=unit, values=[value(result) for result in results])
        for (case, name), results in found.items()
        for quantity, (unit, value) in QUANTITIES.items()
    ]
    comparisons = []
    for case in _CASES:
        rates = {name: [result.output_tokens_per_s for result in found[case.name, name]] for name in names}
        for name in names[1:]:
            target = next((limit for start, limit in case.targets.items() if name.startswith(start)), None)
            comparisons.append(
                Comparison(
                    case=case.name,
                    what=f"output tokens/s, Twinstage / {name}",
                    values=ratios(rates[names[0]], rates[name]),
                    target=None if target is None else Target.at_least(target),
                )
            )
        if case.has_latency_targets and len(names) > 1:
            comparisons += _latencies(case.name, found, names)
    return RowResult(measurements=measurements, comparisons=comparisons, notes=notes, versions=versions)


def _latencies(
    case: str, found: Mapping[tuple[str, str], Sequence[LoadResult]], names: Sequence[str]
) -> list[Comparison]:
    """Against the better of the peers, by its median over the rounds."""
    comparisons = []
    for quantity, limit in (("time to first token p50", 0.5), ("inter-token gap p50", 0.9)):
        value = QUANTITIES[quantity][1]
        values = {name: [value(result) for result in found[case, name]] for name in names}
        best = min(names[1:], key=lambda name: summarize(values[name]).median)
        comparisons.append(
            Comparison(
                case=case,
                what=f"{quantity}, Twinstage / {best}",
                values=ratios(values[names[0]], values[best]),
                target=Target.at_most(limit),
            )
        )
    return comparisons


ROW = Row(name="served", title="Served throughput", measure=measure, limit_s=900, needs_vllm=True)
