"""Drained, ended and started again, one worker after the other, under load: no request is lost and no token changes."""

from __future__ import annotations

import itertools
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness import ProcessCluster, RoleProcess, wait_until
from twinstage.client import GenerationStream, Options, Output, Sampling, Stopping, TwinstageClient
from twinstage.engine.llm import LLM, GenerationLimits
from twinstage.errors import TwinstageError
from twinstage.types import SamplingParameters, TokenPrompt
from twinstage.v1 import admin_pb2

pytestmark = pytest.mark.xdist_group("rolling_restart")

STREAMS = 8
KINDS = 6  # different requests
MAX_TOKENS = 40
LONG = 460
FLAGS = ("--kv-cache-bytes", "8MiB", "--weights", "fp32", "--drain-timeout", "0")


def prompt_of(kind: int) -> tuple[int, ...]:
    return tuple((7 * index + 13 * kind) % 380 + 3 for index in range(10 + 17 * kind))


@pytest.fixture(scope="module")
def reference(quick_reference: LLM) -> list[tuple[int, ...]]:
    """What each kind of request is answered with, and at the end a long answer."""
    answers = []
    for kind, length in [*((kind, MAX_TOKENS) for kind in range(KINDS)), (0, LONG)]:
        sampling = SamplingParameters(temperature=0.8, seed=kind)
        limits = GenerationLimits(max_tokens=length, ignore_eos=True)
        (result,) = quick_reference.generate([prompt_of(kind)], sampling, limits=limits)
        answers.append(result.token_ids)
    return answers


@pytest.fixture(scope="module")
def cluster(quick_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    with ProcessCluster(tmp_path_factory.mktemp("rolling-restart")) as cluster:
        cluster.start_workers(str(quick_model), prefill=2, decode=2, flags=FLAGS)
        cluster.start_router("--report-interval", "1")
        yield cluster


def open_stream(client: TwinstageClient, kind: int, max_tokens: int) -> GenerationStream:
    options = Options(
        sampling=Sampling(temperature=0.8, seed=kind),
        stopping=Stopping(max_tokens=max_tokens, ignore_eos=True),
        output=Output(return_token_ids=True),
        timeout_s=60.0,
    )
    return client.generate_stream(TokenPrompt(token_ids=prompt_of(kind)), options)


@dataclass
class Load:
    """Streams that follow one another on `STREAMS` threads, and what came out."""

    address: str
    reference: list[tuple[int, ...]]
    completed: int = 0
    wrong: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        kinds = itertools.cycle(range(KINDS))
        self._threads = [threading.Thread(target=self._run, args=(kinds,)) for _ in range(STREAMS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)

    def _run(self, kinds: Iterator[int]) -> None:
        with TwinstageClient(self.address) as client:
            while not self._over.is_set():
                kind = next(kinds)
                try:
                    with open_stream(client, kind, MAX_TOKENS) as stream:
                        token_ids = tuple(token_id for delta in stream for token_id in delta.token_ids)
                except TwinstageError as error:
                    self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
                else:
                    self.completed += 1
                    if token_ids != self.reference[kind]:
                        self.wrong.append(f"{kind}: {token_ids}")


def start_again(cluster: ProcessCluster, model: Path, old: RoleProcess) -> None:
    """The same worker at the same address; returns when the router knows it."""
    role = old.name.partition("-")[0]
    cluster.processes.remove(old)
    new = cluster.launch_worker(role, str(model), *FLAGS, "--listen", old.address, name=old.name)
    cluster.wait_ready(new)
    ready = admin_pb2.WORKER_STATE_READY
    wait_until(lambda: cluster.worker(old.name).state == ready, timeout_s=30, what=f"{old.name} is ready again")


def mapped_pools(process: RoleProcess) -> int:
    """Pools of decode workers, and its own, that a process has mapped."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return len(set(re.findall(r"(\d+) /memfd:\S*", maps)))


def test_restarting_every_worker_under_load_loses_nothing(
    cluster: ProcessCluster, quick_model: Path, reference: list[tuple[int, ...]]
) -> None:
    """Every second worker is told by SIGTERM alone, which leaves no time for its streams: they go on elsewhere."""
    workers = [role for role in cluster.processes if role.name != "router"]
    with TwinstageClient(cluster.address) as client, Load(cluster.address, reference) as load:
        wait_until(lambda: load.completed > STREAMS, timeout_s=60, what="load")
        for index, worker in enumerate(workers):
            if index % 2 == 0:
                drained = client.drain_worker(worker.name, wait=True, timeout_s=30.0)
                assert (drained.state, drained.unfinished, drained.running) == ("draining", 0, 0)
            assert worker.stop() == 0, worker.log_tail()
            start_again(cluster, quick_model, worker)
        before = load.completed
        wait_until(lambda: load.completed > before + STREAMS, timeout_s=60, what="load after the last restart")
    assert load.wrong == []
    cluster.wait_idle()
    assert [worker.leaked_kv_blocks for worker in cluster.workers()] == [0] * 4
    for role in cluster.processes:
        if role.name.startswith("prefill"):
            assert mapped_pools(role) <= 3, "the memory of a worker that has ended is still mapped"


def test_what_a_drain_does_not_finish_in_time_is_continued_elsewhere(
    cluster: ProcessCluster, quick_model: Path, reference: list[tuple[int, ...]]
) -> None:
    with TwinstageClient(cluster.address) as client, open_stream(client, 0, LONG) as stream:
        token_ids = list(next(stream).token_ids)

        def busy() -> list[str]:
            return [w.id for w in cluster.workers() if w.role == admin_pb2.WORKER_ROLE_DECODE and w.running]

        wait_until(lambda: bool(busy()), timeout_s=20, what="it decodes")
        worker = next(role for role in cluster.processes if role.name == busy()[0])
        worker.send(signal.SIGTERM)
        token_ids += [token_id for delta in stream for token_id in delta.token_ids]
        assert tuple(token_ids) == reference[-1]
        assert stream.summary is not None
        assert stream.summary.placement.retries == 1
        assert stream.summary.placement.decode_worker != worker.name
    assert worker.stop() == 0, worker.log_tail()
    reasons = [event["reason"] for event in cluster.router.events() if event.get("event") == "attempt failed"]
    assert reasons[-1] == "DRAINING"
    start_again(cluster, quick_model, worker)
    cluster.wait_idle()
