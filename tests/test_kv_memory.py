"""Shared block memory: two mappings of the same bytes, checks at the door, and an end that leaves nothing behind."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from twinstage.errors import ConfigError, StaleHandle, TransferError
from twinstage.kv.memory import BlockMemory


def test_a_peer_sees_what_the_owner_writes_and_the_reverse() -> None:
    owner = BlockMemory.create(num_blocks=4, block_bytes=100)
    peer = BlockMemory.attach(owner.fd, num_blocks=4, block_bytes=100)
    owner.block(2)[:5] = b"hello"
    assert bytes(peer.block(2)[:5]) == b"hello"
    peer.block(3)[99:] = b"!"
    assert bytes(owner.view()[399:]) == b"!"
    assert bytes(owner.block(1)) == bytes(100)
    peer.close()
    owner.close()


def test_a_peer_outlives_the_owner() -> None:
    owner = BlockMemory.create(num_blocks=1, block_bytes=8)
    peer = BlockMemory.attach(owner.fd, num_blocks=1, block_bytes=8)
    owner.close()
    peer.block(0)[:] = b"12345678"
    assert bytes(peer.block(0)) == b"12345678"
    peer.close()


def _resident_kib() -> Counter[tuple[int, int]]:
    """How many mappings of KV memory, by size and resident size, this process has: fixtures may have some, too."""
    smaps = Path("/proc/self/smaps").read_text()
    pattern = r"memfd:twinstage-kv.*\nSize: +(\d+) kB(?:\n(?!Rss).*)*\nRss: +(\d+) kB"
    return Counter((int(size), int(resident)) for size, resident in re.findall(pattern, smaps))


def _refuse_advice(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    class Libc:
        def madvise(self, _address: int, _size: int, _advice: int) -> int:
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr("twinstage.kv.memory._LIBC", Libc())


@pytest.mark.parametrize("old_kernel", [False, True])
def test_every_page_is_in_place_on_both_sides(monkeypatch: pytest.MonkeyPatch, old_kernel: bool) -> None:
    if old_kernel:
        _refuse_advice(monkeypatch, errno.EINVAL)
    others = _resident_kib()
    owner = BlockMemory.create(num_blocks=64, block_bytes=65536)
    assert _resident_kib() - others == Counter({(4096, 4096): 1})
    peer = BlockMemory.attach(owner.fd, num_blocks=64, block_bytes=65536)
    assert _resident_kib() - others == Counter({(4096, 4096): 2})
    peer.close()
    owner.close()
    assert _resident_kib() == others


def test_memory_that_the_machine_does_not_have_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before, others = set(os.listdir("/proc/self/fd")), _resident_kib()
    _refuse_advice(monkeypatch, errno.ENOMEM)
    with pytest.raises(ConfigError, match="--kv-cache-bytes"):
        BlockMemory.create(num_blocks=1, block_bytes=8)
    assert set(os.listdir("/proc/self/fd")) <= before
    assert _resident_kib() == others


def test_block_ids_are_checked() -> None:
    memory = BlockMemory.create(num_blocks=2, block_bytes=8)
    for block_id in (-1, 2, 1 << 40):
        with pytest.raises(StaleHandle):
            memory.block(block_id)
    memory.close()


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, 8), (8, 0), (-1, 8)])
def test_sizes_must_be_positive(num_blocks: int, block_bytes: int) -> None:
    with pytest.raises(ConfigError):
        BlockMemory.create(num_blocks=num_blocks, block_bytes=block_bytes)
    with pytest.raises(ConfigError):
        BlockMemory.attach(0, num_blocks=num_blocks, block_bytes=block_bytes)


def test_more_memory_than_there_is_is_a_configuration_error() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="--kv-cache-bytes"):
        BlockMemory.create(num_blocks=1 << 40, block_bytes=1 << 22)
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("num_blocks", [3, 5])
def test_a_peer_of_another_size_is_refused(num_blocks: int) -> None:
    owner = BlockMemory.create(num_blocks=4, block_bytes=8)
    with pytest.raises(TransferError, match="32 bytes"):
        BlockMemory.attach(owner.fd, num_blocks=num_blocks, block_bytes=8)
    owner.close()


def test_a_file_that_could_shrink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(32))
    with (tmp_path / "file").open("r+b") as file, pytest.raises(TransferError):
        BlockMemory.attach(file.fileno(), num_blocks=4, block_bytes=8)
    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 32)
    with pytest.raises(TransferError, match="sealed"):
        BlockMemory.attach(unsealed, num_blocks=4, block_bytes=8)
    os.close(unsealed)


def test_nobody_can_resize_the_memory() -> None:
    memory = BlockMemory.create(num_blocks=1, block_bytes=4096)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    memory.close()


def test_attaching_leaves_the_callers_descriptor_alone() -> None:
    owner = BlockMemory.create(num_blocks=1, block_bytes=8)
    passed = os.dup(owner.fd)
    peer = BlockMemory.attach(passed, num_blocks=1, block_bytes=8)
    os.close(passed)
    peer.close()
    assert os.fstat(owner.fd).st_size == 8
    owner.close()


def test_closing_is_idempotent_and_final() -> None:
    memory = BlockMemory.create(num_blocks=1, block_bytes=8)
    fd = memory.fd
    memory.close()
    memory.close()
    with pytest.raises(TransferError):
        memory.block(0)
    with pytest.raises(TransferError):
        _ = memory.fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_view_in_use_survives_the_close() -> None:
    memory = BlockMemory.create(num_blocks=1, block_bytes=8)
    view = memory.block(0)
    memory.close()
    view[:] = b"12345678"
    assert bytes(view) == b"12345678"


def test_mappings_end_with_their_last_view() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("twinstage-kv")

    before = mapped()
    memory = BlockMemory.create(num_blocks=1, block_bytes=8)
    view = memory.block(0)
    assert mapped() == before + 1
    memory.close()
    view.release()
    del view, memory
    assert mapped() == before
