"""Resident memory of workers beyond the model's weights and the KV pool, after they have served."""

from __future__ import annotations

from bench.engines.protocol import Prompts
from bench.machine import MemoryUse, memory_use
from bench.results import Comparison, Measurement, RowResult, Target
from bench.row import Context, Row
from bench.serving import serving, timed_request
from twinstage.client import TwinstageClient
from twinstage.models.resolve import default_cache_directory

_LIMIT_MB = 400.0
_PROMPT = 2_000


def measure(context: Context) -> RowResult:
    prompts = Prompts()
    found: dict[str, list[MemoryUse]] = {}
    with (
        serving(context, worker_flags=context.engines.own_flags) as cluster,
        TwinstageClient(cluster.address) as client,
    ):
        for round_number in range(context.rounds):
            context.progress(f"memory, round {round_number + 1}")
            timed_request(client, prompts.next(500 if context.quick else _PROMPT), max_tokens=8)
            for name, child in cluster.processes.items():
                found.setdefault(name, []).append(memory_use(child.pid, weights_below=default_cache_directory()))
    return result_of(found, precision=context.engines.precision)


def result_of(found: dict[str, list[MemoryUse]], *, precision: str) -> RowResult:
    """`found` by process, a reading per round. Workers are named with their precision."""
    found = {name if name == "router" else f"{name}, {precision}": uses for name, uses in found.items()}
    measurements = []
    for name, uses in found.items():
        parts = {
            "weights": [use.weights_bytes / 1e6 for use in uses],
            "shared memory": [use.shared_bytes / 1e6 for use in uses],
            "everything else": [use.other_bytes / 1e6 for use in uses],
        }
        for part, values in parts.items():
            measurements.append(Measurement(case=name, engine=part, quantity="resident", unit="MB", values=values))
    comparisons = [
        Comparison(
            case=name,
            what="resident memory beyond weights and KV pool",
            values=[use.other_bytes / 1e6 for use in uses],
            target=Target.at_most(_LIMIT_MB) if name != "router" else None,
            unit="MB",
        )
        for name, uses in found.items()
    ]
    notes = [
        "Weights are mapped files below the model cache, whose pages workers share. A worker that packed weights or "
        "compiled kernels at this start holds more: what torch and the compiler leave behind. Shared memory is "
        "the KV pool, and what is mapped of "
        "another worker's."
    ]
    return RowResult(measurements=measurements, comparisons=comparisons, notes=notes)


ROW = Row(name="memory", title="Memory of workers", measure=measure, limit_s=120)
