"""What a first start makes in a process of its own: a worker stays small, errors keep their names, nobody is left."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from harness import ProcessCluster, RoleProcess, wait_until
from twinstage.errors import ModelError, NotFusible
from twinstage.models import apart
from twinstage.models.fused.artifacts import Artifact
from twinstage.models.fused.load import load_fused
from twinstage.models.fused.memory import AlignedMemory, Memory
from twinstage.models.resolve import default_cache_directory, resolve_model

pytestmark = pytest.mark.xdist_group("fused")


@pytest.fixture
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker: the tests' own process has torch."""
    monkeypatch.setattr(apart, "is_worth_it", lambda: True)


def _children(pid: int) -> list[int]:
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for each in lists for child in each]


def _launch(cluster: ProcessCluster, model: Path, cache: Path) -> RoleProcess:
    flags = ("--weights", "fp32", "--cache-directory", str(cache), "--kv-cache-bytes", "1MiB")
    return cluster.launch_worker("prefill", str(model), *flags)


def test_a_first_start_leaves_a_worker_that_never_loaded_torch(prepared_tiny_model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(default_cache_directory() / "kernels")  # compiled already
    with ProcessCluster(tmp_path) as cluster:
        worker = _launch(cluster, prepared_tiny_model, cache)
        wait_until(worker.poll_ready, timeout_s=400, what="the worker is ready")
        maps = Path(f"/proc/{worker.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert str(cache / "weights") in maps
        assert not _children(worker.pid)
    events = {(event["event"], event.get("step", "")): event for event in worker.events()}
    assert any("comparing" in step for _, step in events)
    assert events["compared with the stock model", ""]["role"] == "prefill"  # what the other process logs
    assert len(list((cache / "trials").glob("*.bin"))) == 1


def test_a_signal_ends_both(prepared_tiny_model: Path, tmp_path: Path) -> None:
    with ProcessCluster(tmp_path) as cluster:
        worker = _launch(cluster, prepared_tiny_model, tmp_path / "cache")
        wait_until(lambda: bool(_children(worker.pid)), timeout_s=120, what="the other process is there")
        (child,) = _children(worker.pid)
        assert worker.stop() == 0
        wait_until(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child), timeout_s=30, what="it has ended")


def _is_zombie(pid: int) -> bool:
    """Ended, but its new parent, which some containers lack, has not asked for its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.usefixtures("worth_it")
def test_a_killed_process_is_an_error_that_says_so(tiny_model: Path, tmp_path: Path) -> None:
    before = set(_children(os.getpid()))

    def kill() -> None:
        wait_until(lambda: bool(set(_children(os.getpid())) - before), timeout_s=120, what="the other process is there")
        for child in set(_children(os.getpid())) - before:
            os.kill(child, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ModelError, match=r"tiny-llama cannot be prepared: .* was ended by SIGKILL; .* memory"):
        load_fused(resolve_model(str(tiny_model)), precision="fp32", threads=1, cache_directory=tmp_path)
    killer.join()


@pytest.mark.usefixtures("worth_it")
def test_a_refusal_keeps_its_name_and_its_reason(tiny_model: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    for path in tiny_model.iterdir():
        (odd / path.name).write_bytes(path.read_bytes())
    tensors, name = load_file(odd / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    save_file(
        tensors | {name: tensors[name][:, :-4].contiguous()}, odd / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(NotFusible, match=f"{name} is of shape"):
        load_fused(resolve_model(str(odd)), precision="fp32", threads=1, cache_directory=tmp_path / "cache")


def _content(memory: Memory) -> bytes:
    return bytes(memory.view())


@pytest.mark.parametrize("fills", [True, False])
def test_what_another_process_did_not_put_there_is_made_here(tmp_path: Path, fills: bool) -> None:
    artifact = Artifact(directory=tmp_path, kind="weights", name="model", key="k")

    def fill() -> None:
        if fills:
            artifact.load_or_make(lambda: AlignedMemory.of(b"there"), _content)

    found = artifact.load_or_make(lambda: AlignedMemory.of(b"here"), _content, fill=fill)
    assert found == (b"there" if fills else b"here")


def test_a_cache_that_cannot_be_written_is_not_filled(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    artifact = Artifact(directory=tmp_path / "file", kind="weights", name="model", key="k")
    calls: list[int] = []
    found = artifact.load_or_make(lambda: AlignedMemory.of(b"here"), _content, fill=lambda: calls.append(1))
    assert (found, calls) == (b"here", [])
