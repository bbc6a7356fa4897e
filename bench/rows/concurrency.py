"""Served throughput and latency over the number of clients, as curves."""

from __future__ import annotations

from contextlib import ExitStack

from bench.loading import QUANTITIES
from bench.results import Curve, Measurement, RowResult, Series
from bench.row import Context, Row
from bench.rows.served import start_servers
from twinstage.bench import TokenRange

_CONCURRENCIES = (1, 2, 4, 8, 16, 32)
_OUTPUT = TokenRange(64, 64)
_CURVES = {
    "output": ("throughput", "Throughput over concurrency, 128 tokens in, 64 out", "output tokens/s"),
    "time to first token p50": ("first_token_served", "Time to first token p50 over concurrency", "ms"),
    "inter-token gap p50": ("gap_served", "Inter-token gap p50 over concurrency", "ms"),
}


def measure(context: Context) -> RowResult:
    """A round for each number of clients; the curve shows the trend, the row `served` has the medians."""
    notes: list[str] = ["One round for each number of clients."]
    measurements: list[Measurement] = []
    with ExitStack() as stack:
        servers = start_servers(context, stack, notes, with_vllm=False)
        for server in servers:
            server.warm()
        for concurrency in _CONCURRENCIES[:4] if context.quick else _CONCURRENCIES:
            for server in servers:
                context.progress(f"{concurrency} clients, {server.name}")
                result = server.load(
                    concurrency=concurrency,
                    requests=max(4, concurrency if context.quick else 2 * concurrency),
                    prompt_seed=5_000 + concurrency,
                    output=_OUTPUT,
                )
                measurements += [
                    Measurement(
                        case=f"{concurrency} clients",
                        engine=server.name,
                        quantity=quantity,
                        unit=unit,
                        values=[value(result)],
                    )
                    for quantity, (unit, value) in QUANTITIES.items()
                ]
    return RowResult(measurements=measurements, curves=curves_of(measurements), notes=notes)


def curves_of(measurements: list[Measurement]) -> list[Curve]:
    """A curve for each quantity, a line for each server."""
    curves = []
    for quantity, (name, title, label) in _CURVES.items():
        chosen = [entry for entry in measurements if entry.quantity == quantity]
        series = [
            Series(
                name=engine,
                points=[(float(entry.case.split()[0]), entry.values[0]) for entry in chosen if entry.engine == engine],
            )
            for engine in dict.fromkeys(entry.engine for entry in chosen)
        ]
        curves.append(
            Curve(name=name, title=title, x_label="clients at once", y_label=label, series=series, logarithmic=True)
        )
    return curves


ROW = Row(
    name="concurrency",
    title="Throughput over concurrency",
    measure=measure,
    limit_s=300,
    quick=False,
    peers=("llama",),
    needs_llama_server=True,
)
