"""`python -m random_requests`: 10,000 random requests to a cluster of its own. `make random-requests` calls it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import grpc

from harness import ProcessCluster
from random_requests.cases import Case
from random_requests.run import Report, draw, send_all
from served_router import serving
from tiny_models import make_tiny_llama
from twinstage.telemetry.log import configure_logging
from twinstage.v1 import common_pb2, generation_pb2, generation_pb2_grpc

ROUTER_FLAGS = ("--trust-request-chat-template", "--tool-parser", "hermes")


def main() -> int:
    parser = argparse.ArgumentParser(prog="random_requests", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--stand-ins",
        action="store_true",
        help="no workers but stand-ins: some hundred requests a second",
    )
    arguments = parser.parse_args()
    found = draw(arguments.requests, seed_number=arguments.seed)
    report = asyncio.run(_to_stand_ins(found)) if arguments.stand_ins else _to_a_cluster(found)
    print(f"random requests, seed {arguments.seed}: {report}")
    for problem in report.problems:
        print(f"PROBLEM: {problem}")
    print(f"random requests: {len(report.problems)} problems; all KV blocks are free")
    return 1 if report.problems else 0


async def _to_stand_ins(found: Sequence[Case]) -> Report:
    configure_logging(level="warning")
    async with serving(*ROUTER_FLAGS, prefill=2, decode=2) as service:  # at whose end nobody holds anything
        return await send_all(f"127.0.0.1:{service.router.port}", found)


def _to_a_cluster(found: Sequence[Case]) -> Report:
    with tempfile.TemporaryDirectory(prefix="twinstage-random-") as directory:
        model = str(make_tiny_llama(Path(directory) / "tiny"))
        with ProcessCluster(Path(directory)) as cluster:
            embedding = cluster.launch_worker("prefill", "demo-embedding")
            flags = ("--weights", "fp32", "--kv-cache-bytes", "8MiB")
            cluster.start_workers(model, decode=1, flags=flags)
            guessing = cluster.launch_worker("decode", model, *flags, "--speculative", "ngram")
            cluster.wait_ready(embedding, guessing)
            cluster.start_router(*ROUTER_FLAGS)
            _start_xgrammar(cluster)
            before = _answer(cluster)
            report = asyncio.run(send_all(cluster.address, found))
            cluster.wait_idle()
            assert _answer(cluster) == before, "the cluster answers otherwise than before"
            assert not any(worker.leaked_kv_blocks for worker in cluster.workers()), "blocks leaked"
    return report


def _start_xgrammar(cluster: ProcessCluster) -> None:
    """Its first grammar starts a process at the router and at each worker: more than a minute on a busy machine."""
    request = generation_pb2.GenerateRequest(
        prompt="Hello",
        stopping={"max_tokens": 64},
        structured_output={"grammar": 'root ::= [a-z] root | "."', "backend": common_pb2.GRAMMAR_BACKEND_XGRAMMAR},
    )
    with cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for call in [stub.Generate.future(request, timeout=300) for _ in range(4)]:
            call.result()


def _answer(cluster: ProcessCluster) -> str:
    request = generation_pb2.GenerateRequest(prompt="Hello", sampling={"temperature": 0.0})
    with cluster.channel() as channel:
        return generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=30).results[0].text


if __name__ == "__main__":
    try:
        sys.exit(main())
    except grpc.RpcError as error:
        sys.exit(f"random requests: the cluster does not answer any more: {error}")
