"""What attention is told about a step, where K and V live, and what a backend must do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """One step: S rows, T tokens. Tokens of a row are its last ones: row s computes the positions
    [lengths[s] - count, lengths[s]) where count = query_start[s+1] - query_start[s]."""

    query_start: Tensor  # int32 [S+1]
    lengths: Tensor  # int32 [S], tokens with KV after this step's writes
    block_table: Tensor  # int32 [S, at least ceil(max_length / block size)]; padded with any valid block
    slots: Tensor  # int64 [T], where each token's K and V go: block * block size + offset
    max_query: int
    max_length: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What differs from layer to layer."""

    scale: float
    window: int | None = None  # a query at i sees keys at j with i - window < j <= i; None: all j <= i
    softcap: float | None = None


class KVPool:
    """K and V of all blocks. One block past `num_blocks` is reserved for rows that only pad a batch."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
                 dtype: torch.dtype, device: torch.device):  # fmt: skip
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, num_blocks + 1, num_kv_heads, block_size, head_dim)  # L N K P D
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def padding_block(self) -> int:
        return self.num_blocks

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v: [T, K, D]."""
        block, offset = slots // self.block_size, slots % self.block_size
        self.keys[layer][block, :, offset] = k.to(self.keys.dtype)
        self.values[layer][block, :, offset] = v.to(self.values.dtype)


class StepAttention(Protocol):
    """The attention of one step's layers."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """q [T, H, D], k and v [T, K, D], rotated. Puts k and v in the pool, then returns [T, H, D]."""
        ...


class AttentionBackend(Protocol):
    def begin(self, meta: AttentionMeta, pool: KVPool) -> StepAttention:
        """Once a step: prepares what its layers share, such as indices and masks."""
        ...
