"""What a KV block is: its shape, its bytes, and a fingerprint by which two workers know that theirs are the same.

A block holds the keys and values of `block_size` consecutive tokens for every layer, in one contiguous run:

    [num_layers, 2 (key, value), num_kv_heads, block_size, head_dim]

so that one block is one write on any transport.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

from twinstage.errors import ConfigError

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

_ORDER = "layer,kv,head,token,dim"  # part of the fingerprint: another order is another layout


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The shape of a block and the model whose keys and values it holds.

    Raises ConfigError when a size is not positive or the dtype is unknown.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens
    dtype: str
    model_fingerprint: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"KV dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of the KV layout must be at least 1, not {getattr(self, name)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    @property
    def fingerprint(self) -> str:
        """Equal exactly when blocks can be exchanged byte by byte; 32 hexadecimal digits."""
        named = [f"{field.name}={value}" for field, value in zip(fields(self), astuple(self), strict=True)]
        return hashlib.blake2b(";".join([_ORDER, *named]).encode(), digest_size=16).hexdigest()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need."""
        return blocks_for(num_tokens, block_size=self.block_size)


def blocks_for(num_tokens: int, *, block_size: int) -> int:
    """Blocks of `block_size` tokens that `num_tokens` tokens need."""
    return -(-num_tokens // block_size)
