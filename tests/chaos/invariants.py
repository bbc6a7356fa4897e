"""What must hold when all faults are healed, and after the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from chaos.cluster import MARK, POLL_S, ChaosCluster, Member
from chaos.judge import Violation
from twinstage.v1 import admin_pb2

LEASE_S = 15.0  # until blocks whose owner is lost are free again
_BAD_LINES = (
    "Traceback",
    "Task exception was never retrieved",
    "Fatal Python error",
    "Exception ignored",
    "was never awaited",
)
_SPARE_DESCRIPTORS = 24  # connections that come and go


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a process holds of the system's goods."""

    descriptors: int
    kv_mappings: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        proc = Path(f"/proc/{pid}")
        pages = int((proc / "statm").read_text().split()[1])
        return cls(
            descriptors=len(os.listdir(proc / "fd")),
            kv_mappings=(proc / "maps").read_text().count("memfd:twinstage-kv"),
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )


async def check_idle(cluster: ChaosCluster) -> tuple[float, list[Violation]]:
    """Wait until nobody holds a block and nothing runs. Returns how long that took, in seconds."""
    began_s = time.monotonic()
    rest = "no table of workers"
    while time.monotonic() < began_s + LEASE_S:
        rest = await _what_is_held(cluster)
        if not rest:
            return time.monotonic() - began_s, []
        await asyncio.sleep(POLL_S)
    return LEASE_S, [Violation("leaked blocks", f"after {LEASE_S:.0f} s: {rest}")]


async def _what_is_held(cluster: ChaosCluster) -> str:
    """Blocks in use and requests in progress, by worker; empty when there are none."""
    workers = [worker for worker in await cluster.workers() if worker.state == admin_pb2.WORKER_STATE_READY]
    held = [
        f"{worker.id} has {worker.free_kv_blocks} of {worker.total_kv_blocks} blocks free, "
        f"{worker.unfinished} requests, {worker.leaked_kv_blocks} blocks leaked"
        for worker in workers
        if worker.free_kv_blocks != worker.total_kv_blocks or worker.unfinished or worker.leaked_kv_blocks
    ]
    with contextlib.suppress(grpc.aio.AioRpcError):
        info = await cluster.admin.GetServerInfo(admin_pb2.GetServerInfoRequest(), timeout=5)
        if info.live_requests:
            held.append(f"the router has {info.live_requests} requests")
        return "; ".join(held)
    return "no router"


def check_footprints(cluster: ChaosCluster) -> Iterator[Violation]:
    """No process has gathered descriptors or mappings, of peers that are gone for example."""
    for member in cluster.members.values():
        if member.process is None:
            continue
        footprint = Footprint.of(member.process.pid)
        peers = cluster.shape.decode if member.name.startswith("prefill") else 1
        # A prefill worker has its own pool and one mapping of each decode worker's.
        if footprint.kv_mappings > 1 + peers:
            yield Violation("leaked memory", f"{member.name} has {footprint.kv_mappings} mappings of KV pools")
        if footprint.descriptors > 40 + _SPARE_DESCRIPTORS:
            yield Violation("leaked descriptors", f"{member.name} has {footprint.descriptors} open")


def check_logs(member: Member) -> Iterator[Violation]:
    """Neither an error nor a traceback, in no life."""
    for path in member.log_paths:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            level = ""
            with contextlib.suppress(ValueError, AttributeError):
                level = json.loads(line).get("level", "")
            if level in ("error", "critical") or any(bad in line for bad in _BAD_LINES):
                yield Violation("error in a log", f"{path.name}: {line[:1500]}")


def check_gone(cluster: ChaosCluster) -> Iterator[Violation]:
    """After the end there is no process of the run, no socket, and every exit code was 0."""
    for name, code in cluster.exit_codes:
        if code != 0:
            yield Violation("bad end", f"{name} ended with {code} after SIGTERM")
    for pid in marked_processes(cluster.mark):
        yield Violation("orphan", f"process {pid} is still there")
    with contextlib.suppress(FileNotFoundError):
        for path in cluster.socket_directory.iterdir():
            yield Violation("orphan", f"{path} is still there")


def marked_processes(mark: str) -> list[int]:
    """The processes with this mark in their environment; memfds cannot outlive them."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
