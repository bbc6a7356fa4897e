"""Wrong start-up: one clear line and an exit code, or a refused pairing that the log explains."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ROOT, ProcessCluster, free_port, wait_until
from tiny_models import make_tiny_llama
from twinstage.v1 import admin_pb2

EXIT_CODE = 2


def _run(module: str, *flags: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", module, *flags], cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, result.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("module", ["prefill_worker", "decode_worker"])
def test_missing_model(module: str, tmp_path: Path) -> None:
    code, message = _run(module, "--model", str(tmp_path / "nowhere"), "--listen", "127.0.0.1:0")
    assert code == EXIT_CODE
    assert "nowhere" in message


def test_truncated_weights(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    code, message = _run("prefill_worker", "--model", str(broken), "--listen", "127.0.0.1:0")
    assert code == EXIT_CODE
    assert "model.safetensors" in message


def test_truncated_gguf(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    code, message = _run(
        "prefill_worker",
        "--model",
        str(broken),
        "--listen",
        "127.0.0.1:0",
        "--cache-directory",
        str(tmp_path / "cache"),
    )
    assert code == EXIT_CODE
    assert "broken.gguf" in message


def test_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a model")
    code, message = _run("decode_worker", "--model", str(tmp_path), "--listen", "127.0.0.1:0")
    assert code == EXIT_CODE
    assert "config.json" in message


@pytest.mark.parametrize("module", ["router", "prefill_worker", "decode_worker"])
def test_port_in_use(module: str, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--workers", "127.0.0.1:1"] if module == "router" else ["--model", str(tiny_model)]
        code, message = _run(module, "--listen", f"127.0.0.1:{port}", *flags)
    assert code == EXIT_CODE
    assert str(port) in message
    assert "in use" in message


def test_wrong_flag() -> None:
    code, message = _run("router", "--no-such-flag")
    assert code == EXIT_CODE
    assert "no-such-flag" in message


def test_serve_refuses_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [str(Path(sys.executable).with_name("twinstage")), "serve", "--model", "demo", "--port", str(port)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == EXIT_CODE
    assert str(port) in result.stderr


def test_a_worker_of_another_model_revision_is_refused_by_name(prepared_tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_tiny_llama(other, seed=99)
    name = ("--served-model-name", "tiny", "--weights", "fp32")
    with ProcessCluster(tmp_path) as cluster:
        cluster.start_workers(str(prepared_tiny_model), flags=name)
        strange_address = f"127.0.0.1:{free_port()}"
        known = [*(role.address for role in cluster.processes), strange_address]
        addresses = [argument for address in known for argument in ("--workers", address)]
        router = cluster.launch("router", "router", "--listen", "127.0.0.1:0", *addresses)
        cluster.wait_ready(router)

        def states() -> dict[str, int]:
            return {worker.id: worker.state for worker in cluster.workers()}

        # Who comes first decides what the model is, so the stranger comes later.
        wait_until(
            lambda: list(states().values()).count(admin_pb2.WORKER_STATE_READY) == 2, timeout_s=30, what="two are ready"
        )
        cluster.launch_worker("decode", str(other), *name, "--listen", strange_address, name="stranger")

        def settled() -> bool:
            return sorted(states().values()) == [
                admin_pb2.WORKER_STATE_READY,
                admin_pb2.WORKER_STATE_READY,
                admin_pb2.WORKER_STATE_REFUSED,
            ]

        wait_until(settled, timeout_s=30, what="two workers ready, one refused")
        assert states()["stranger"] == admin_pb2.WORKER_STATE_REFUSED
        assert "fingerprint" in cluster.worker("stranger").detail
        refusals = [event for event in router.events() if event["event"] == "worker refused"]
        assert [event["worker"] for event in refusals] == ["stranger"]
        assert "fingerprint" in refusals[0]["detail"]
