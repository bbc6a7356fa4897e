"""The layout's arithmetic and fingerprint; the store against a plain dictionary, and its bytes against the layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch

from twinstage.errors import ConfigError
from twinstage.kv.layout import KvLayout
from twinstage.kv.memory import BlockMemory
from twinstage.kv.store import KvStore

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=5, dtype="float32", model_fingerprint="m")


@pytest.fixture
def store() -> Iterator[KvStore]:
    memory = BlockMemory.create(num_blocks=7, block_bytes=LAYOUT.block_bytes)
    yield KvStore(LAYOUT, memory)
    memory.close()


def test_sizes() -> None:
    assert LAYOUT.token_bytes == 3 * 2 * 2 * 4 * 4
    assert LAYOUT.block_bytes == 5 * LAYOUT.token_bytes
    assert replace(LAYOUT, dtype="bfloat16").block_bytes * 2 == LAYOUT.block_bytes
    assert [LAYOUT.blocks_for(tokens) for tokens in (0, 1, 5, 6, 10, 11)] == [0, 1, 1, 2, 2, 3]


def test_every_field_changes_the_fingerprint() -> None:
    changes: list[dict[str, object]] = [
        {"num_layers": 4},
        {"num_kv_heads": 3},
        {"head_dim": 8},
        {"block_size": 16},
        {"dtype": "float16"},
        {"model_fingerprint": "n"},
    ]
    others = [replace(LAYOUT, **change).fingerprint for change in changes]  # type: ignore[arg-type]
    assert len({LAYOUT.fingerprint, *others}) == 1 + len(changes)
    assert replace(LAYOUT).fingerprint == LAYOUT.fingerprint
    assert len(LAYOUT.fingerprint) == 32


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 0), ("num_kv_heads", 0), ("head_dim", -1), ("block_size", 0), ("dtype", "int8")]
)
def test_wrong_layouts_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=str(value)):
        replace(LAYOUT, **{field: value})  # type: ignore[arg-type]


def test_memory_of_another_block_size_is_refused() -> None:
    memory = BlockMemory.create(num_blocks=1, block_bytes=LAYOUT.block_bytes - 1)
    with pytest.raises(ConfigError):
        KvStore(LAYOUT, memory)
    memory.close()


def test_what_is_written_is_read_back_across_scattered_blocks(store: KvStore) -> None:
    random, generator = Random(1), torch.Generator().manual_seed(1)
    sequences = {"a": ([6, 0, 3], 13), "b": ([2, 5], 10), "c": ([4], 1)}
    places = [(name, position) for name, (_, length) in sequences.items() for position in range(length)]
    random.shuffle(places)
    block_ids = torch.tensor([sequences[name][0][position // 5] for name, position in places])
    offsets = torch.tensor([position % 5 for _, position in places])
    written = {}
    for layer in range(3):
        key, value = (torch.randn(len(places), 2, 4, generator=generator) for _ in range(2))
        store.write(layer, block_ids, offsets, key, value)
        written[layer] = {place: (key[row], value[row]) for row, place in enumerate(places)}
    for layer in range(3):
        for name, (blocks, length) in sequences.items():
            key, value = store.read(layer, torch.tensor(blocks), length)
            assert key.shape == value.shape == (2, length, 4)
            for position in range(length):
                assert torch.equal(key[:, position], written[layer][name, position][0])
                assert torch.equal(value[:, position], written[layer][name, position][1])
    assert not store.blocks[1].any()


def test_a_block_is_one_run_of_bytes_in_the_layouts_order(store: KvStore) -> None:
    key, value = torch.arange(8.0).view(1, 2, 4), torch.arange(8.0, 16.0).view(1, 2, 4)
    store.write(1, torch.tensor([3]), torch.tensor([2]), key, value)
    run = torch.frombuffer(store.memory.block(3), dtype=torch.float32).view(3, 2, 2, 5, 4)
    assert torch.equal(run[1, 0, :, 2], key[0])
    assert torch.equal(run[1, 1, :, 2], value[0])
    assert run.count_nonzero() == 15


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    memory = BlockMemory.create(num_blocks=2, block_bytes=layout.block_bytes)
    store = KvStore(layout, memory)
    key = torch.randn(1, 2, 4).to(getattr(torch, dtype))
    store.write(0, torch.tensor([1]), torch.tensor([0]), key, key)
    read, _ = store.read(0, torch.tensor([1]), 1)
    assert read.dtype == getattr(torch, dtype)
    assert torch.equal(read[:, 0], key[0])
    memory.close()
