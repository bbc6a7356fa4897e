"""CPUs: lists of them, their sharing out, and that a worker told to stay on some does, with every thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.config import DecodeSettings
from twinstage.cpus import by_core, format_cpus, parse_cpus, share_out
from twinstage.errors import ConfigError
from twinstage.rpc.worker_process import SWITCH_INTERVAL_S
from twinstage.settings import read_settings

ROOT = Path(__file__).resolve().parent.parent

# Runs in the place of a worker: tells what `run_worker` made of its process, a thread of before among it.
PROBE = """
import asyncio, json, os, sys, threading
from decode_worker.config import DecodeSettings
from twinstage.rpc.worker_process import run_worker
from twinstage.types import Role

class Probe:
    def __init__(self, settings):
        self.threads = settings.compute_threads

    async def run(self):
        await asyncio.to_thread(lambda: None)  # one more thread
        affinity = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
        print(json.dumps([affinity, self.threads, sys.getswitchinterval()]))
        return 0

stop = threading.Event()
threading.Thread(target=stop.wait, daemon=True).start()
sys.exit(run_worker(Role.DECODE, sys.argv[1:], settings=DecodeSettings, process=Probe))
"""


def _probe(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE, *flags], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@given(st.sets(st.integers(0, 130), min_size=1))
def test_lists_of_cpus_are_read_as_they_are_written(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == tuple(sorted(cpus))


def test_the_shortest_list_is_written() -> None:
    assert format_cpus([8, 0, 1, 2, 3, 10]) == "0-3,8,10"
    assert parse_cpus(" 2-3, 0 ,2") == (0, 2, 3)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1-2-3", "¹"])
def test_a_wrong_list_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of CPUs"):
        parse_cpus(text)
    with pytest.raises(ConfigError, match="--cpus"):
        read_settings(DecodeSettings, ["--cpus", text or " "])


@given(st.sets(st.integers(0, 64), min_size=1), st.integers(1, 12))
def test_shares_are_even_neighbours_that_leave_nothing(cpus: set[int], num_shares: int) -> None:
    shares = share_out(sorted(cpus), num_shares)
    if num_shares > len(cpus):
        assert shares is None
        return
    assert shares is not None
    assert len(shares) == num_shares
    assert [cpu for share in shares for cpu in share] == sorted(cpus)
    sizes = [len(share) for share in shares]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    """Two sockets of two cores with two threads each, numbered as Linux does: first threads first."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu % 4 // 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    ordered = by_core(range(8), sysfs=tmp_path)
    assert ordered == (0, 4, 1, 5, 2, 6, 3, 7)
    assert share_out(ordered, 4) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert by_core([3, 1, 2], sysfs=tmp_path / "nowhere") == (1, 2, 3)


def test_a_worker_stays_on_its_cpus_with_every_thread() -> None:
    cpu = max(os.sched_getaffinity(0))
    result = _probe("--cpus", str(cpu))
    assert result.returncode == 0, result.stderr
    affinity, threads, switch_interval_s = json.loads(result.stdout)
    assert len(affinity) >= 3
    assert affinity == [[cpu]] * len(affinity)
    assert threads == 1
    assert switch_interval_s == pytest.approx(SWITCH_INTERVAL_S)


def test_without_cpus_a_worker_uses_all() -> None:
    affinity, threads, _ = json.loads(_probe().stdout)
    everything = sorted(os.sched_getaffinity(0))
    assert affinity == [everything] * len(affinity)
    assert threads == len(everything)


def test_cpus_that_are_not_there_end_the_start_with_one_line() -> None:
    result = _probe("--cpus", "1000-1001")
    assert result.returncode == 2
    assert result.stderr == "decode_worker: --cpus 1000-1001: this process may not use CPU 1000-1001\n"
