"""The only code that reads and writes keys and values: a tensor over the bytes of a `BlockMemory`."""

from __future__ import annotations

import torch

from twinstage.errors import ConfigError
from twinstage.kv.layout import KvLayout
from twinstage.kv.memory import BlockMemory

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class KvStore:
    """Keys and values of all blocks, per layer. Which block belongs to whom is the block pool's business.

    `blocks` is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]` over the shared bytes. Raises
    ConfigError when the memory was made for blocks of another size.
    """

    def __init__(self, layout: KvLayout, memory: BlockMemory) -> None:
        if memory.block_bytes != layout.block_bytes:
            raise ConfigError(f"KV memory has blocks of {memory.block_bytes} bytes, the layout {layout.block_bytes}")
        self.layout = layout
        self.memory = memory
        shape = (
            memory.num_blocks,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        self.blocks: torch.Tensor = torch.frombuffer(memory.view(), dtype=_DTYPES[layout.dtype]).view(shape)
        # Each [num_blocks, num_kv_heads, block_size, head_dim], a view.
        self._keys = tuple(self.blocks[:, layer, 0] for layer in range(layout.num_layers))
        self._values = tuple(self.blocks[:, layer, 1] for layer in range(layout.num_layers))

    def write(
        self,
        layer: int,
        block_ids: torch.Tensor,
        offsets: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store the keys and values of some tokens.

        `block_ids` and `offsets` are int64 `[num_tokens]`: the block of each token and its place in it; `key` and
        `value` are `[num_tokens, num_kv_heads, head_dim]`, rounded to the layout's number format.
        """
        self._keys[layer][block_ids, :, offsets] = key.to(self.blocks.dtype)
        self._values[layer][block_ids, :, offsets] = value.to(self.blocks.dtype)

    def read(self, layer: int, block_ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the first `num_tokens` keys and values in `block_ids` (int64 `[num_blocks]`, in order).

        Each is `[num_kv_heads, num_tokens, head_dim]`.
        """
        return _gather(self._keys[layer], block_ids, num_tokens), _gather(self._values[layer], block_ids, num_tokens)


def _gather(blocks: torch.Tensor, block_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    chosen = blocks.index_select(0, block_ids)  # [chosen, num_kv_heads, block_size, head_dim]
    num_kv_heads, head_dim = chosen.shape[1], chosen.shape[3]
    return chosen.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :num_tokens]
