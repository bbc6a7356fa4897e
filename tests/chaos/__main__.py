"""`python -m chaos`: one long run, or a schedule that is played again. Exit code 1 when anything was wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from chaos.cases import AnsweredCase, answered_cases, make_chaos_model
from chaos.cluster import ChaosCluster, Shape
from chaos.drawing import draw_cases
from chaos.pooling import make_embedder, pooling_cases
from chaos.report import document, explanation, summary
from chaos.run import ChaosRun, Result
from chaos.schedule import Plan, Schedule, draw_rounds, from_json, to_json


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones have the next seeds")
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults are made")
    parser.add_argument("--faults", type=int, help="end after so many faults, if they come before the minutes are over")
    parser.add_argument("--transport", choices=("shm", "tcp", "tls", "both"), default="both")
    parser.add_argument("--weights", choices=("fp32", "stock"), default="fp32", help="stock: in deterministic mode")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=3, help="decode workers")
    parser.add_argument("--embedders", type=int, default=2, help="workers of an embedding model; 0: none is served")
    parser.add_argument("--faults-per-second", type=float, default=0.4)
    parser.add_argument("--calls-per-second", type=float, default=4.0)
    parser.add_argument("--cases", type=int, default=80, help="different requests to generate")
    parser.add_argument("--pooling-cases", type=int, default=20, help="different requests to encode and score")
    parser.add_argument(
        "--round-seconds", type=float, default=30.0, help="after so many, everything heals and is checked"
    )
    parser.add_argument("--schedule", type=Path, help="play the schedules of this JSON file, and draw none")
    parser.add_argument("--directory", type=Path, help="where logs, schedule and report stay; by default a new one")
    return parser.parse_args()


def main() -> int:
    """Run, print the summary, and return the exit code."""
    arguments = _arguments()
    directory = arguments.directory or Path(tempfile.mkdtemp(prefix="twinstage-chaos-"))
    directory.mkdir(parents=True, exist_ok=True)
    model = make_chaos_model(directory / "model")
    is_stock = arguments.weights == "stock"
    drawn = draw_cases(arguments.cases, longest=1500, with_xgrammar=True)
    cases = answered_cases(model, drawn, weights=arguments.weights, deterministic=is_stock)
    embedder = make_embedder(directory / "embedder")
    if arguments.embedders:
        cases += pooling_cases(embedder, count=arguments.pooling_cases, longest=300)
    shape = Shape(
        model=str(model),
        embedder=str(embedder),
        embedders=arguments.embedders,
        prefill=arguments.prefill,
        decode=arguments.decode,
        transport=arguments.transport,
        weights=arguments.weights,
        deterministic=is_stock,
    )
    schedules = _schedules(arguments, shape, num_cases=len(cases))
    (directory / "schedule.json").write_text(to_json(schedules))
    print(f"{len(schedules)} rounds; logs, schedule.json and report.json in {directory}", flush=True)
    result = asyncio.run(_run(directory, shape, cases, schedules))
    report = document(result)
    (directory / "report.json").write_text(json.dumps(report, indent=2))
    print(summary(report))
    if result.violations:
        print(explanation(result, directory), flush=True)
    return 1 if result.violations else 0


def _schedules(arguments: argparse.Namespace, shape: Shape, *, num_cases: int) -> list[Schedule]:
    if arguments.schedule is not None:
        return from_json(arguments.schedule.read_text())
    plan = Plan(
        workers=shape.worker_ids,
        links=shape.link_names,
        num_cases=num_cases,
        seconds=arguments.minutes * 60,
        num_faults=arguments.faults,
        faults_per_s=arguments.faults_per_second,
        calls_per_s=arguments.calls_per_second,
    )
    return draw_rounds(arguments.seed, plan, round_s=arguments.round_seconds)


async def _run(directory: Path, shape: Shape, cases: list[AnsweredCase], schedules: list[Schedule]) -> Result:
    async with ChaosCluster(directory, shape).opened() as cluster:
        return await ChaosRun(cluster, cases, schedules, say=lambda line: print(line, flush=True)).play()


if __name__ == "__main__":
    sys.exit(main())
