"""What the fused path keeps: found again, never used stale or damaged, and not needed where it cannot be written."""

from __future__ import annotations

import mmap
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fused_models import tiny_config
from tiny_models import make_tiny_model
from twinstage.models.fused.artifacts import Artifact
from twinstage.models.fused.attention_work import AttentionShape
from twinstage.models.fused.formats import WeightFormat
from twinstage.models.fused.load import NOT_COMPILED, kernel_key, load_fused
from twinstage.models.fused.memory import AlignedMemory, Memory
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


def _content(memory: Memory) -> bytes:
    return bytes(memory.view())


def _loaded(artifact: Artifact, content: bytes) -> bytes:
    return artifact.load_or_make(lambda: AlignedMemory.of(content), _content)


def test_a_file_is_made_once_and_another_key_is_another_file(tmp_path: Path) -> None:
    assert _loaded(_artifact(tmp_path), b"first") == b"first"
    assert _loaded(_artifact(tmp_path), b"second") == b"first"
    assert _loaded(_artifact(tmp_path, "other"), b"third") == b"third"
    assert stat.S_IMODE(_artifact(tmp_path).path.stat().st_mode) == 0o600
    assert stat.S_IMODE(_artifact(tmp_path).path.parent.stat().st_mode) == 0o700


def test_files_that_nobody_used_for_a_month_are_removed_when_another_is_written(tmp_path: Path) -> None:
    unused, used, recent = (_artifact(tmp_path, key) for key in ("unused", "used", "recent"))
    for artifact in (unused, used, recent):
        _loaded(artifact, b"content")
    for artifact in (unused, used):
        os.utime(artifact.path, (0, 0))
    assert _loaded(used, b"is there") == b"content"
    _loaded(_artifact(tmp_path, "new"), b"new")
    assert [artifact.path.exists() for artifact in (unused, used, recent)] == [False, True, True]


def _flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _replace_by_link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _replace_by_another(path: Path) -> None:
    other = Artifact(directory=path.parent.parent, kind="weights", name="model", key="another")
    _loaded(other, b"those of another model")
    other.path.rename(path)


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 10), "bytes instead of"),
    "cut in its header": (lambda path: os.truncate(path, 20), "cut short"),
    "empty": (lambda path: os.truncate(path, 0), "cut short"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 10), "bytes instead of"),
    "flipped": (_flip_last, "digest"),
    "another": (_replace_by_another, "another file than its name says"),
    "writable for others": (lambda path: path.chmod(0o666), "others may write it: its mode is 666"),
    "writable for the group": (lambda path: path.chmod(0o620), "others may write it: its mode is 620"),
    "link": (_replace_by_link, "cannot be opened"),
    "pipe": (_replace_by_pipe, "no regular file"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_file_that_is_damaged_or_open_to_others_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    artifact = _artifact(tmp_path)
    _loaded(artifact, b"x" * 100)
    change, reason = UNUSABLE[case]
    change(artifact.path)
    assert _loaded(artifact, b"again") == b"again"
    assert reason in capsys.readouterr().out
    assert _loaded(artifact, b"never") == b"again"


def test_a_file_of_another_user_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = _artifact(tmp_path)
    _loaded(artifact, b"theirs")
    if os.geteuid() == 0:
        os.chown(artifact.path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert _loaded(artifact, b"ours") == b"ours"
    assert "it belongs to user" in capsys.readouterr().out


def test_a_file_that_cannot_be_parsed_is_made_again(tmp_path: Path) -> None:
    def parse(memory: Memory) -> bytes:
        if _content(memory) == b"old":
            raise ValueError("of an old kind")
        return _content(memory)

    _loaded(_artifact(tmp_path), b"old")
    assert _artifact(tmp_path).load_or_make(lambda: AlignedMemory.of(b"new"), parse) == b"new"
    assert _loaded(_artifact(tmp_path), b"never") == b"new"


def test_a_directory_that_others_could_write_is_closed_to_them(tmp_path: Path) -> None:
    directory = _artifact(tmp_path).path.parent
    directory.mkdir()
    directory.chmod(0o777)
    assert _loaded(_artifact(tmp_path), b"made") == b"made"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert _loaded(_artifact(blocked), b"made") == b"made"


def test_a_full_disk_costs_only_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        found = _loaded(_artifact(tmp_path), b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found == b"x" * 100_000
    assert "the cache cannot be written" in capsys.readouterr().out
    assert [path.suffix for path in _artifact(tmp_path).path.parent.iterdir()] == [".lock"]


def test_an_error_of_making_is_not_taken_for_one_of_the_cache(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> AlignedMemory:
        calls.append(1)
        raise OSError("the model cannot be read")

    with pytest.raises(OSError, match="the model cannot be read"):
        _artifact(tmp_path).load_or_make(make, _content)
    assert len(calls) == 1


def test_the_content_is_the_mapped_file(tmp_path: Path) -> None:
    """So that two workers share it: no private copy remains."""
    artifact = _artifact(tmp_path)
    memory = artifact.load_or_make(lambda: AlignedMemory.of(b"x" * 100_000), lambda memory: memory)
    maps = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in maps if line.endswith(str(artifact.path))]
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    assert start <= memory.address < memory.address + memory.size <= end
    assert line.split()[1] == "r--s"
    assert memory.address % mmap.PAGESIZE == 0


def test_one_makes_it_while_others_wait(tmp_path: Path) -> None:
    makers: list[int] = []
    results: list[bytes] = []

    def work(number: int) -> None:
        def make() -> AlignedMemory:
            makers.append(number)
            return AlignedMemory.of(b"whole" * 1000)

        results.append(_artifact(tmp_path).load_or_make(make, _content))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"whole" * 1000] * 4
    assert len(makers) == 1
    assert [path.suffix for path in sorted(_artifact(tmp_path).path.parent.iterdir())] == [".bin", ".lock"]


def test_kernels_of_another_cpu_shape_or_format_are_other_files() -> None:
    shape = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, dtype="bfloat16")
    shapes = [shape, replace(shape, bfloat16_dot=True), replace(shape, dtype="float16")]
    keys = {kernel_key(weight_format, shape) for weight_format in WeightFormat for shape in shapes}
    assert len(keys) == len(WeightFormat) * len(shapes)
    command = f"from twinstage.models.fused.load import *; print(kernel_key(WeightFormat.FP32, {shapes[0]!r}))"
    environment = os.environ | {"NUMBA_CPU_NAME": "haswell"}
    other = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert len(other.stdout.strip()) == len(kernel_key(WeightFormat.FP32, shapes[0]))
    assert other.stdout.strip() not in keys


def test_kernels_depend_on_every_file_that_their_compiler_imports() -> None:
    command = "import sys, twinstage.models.fused.compile; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=120)
    without = {f"twinstage.models.fused.{Path(name).stem}" for name in NOT_COMPILED}
    assert "twinstage.models.fused.step" in imported.stdout.split()
    assert not without.intersection(imported.stdout.split())


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
