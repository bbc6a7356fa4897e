"""What the fused path keeps: found again, never used stale or damaged, and not needed where it cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fused_models import tiny_config
from tiny_models import make_tiny_model
from twinstage.models.fused.artifacts import Artifact
from twinstage.models.fused.attention_work import AttentionShape
from twinstage.models.fused.formats import WeightFormat
from twinstage.models.fused.load import kernel_key, load_fused
from twinstage.models.fused.memory import AlignedMemory
from twinstage.models.resolve import resolve_model

pytestmark = pytest.mark.xdist_group("fused")

_LOAD_WITHOUT_COMPILER = """
import sys
from pathlib import Path
from twinstage.models.fused.load import load_fused
from twinstage.models.resolve import resolve_model
model = load_fused(resolve_model(sys.argv[1]), precision="fp32", threads=1)
print(",".join(name for name in ("numba", "torch", "transformers") if name in sys.modules))
"""


def _artifact(directory: Path, key: str = "k") -> Artifact:
    return Artifact(directory=directory, kind="weights", name="model", key=key)


def _content(memory: AlignedMemory) -> bytes:
    return bytes(memory.view())


def test_a_file_is_made_once_and_another_key_is_another_file(tmp_path: Path) -> None:
    calls: list[bytes] = []

    def make(content: bytes) -> AlignedMemory:
        calls.append(content)
        return AlignedMemory.of(content)

    assert _content(_artifact(tmp_path).load_or_make(lambda: make(b"first"))) == b"first"
    assert _content(_artifact(tmp_path).load_or_make(lambda: make(b"second"))) == b"first"
    assert _content(_artifact(tmp_path, "other").load_or_make(lambda: make(b"third"))) == b"third"
    assert calls == [b"first", b"third"]


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    artifact = _artifact(tmp_path)
    artifact.load_or_make(lambda: AlignedMemory.of(b"x" * 100))
    data = bytearray(artifact.path.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
    artifact.path.write_bytes(data[:-10] if damage == "cut" else data)
    assert _content(artifact.load_or_make(lambda: AlignedMemory.of(b"again"))) == b"again"
    assert _content(artifact.load_or_make(lambda: AlignedMemory.of(b"never"))) == b"again"


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert _content(_artifact(blocked).load_or_make(lambda: AlignedMemory.of(b"made"))) == b"made"


def test_one_makes_it_while_others_wait(tmp_path: Path) -> None:
    makers: list[int] = []
    results: list[bytes] = []

    def work(number: int) -> None:
        def make() -> AlignedMemory:
            makers.append(number)
            return AlignedMemory.of(b"whole" * 1000)

        results.append(_content(_artifact(tmp_path).load_or_make(make)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"whole" * 1000] * 4
    assert len(makers) == 1
    assert [path.suffix for path in sorted(_artifact(tmp_path).path.parent.iterdir())] == [".bin", ".lock"]


def test_kernels_of_another_cpu_shape_or_format_are_other_files() -> None:
    shapes = [AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, dtype=dtype) for dtype in ("float32", "float16")]
    keys = {kernel_key(weight_format, shape) for weight_format in WeightFormat for shape in shapes}
    assert len(keys) == len(WeightFormat) * len(shapes)
    command = f"from twinstage.models.fused.load import *; print(kernel_key(WeightFormat.FP32, {shapes[0]!r}))"
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell"}
    other = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert len(other.stdout.strip()) == len(kernel_key(WeightFormat.FP32, shapes[0]))
    assert other.stdout.strip() not in keys


def test_a_prepared_model_needs_no_compiler_and_no_transformers(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "llama", tiny_config("llama"))
    load_fused(resolve_model(str(directory)), precision="fp32", threads=1)
    loaded = subprocess.run(
        [sys.executable, "-c", _LOAD_WITHOUT_COMPILER, str(directory)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert loaded.stdout.strip() == ""
