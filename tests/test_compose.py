"""`docker compose up`, as a user runs it: healthy, answers, scales, and finds the new replicas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from harness import ROOT, free_port, wait_until
from twinstage.v1 import admin_pb2, admin_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("docker"), pytest.mark.timeout(900)]


def _engine_version() -> str:
    if shutil.which("docker") is None:
        return ""
    result = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() if result.returncode == 0 else ""


def _missing() -> str:
    """What keeps these tests from running here; empty when nothing does."""
    if not ENGINE:
        return "no Docker engine answers `docker version`"
    if not (_torch_wheels() or os.environ.get("TORCH_INDEX")):
        return "no CPU build of torch for the image: name a folder in PIP_FIND_LINKS or an index in TORCH_INDEX"
    return ""


def _torch_wheels() -> list[Path]:
    """Wheels of the torch that the image takes, in the folder that pip looks into on this machine."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    version = next(pin.removeprefix("torch==") for pin in pins if pin.startswith("torch=="))
    return list(Path(os.environ.get("PIP_FIND_LINKS") or "/nowhere").glob(f"torch-{version}*.whl"))


ENGINE = _engine_version()
needs_engine = pytest.mark.skipif(bool(_missing()), reason=_missing())


class Compose:
    """One compose project in a copy of the checkout."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self._directory = directory
        self._environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": f"twinstage-test-{self.port}",
            "TWINSTAGE_PORT": str(self.port),
            "DOCKER_BUILDKIT": "1",
        }
        self._files = ["-f", "compose.yaml"]
        wheels = _torch_wheels()
        if wheels and int(ENGINE.split(".")[0]) >= 23:
            self._environment["TWINSTAGE_WHEELS"] = str(wheels[0].parent)
            self._files += ["-f", "deploy/compose.wheels.yaml"]
        else:  # this engine knows no named build contexts
            for wheel in wheels:
                shutil.copy(wheel, directory / "deploy" / "wheels")

    def run(self, *arguments: str, timeout_s: float = 600.0) -> str:
        command = ["docker", "compose", *self._files, *arguments]
        result = subprocess.run(
            command,
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-4000:]}\n{result.stderr[-6000:]}"
        return result.stdout

    def workers(self) -> list[admin_pb2.Worker]:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return list(stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=10).workers)

    def ready(self, role: int) -> list[str]:
        return [w.id for w in self.workers() if w.role == role and w.state == admin_pb2.WORKER_STATE_READY]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    directory = tmp_path_factory.mktemp("compose") / "checkout"
    ignore = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.whl", ".*_cache", "node_modules")
    shutil.copytree(ROOT, directory, ignore=ignore)
    compose = Compose(directory)
    try:
        compose.run("build", "router")
        compose.run("up", "--detach", "--wait", "--wait-timeout", "480")
        yield compose
    except AssertionError:
        print(compose.run("logs", "--no-color", "--tail", "100"))
        raise
    finally:
        compose.run("down", "--volumes", "--timeout", "20")


@needs_engine
def test_everything_is_healthy_by_grpc_health(compose: Compose) -> None:
    lines = compose.run("ps", "--format", "json").splitlines()
    services = {entry["Service"]: entry["Health"] for entry in map(json.loads, lines)}
    assert services == {"router": "healthy", "prefill_worker": "healthy", "decode_worker": "healthy"}


@needs_engine
def test_it_answers_over_tcp(compose: Compose) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{compose.port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        greedy = common_pb2.SamplingOptions(temperature=0.0)
        request = generation_pb2.GenerateRequest(prompt="The capital of France is", sampling=greedy)
        response = stub.Generate(request, timeout=60)
    assert "Paris" in response.results[0].text
    assert response.placement.transport == "tcp", "containers share no memory"
    assert response.placement.kv_bytes > 0


@needs_engine
def test_it_scales_and_the_router_finds_and_uses_the_replicas(compose: Compose) -> None:
    compose.run("up", "--detach", "--wait", "--wait-timeout", "480", "--no-recreate", "--scale", "decode_worker=2")
    wait_until(lambda: len(compose.ready(admin_pb2.WORKER_ROLE_DECODE)) == 2, timeout_s=60, what="two decode workers")
    used = set()
    with grpc.insecure_channel(f"127.0.0.1:{compose.port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for _ in range(8):
            used.add(stub.Generate(generation_pb2.GenerateRequest(prompt="Hello"), timeout=60).placement.decode_worker)
    assert used == set(compose.ready(admin_pb2.WORKER_ROLE_DECODE))
