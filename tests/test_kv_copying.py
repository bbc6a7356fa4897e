"""Streaming copies: every byte of the target and no other, whatever the sizes and places are."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinstage.kv.copying import copy_streaming

ROOM = 2048


@given(size=st.integers(0, 1200), target_start=st.integers(0, 300), source_start=st.integers(0, 300))
def test_exactly_the_target_is_written(size: int, target_start: int, source_start: int) -> None:
    source = bytearray(random.Random(size).randbytes(ROOM))
    target = bytearray(b"\xaa" * ROOM)
    wanted = bytes(target[:target_start]) + source[source_start : source_start + size]
    wanted += bytes(target[target_start + size :])
    copy_streaming(
        memoryview(target)[target_start : target_start + size], memoryview(source)[source_start : source_start + size]
    )
    assert target == wanted
    assert source == random.Random(size).randbytes(ROOM)


@pytest.mark.parametrize(("target_size", "source_size"), [(1000, 999), (999, 1000), (0, 1)])
def test_other_sizes_are_refused_before_anything_is_written(target_size: int, source_size: int) -> None:
    target = bytearray(target_size)
    with pytest.raises(ValueError, match="do not fit"):
        copy_streaming(memoryview(target), memoryview(bytearray(b"\x01" * source_size)))
    assert target == bytes(target_size)
