"""The GGUF formats with 32 weights a block, and the lookup of a format by its number in the file.

A block is: float16 scale d; float16 minimum m (the _1 formats); 4 bytes with the fifth bits (the Q5 formats);
16 bytes of nibbles, low nibbles first: byte i holds weights i and i + 16. Q8_0: float16 scale and 32 int8.
The packing is that of the GGUF specification (ggml); the arithmetic is float32, in the order written here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.quant.blocks import BlockFormat, from_half, reciprocal, to_half
from nanoserve.quant.gguf_k import Q4_K, Q5_K, Q6_K

_BIT = torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True)
class NibbleFormat(BlockFormat):
    """Q4_0 and Q5_0: w = d (q - 2^(bits-1)). Q4_1 and Q5_1: w = d q + m."""

    bits: int
    has_min: bool

    @property
    def block_size(self) -> int:
        return 32

    @property
    def block_bytes(self) -> int:
        return 2 + 2 * self.has_min + 4 * (self.bits == 5) + 16

    def _decode(self, blocks: Tensor) -> Tensor:
        packed = blocks[:, -16:]
        q = torch.empty(len(blocks), 32)
        q[:, :16] = packed & 15
        q[:, 16:] = packed >> 4
        if self.bits == 5:
            high = (blocks[:, -20:-16, None] >> _BIT) & 1
            q += high.view(-1, 32) << 4
        scale = from_half(blocks[:, :2])
        if self.has_min:
            return q.mul_(scale).add_(from_half(blocks[:, 2:4]))
        return q.sub_(1 << self.bits - 1).mul_(scale)

    def _encode(self, blocks: Tensor) -> Tensor:
        if self.has_min:
            low, high = blocks.aminmax(dim=1, keepdim=True)
            scale, head = (high - low) / ((1 << self.bits) - 1), [low]
            q = (blocks - low) * reciprocal(scale) + 0.5
        else:  # the largest weight, with its sign, becomes the most negative code: it is met exactly
            largest = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
            scale, head = largest / -(1 << self.bits - 1), []
            q = blocks * reciprocal(scale) + ((1 << self.bits - 1) + 0.5)
        codes = q.clamp(0, (1 << self.bits) - 1).to(torch.uint8)
        out = [to_half(x) for x in (scale, *head)]
        if self.bits == 5:
            out.append(((codes >> 4).view(-1, 4, 8) << _BIT).sum(dim=2, dtype=torch.uint8))
        out.append((codes[:, :16] & 15) | (codes[:, 16:] << 4))
        return torch.cat(out, dim=1)


@dataclass(frozen=True)
class ByteFormat(BlockFormat):
    """Q8_0: w = d q, with q an int8."""

    @property
    def block_size(self) -> int:
        return 32

    @property
    def block_bytes(self) -> int:
        return 34

    def _decode(self, blocks: Tensor) -> Tensor:
        return blocks[:, 2:].view(torch.int8).float().mul_(from_half(blocks[:, :2]))

    def _encode(self, blocks: Tensor) -> Tensor:
        scale = blocks.abs().amax(dim=1, keepdim=True) / 127
        q = blocks * reciprocal(scale)
        rounded = torch.sign(q) * torch.floor(q.abs() + 0.5)  # halves away from zero
        return torch.cat([to_half(scale), rounded.to(torch.int8).view(torch.uint8)], dim=1)


Q4_0 = NibbleFormat("Q4_0", bits=4, has_min=False)
Q4_1 = NibbleFormat("Q4_1", bits=4, has_min=True)
Q5_0 = NibbleFormat("Q5_0", bits=5, has_min=False)
Q5_1 = NibbleFormat("Q5_1", bits=5, has_min=True)
Q8_0 = ByteFormat("Q8_0")


def gguf_format(type_id: int) -> BlockFormat | None:
    """The format with this number in a GGUF file; None where it is dense or not one of ours."""
    match type_id:
        case 2:
            return Q4_0
        case 3:
            return Q4_1
        case 6:
            return Q5_0
        case 7:
            return Q5_1
        case 8:
            return Q8_0
        case 12:
            return Q4_K
        case 13:
            return Q5_K
        case 14:
            return Q6_K
        case _:
            return None
