"""What a cluster leaves behind when it is told to end: nothing. And what one worker leaves to the others: nothing."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import ProcessCluster, RoleProcess, wait_until
from twinstage.client import Options, Sampling, Stopping, TwinstageClient

pytestmark = pytest.mark.xdist_group("orphans")

FLAGS = ("--kv-cache-bytes", "1MiB", "--weights", "fp32")
MARK = "TWINSTAGE_TEST_MARK"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary directory of the cluster's own; short, as it will hold unix sockets."""
    directory = Path(tempfile.mkdtemp(prefix="tw", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def marked_processes(mark: str) -> list[int]:
    """Every process that was started with this mark, by whomever."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended, or is somebody else's
    return found


def pools_in(process: RoleProcess) -> int:
    """Pools that a process has mapped or holds open: its own and those of workers that it writes to."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return len(set(re.findall(r"(\d+) +/memfd:", maps)))


def memfds_of(process: RoleProcess) -> list[str]:
    links = (entry.readlink() for entry in Path(f"/proc/{process.pid}/fd").iterdir())
    return [str(link) for link in links if "memfd:" in str(link)]


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def ask(address: str, count: int) -> None:
    options = Options(
        sampling=Sampling(temperature=0.8, seed=1), stopping=Stopping(max_tokens=6, ignore_eos=True), timeout_s=30.0
    )
    with TwinstageClient(address) as client:
        for _ in range(count):
            assert client.chat("Hello", options).summary.usage.completion_tokens == 6


@pytest.mark.parametrize("how", ["in order", "workers first", "under load"])
def test_a_cluster_that_ends_leaves_nothing(quick_model: Path, tmp_path: Path, temporary: Path, how: str) -> None:
    mark = f"{tmp_path.name}-{how}"
    shared_before = set(Path("/dev/shm").iterdir())
    cluster = ProcessCluster(tmp_path, environment={"TMPDIR": str(temporary), MARK: mark})
    with cluster:
        cluster.start_workers(str(quick_model), flags=FLAGS)
        cluster.start_router()
        ask(cluster.address, 4)
        assert list(temporary.iterdir()), "nothing was made that could be left behind"
        addresses = [role.address for role in cluster.processes]
        assert {role.pid for role in cluster.processes} <= set(marked_processes(mark))
        assert all(map(listens, addresses))
        if how == "workers first":
            for role in cluster.processes:
                assert role.stop() == 0, role.log_tail()
        elif how == "under load":
            with TwinstageClient(cluster.address) as client:
                options = Options(stopping=Stopping(max_tokens=400, ignore_eos=True), timeout_s=30.0)
                streams = [client.generate_stream("Hello", options) for _ in range(4)]
                for stream in streams:
                    next(stream)
                for role in cluster.processes:
                    role.send(signal.SIGTERM)
                for stream in streams:
                    stream.cancel()
    assert [role.process.returncode for role in cluster.processes] == [0, 0, 0]
    assert marked_processes(mark) == []
    assert [entry.name for entry in temporary.rglob("*")] == []
    assert not any(map(listens, addresses))
    assert set(Path("/dev/shm").iterdir()) <= shared_before


def test_a_decode_worker_that_is_killed_leaves_nothing_to_its_peers(
    quick_model: Path, tmp_path: Path, temporary: Path
) -> None:
    with ProcessCluster(tmp_path, environment={"TMPDIR": str(temporary)}) as cluster:
        prefill, decode = cluster.start_workers(str(quick_model), flags=FLAGS)
        cluster.start_router()
        before = pools_in(prefill), len(memfds_of(prefill))
        ask(cluster.address, 2)
        assert pools_in(prefill) == before[0] + 1, "it writes into the memory of its peer"
        decode.kill()
        cluster.processes.remove(decode)
        wait_until(
            lambda: (pools_in(prefill), len(memfds_of(prefill))) == before, timeout_s=20, what="the pool is let go"
        )
        left = {entry.name for entry in temporary.iterdir()}
        assert left, "a killed worker cannot remove its socket"
        again = cluster.launch_worker("decode", str(quick_model), *FLAGS)
        cluster.wait_ready(again)
        assert left.isdisjoint(entry.name for entry in temporary.iterdir()), "what the killed one left is removed"
