"""Output tokens per second through the whole service: 16 clients at once, and one, 128 tokens in and 128 out.

A router, one prefill and one decode worker that share the cores, reached through gRPC; the peers' servers through HTTP.
Ours is measured with int8, which is compared with the peers, and with fp32, which is what runs without flags.
Every server gets the same prompts, sent as token ids by the load generator of `twinstage bench`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from bench.engines.launch import precision_of, worker_flags
from bench.loading import QUANTITIES, Server
from bench.peers import PEERS, PeerMissing
from bench.peers.servers import PeerServer
from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.serving import serving
from bench.summary import ratios, summarize
from twinstage.bench import LoadResult, Protocol

_OWN = "Twinstage"


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
            server.warm()
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
    own = context.engines.own
    servers = [
        _own(context, stack, options) for options in own if options is own[0] or precision_of(options) != "stock"
    ]
    if context.peers is None:
        return servers
    try:
        server = stack.enter_context(PeerServer(context.peers.llama(threads=context.engines.threads)))
        server.pause()
        servers.append(Server.of_peer(server))
        notes.append(f"{server.name} ran with {context.peers.settings['llama']}.")
    except PeerMissing as error:
        notes.append(f"Without llama.cpp's server: {error}")
    if with_vllm:
        try:
            servers.append(Server.of_peer(context.peers.vllm()))
            notes.append(f"{servers[-1].name} ran with {context.peers.settings['vllm']}.")
        except PeerMissing as error:
            notes.append(f"Without vLLM: {error}")
    return servers


def _own(context: Context, stack: ExitStack, options: Mapping[str, str]) -> Server:
    """A cluster that computes in one of our ways."""
    cluster = stack.enter_context(serving(context, worker_flags=worker_flags(options)))
    return Server(name=f"{_OWN} {precision_of(options)}", address=cluster.address, protocol=Protocol.TWINSTAGE)


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


def result_of(
    found: Mapping[tuple[str, str], Sequence[LoadResult]],
    names: Sequence[str],
    *,
    notes: Sequence[str],
    versions: dict[str, str],
) -> RowResult:
    """`found` by case and server, a load run per round. Targets are for the first name, which is ours."""
    own = [name for name in names if name.startswith(_OWN)]
    peers = [name for name in names if name not in own]
    measurements = [
        Measurement(case=case, engine=name, quantity=quantity, unit=unit, values=[value(result) for result in results])
        for (case, name), results in found.items()
        for quantity, (unit, value) in QUANTITIES.items()
    ]
    comparisons = []
    for case in _CASES:
        comparisons += [_rates(case, found, ours, peer, with_target=ours == own[0]) for ours in own for peer in peers]
        if case.has_latency_targets and peers:
            comparisons += _latencies(case.name, found, own[0], peers)
    return RowResult(measurements=measurements, comparisons=comparisons, notes=notes, versions=versions)


def _rates(
    case: Case, found: Mapping[tuple[str, str], Sequence[LoadResult]], ours: str, peer: str, *, with_target: bool
) -> Comparison:
    limit = next((limit for start, limit in case.targets.items() if peer.startswith(start)), None)
    rates = [[result.output_tokens_per_s for result in found[case.name, name]] for name in (ours, peer)]
    return Comparison(
        case=case.name,
        what=f"output tokens/s, {ours} / {peer}",
        values=ratios(*rates),
        target=Target.at_least(limit) if with_target and limit is not None else None,
    )


def _latencies(
    case: str, found: Mapping[tuple[str, str], Sequence[LoadResult]], ours: str, peers: Sequence[str]
) -> list[Comparison]:
    """Against the better of the peers, by its median over the rounds."""
    comparisons = []
    for quantity, limit in (("time to first token p50", 0.5), ("inter-token gap p50", 0.9)):
        value = QUANTITIES[quantity][1]
        values = {name: [value(result) for result in found[case, name]] for name in (ours, *peers)}
        best = min(peers, key=lambda name: summarize(values[name]).median)
        comparisons.append(
            Comparison(
                case=case,
                what=f"{quantity}, {ours} / {best}",
                values=ratios(values[ours], values[best]),
                target=Target.at_most(limit),
            )
        )
    return comparisons


ROW = Row(
    name="served",
    title="Served throughput",
    measure=measure,
    limit_s=900,
    peers=("llama", "vllm"),
    needs_vllm=True,
    needs_llama_server=True,
)
