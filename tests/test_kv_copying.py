"""Copies with a checksum: every byte of the target and no other, and the checksum that xxHash itself computes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstage.kv import copying
from twinstage.kv.copy_code import LINE_BYTES
from twinstage.kv.copying import copy_with_checksum

ROOM = 8192
LINES = st.integers(0, 70).map(lambda lines: lines * LINE_BYTES)  # up to four groups of lines and some more


def room() -> np.ndarray:
    """Bytes that begin at a line."""
    whole = np.full(ROOM + LINE_BYTES, 0xAA, dtype=np.uint8)
    start = -whole.ctypes.data % LINE_BYTES
    return whole[start : start + ROOM]


@settings(deadline=None)  # the first copy compiles
@given(
    size=LINES | st.integers(0, 2500), start=st.sampled_from([0, 64, 128, 1, 32, 63]), source_start=st.integers(0, 99)
)
def test_the_target_is_written_and_nothing_else_and_the_checksum_is_right(
    size: int, start: int, source_start: int
) -> None:
    data = random.Random(size).randbytes(ROOM)
    source = memoryview(bytearray(data))[source_start : source_start + size]
    target = room()
    wanted = bytes(target)
    wanted = wanted[:start] + bytes(source) + wanted[start + size :]
    assert copy_with_checksum(memoryview(target)[start : start + size], source) == xxhash.xxh3_64_intdigest(source)
    assert bytes(target) == wanted
    assert bytes(source) == data[source_start : source_start + size]


def test_aligned_blocks_are_copied_by_the_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would try the way around it only."""
    sizes: list[int] = []
    monkeypatch.setattr(copying, "_compiled", lambda: lambda target, source, size: sizes.append(size) or 5)
    assert copy_with_checksum(memoryview(room()), memoryview(bytearray(ROOM))) == 5
    assert sizes == [ROOM]


@pytest.mark.parametrize(("target_size", "source_size"), [(1000, 999), (999, 1000), (0, 1), (1024, 1088)])
def test_other_sizes_are_refused_before_anything_is_written(target_size: int, source_size: int) -> None:
    target = bytearray(target_size)
    with pytest.raises(ValueError, match="do not fit"):
        copy_with_checksum(memoryview(target), memoryview(bytearray(b"\x01" * source_size)))
    assert target == bytes(target_size)
