"""Many streams on several workers: all complete, every worker is used, every block comes back."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import ProcessCluster
from twinstage.v1 import admin_pb2, common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.xdist_group("tiny")

STREAMS = 64


def _request(index: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        prompt="once upon a time " * (1 + index % 8) + str(index),
        sampling=common_pb2.SamplingOptions(temperature=0.8, seed=index),
        stopping=common_pb2.StoppingOptions(max_tokens=12 + index % 20, ignore_eos=True),
        output=common_pb2.OutputOptions(return_token_ids=True),
    )


def _check_order(events: list[generation_pb2.GenerateStreamResponse]) -> None:
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "prompt_info"
    assert kinds[-2:] == ["finished", "summary"]
    assert set(kinds[1:-2]) == {"delta"}


def test_all_streams_complete_on_all_workers_and_return_their_blocks(tiny_cluster: ProcessCluster) -> None:
    before = {worker.id: worker.finished for worker in tiny_cluster.workers()}
    with tiny_cluster.channel() as channel, ThreadPoolExecutor(STREAMS) as threads:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        streams = list(
            threads.map(lambda index: list(stub.GenerateStream(_request(index), timeout=120)), range(STREAMS))
        )
    placements = Counter[str]()
    for index, events in enumerate(streams):
        _check_order(events)
        tokens = [token for event in events for token in event.delta.token_ids]
        summary = events[-1].summary
        assert len(tokens) == summary.usage.completion_tokens == 12 + index % 20
        assert summary.placement.kv_bytes > 0
        placements.update([summary.placement.prefill_worker, summary.placement.decode_worker])
    workers = tiny_cluster.workers()
    assert set(placements) == {worker.id for worker in workers}
    tiny_cluster.wait_idle()
    for worker in tiny_cluster.workers():
        # At least: what other tests of this cluster had just finished may be reported late.
        assert worker.finished - before[worker.id] >= placements[worker.id]
        assert worker.state == admin_pb2.WORKER_STATE_READY


def test_stream_and_unary_call_agree(tiny_cluster: ProcessCluster) -> None:
    with tiny_cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for index in range(6):
            unary = stub.Generate(_request(index), timeout=60)
            events = list(stub.GenerateStream(_request(index), timeout=60))
            assert "".join(event.delta.text for event in events) == unary.results[0].text
            assert [t for event in events for t in event.delta.token_ids] == list(unary.results[0].token_ids)
            assert events[-1].summary.usage == unary.usage


def test_every_part_of_the_time_is_reported(tiny_cluster: ProcessCluster) -> None:
    with tiny_cluster.channel() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        timing = stub.Generate(_request(7), timeout=60).timing
    parts = {name: getattr(timing, name).ToMicroseconds() for name in timing.DESCRIPTOR.fields_by_name}
    for name in ("tokenize", "prefill", "kv_transfer", "time_to_first_token", "decode", "total"):
        assert parts[name] > 0, name
    assert parts["time_to_first_token"] + parts["decode"] <= parts["total"] * 1.05
    # A place in decode's batch may be waited for after the first token, so the queue counts towards the total only.
    assert parts["tokenize"] + parts["prefill"] <= parts["time_to_first_token"] * 1.05
    apart = ("queue", "tokenize", "prefill", "kv_transfer", "decode")
    assert sum(parts[name] for name in apart) <= parts["total"] * 1.05
