"""How workers begin and end as processes: what they refuse, with which words and exit code, and when they answer."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_worker.config import DecodeSettings
from harness import ROOT, ProcessCluster, wait_until
from prefill_worker.config import PrefillSettings
from twinstage.addresses import split_address
from twinstage.errors import ConfigError
from twinstage.hosting.assemble import build_engine
from twinstage.hosting.found_model import find_model
from twinstage.hosting.settings import WorkerSettings
from twinstage.settings import read_settings
from twinstage.types import Role

pytestmark = pytest.mark.xdist_group("worker_startup")


def _run(role: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"{role}_worker", "--listen", "127.0.0.1:0", *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _refusal(result: subprocess.CompletedProcess[str], role: str) -> str:
    """The one line that says why a worker did not start."""
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{role}_worker: "), result.stderr
    return last


# --- settings -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TWINSTAGE_")]:
        monkeypatch.delenv(name)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINSTAGE_BLOCK_SIZE", "8")
    monkeypatch.setenv("TWINSTAGE_KV_CACHE_BYTES", "64MiB")
    monkeypatch.setenv("TWINSTAGE_DRAIN_TIMEOUT", "3")
    settings = read_settings(DecodeSettings, ["--block-size", "32", "--kv-transports", "tcp"])
    assert settings.block_size == 32
    assert settings.kv_cache_bytes == 64 * 1024 * 1024
    assert settings.drain_timeout == 3.0
    assert settings.transports == ("tcp",)


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        (PrefillSettings, ["--block-size", "0"], ["--block-size: must be at least 1, not '0'"]),
        (PrefillSettings, ["--max-model-len", "0"], ["--max-model-len"]),
        (PrefillSettings, ["--listen", "nowhere"], ["--listen", "host:port"]),
        (PrefillSettings, ["--kv-transports", "shm,pigeon"], ["--kv-transports", "shm, tcp"]),
        (
            PrefillSettings,
            ["--kv-cache-bytes", "many"],
            ["--kv-cache-bytes: must be a number of bytes, such as 512MiB"],
        ),
        (PrefillSettings, ["--kv-cache-bytes", "5XB"], ["--kv-cache-bytes: must be a number of bytes, such as 512MiB"]),
        (PrefillSettings, ["--lease", "1000"], ["--lease: must be at most 600, not '1000'"]),
        (PrefillSettings, ["--dtype", "float8"], ["--dtype: must be 'float32' or 'bfloat16', not 'float8'"]),
        (DecodeSettings, ["--speculative", "draft_model"], ["--speculative draft_model needs --draft-model"]),
        (DecodeSettings, ["--kv-listen", "1.2.3.4"], ["--kv-listen", "host:port"]),
        (DecodeSettings, ["--no-such-flag", "1"], ["--no-such-flag"]),
        (DecodeSettings, ["--threads", "0", "--block-size", "x"], ["--threads", "--block-size"]),
    ],
)
def test_every_wrong_setting_is_named(kind: type[WorkerSettings], flags: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(kind, flags)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_variable_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINSTAGE_BLOCK_SIZE", "many")
    with pytest.raises(ConfigError, match=r"^TWINSTAGE_BLOCK_SIZE: must be a whole number, not 'many'; --threads: "):
        read_settings(DecodeSettings, ["--threads", "few"])


def test_what_is_encoded_together_is_larger_than_a_step_unless_told() -> None:
    assert read_settings(PrefillSettings, []).max_tokens_per_encoding_batch == 1024
    assert read_settings(PrefillSettings, ["--max-tokens-per-step", "512"]).max_tokens_per_encoding_batch == 512


def test_the_secret_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    settings = read_settings(PrefillSettings, ["--kv-secret-file", str(path)])
    with pytest.raises(ConfigError, match="No such file"):
        settings.kv_secrets()
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        settings.kv_secrets()
    path.write_bytes(b"0123456789abcdef\n")
    assert settings.kv_secrets() == (b"0123456789abcdef",)
    path.write_bytes(b"fedcba9876543210\n0123456789abcdef\n")
    assert settings.kv_secrets() == (b"fedcba9876543210", b"0123456789abcdef")
    assert read_settings(PrefillSettings, []).kv_secrets() == ()


def test_addresses_are_split() -> None:
    assert split_address("[::1]:50") == ("::1", 50)
    assert split_address("localhost:0") == ("localhost", 0)
    for wrong in ("localhost", ":x", "host:70000", "host:-1"):
        with pytest.raises(ValueError, match="host:port"):
            split_address(wrong)


def test_help_names_every_flag() -> None:
    result = _run("decode", "--help")
    assert result.returncode == 0
    for name in DecodeSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in result.stdout
    # Written for people who do not know Python.
    assert "--threads NUMBER" in result.stdout
    text = " ".join(result.stdout.split())
    assert not re.search(r"None|True|False|\bstr\b|\bint\b|\bfloat\b|Path\b|ByteSize|default: \d+\.0\)", text)
    assert "Memory for KV blocks, such as 512MiB or 4GiB. (default: 512MiB)" in text
    assert "is TWINSTAGE_LOG_LEVEL" in text


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_missing_model_is_refused_before_anything_heavy(role: str, tmp_path: Path) -> None:
    line = _refusal(_run(role, "--model", str(tmp_path / "nothing")), role)
    assert str(tmp_path / "nothing") in line


def test_a_wrong_flag_is_refused() -> None:
    assert "--no-such-flag" in _refusal(_run("prefill", "--no-such-flag", "1"), "prefill")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    _refusal(_run("decode", "--model", str(tmp_path)), "decode")


def test_truncated_weights_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    with weights.open("rb+") as file:
        file.truncate(weights.stat().st_size // 2)
    assert "broken" in _refusal(_run("prefill", "--model", str(broken)), "prefill")


def test_a_port_in_use_is_refused_before_the_model_is_loaded(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        line = _refusal(_run("decode", "--model", str(tiny_model), "--listen", address), "decode")
    assert address in line
    assert "in use" in line


def test_a_pool_without_a_block_is_refused(tiny_model: Path) -> None:
    settings = read_settings(DecodeSettings, ["--model", str(tiny_model), "--kv-cache-bytes", "100", "--threads", "1"])
    with pytest.raises(ConfigError, match="--kv-cache-bytes 100 holds no KV block"):
        build_engine(settings, find_model(settings), role=Role.DECODE, protocol_version=1)


def test_a_worker_promises_no_longer_sequence_than_its_pool_holds(tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), "--kv-cache-bytes", "16KiB", "--threads", "1", "--weights", "stock"]
    settings = read_settings(DecodeSettings, flags)
    parts, description = build_engine(settings, find_model(settings), role=Role.DECODE, protocol_version=1)
    try:
        pool_tokens = description.total_kv_blocks * description.kv_block_size
        assert description.model.max_model_len == parts.core.config.max_model_len == pool_tokens
    finally:
        parts.close()


# --- the beginning and the end --------------------------------------------------------------------


@contextmanager
def _loading_worker(model: Path, directory: Path) -> Iterator[tuple[ProcessCluster, str]]:
    """A prefill worker that answers, but has not loaded its model yet; and its address."""
    with ProcessCluster(directory) as cluster:
        role = cluster.launch_worker("prefill", str(model))
        ports: list[int] = []

        def has_port() -> bool:
            ports[:] = [event["port"] for event in role.events() if event.get("event") == "loading model"]
            return bool(ports)

        wait_until(has_port, timeout_s=60, what="the server listens")
        yield cluster, f"127.0.0.1:{ports[0]}"


def test_health_answers_while_the_model_loads_and_turns_to_serving(tiny_model: Path, tmp_path: Path) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    with _loading_worker(tiny_model, tmp_path) as (cluster, address), grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="twinstage.worker.v1.PrefillService")
        statuses = []
        for response in stub.Watch(request, timeout=120):
            statuses.append(response.status)
            if response.status == serving:
                break
        assert statuses == [not_serving, serving]
        (role,) = cluster.processes
        assert role.stop() == 0
        assert [event["leaked_blocks"] for event in role.events() if event.get("event") == "worker stopped"] == [0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_the_process_at_once(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with _loading_worker(tiny_model, tmp_path) as (cluster, _):
        (role,) = cluster.processes
        started_s = time.monotonic()
        role.send(number)
        assert role.process.wait(30) == 0
        assert time.monotonic() - started_s < 10


def test_a_worker_ends_with_its_parent_when_asked(tiny_model: Path, tmp_path: Path) -> None:
    """A launcher starts a worker and is killed; the worker follows it."""
    log = tmp_path / "worker.log"
    launcher = (
        "import subprocess, sys, time\n"
        f"log = open({str(log)!r}, 'wb')\n"
        "child = subprocess.Popen([sys.executable, '-m', 'prefill_worker', '--listen', '127.0.0.1:0',"
        f" '--model', {str(tiny_model)!r}], stdout=log, stderr=log)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(120)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", launcher],
        cwd=ROOT,
        env={**os.environ, "TWINSTAGE_EXIT_WITH_PARENT": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_until(lambda: "loading model" in log.read_text(), timeout_s=60, what="the worker loads")
        parent.kill()
        parent.wait(10)
        wait_until(lambda: not Path(f"/proc/{child}/fd").exists() or _is_zombie(child), timeout_s=20, what="it follows")
    finally:
        if parent.poll() is None:
            parent.kill()
            parent.wait(10)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
