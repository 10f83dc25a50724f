"""The GGUF K-formats: 256 weights a block, with quantized scales of their sub-blocks.

Q4_K, Q5_K: float16 d and dmin, eight 6-bit scales and minimums in 12 bytes, 32 bytes of fifth bits (Q5_K), 128 bytes
of nibbles. Q6_K: 128 bytes of low nibbles, 64 bytes of upper bit pairs, sixteen int8 scales, float16 d.
The packing is that of the GGUF specification (ggml); the arithmetic is float32, in the order written here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.quant.blocks import BlockFormat, from_half, reciprocal, to_half

_BIT = torch.arange(8, dtype=torch.uint8)
_PAIR = torch.arange(0, 8, 2, dtype=torch.uint8)


@dataclass(frozen=True)
class KFormat(BlockFormat):
    """Q4_K and Q5_K: w = (d s) q - (dmin m), with s and m of each of eight sub-blocks of 32."""

    bits: int

    @property
    def block_size(self) -> int:
        return 256

    @property
    def block_bytes(self) -> int:
        return 4 + 12 + 32 * (self.bits == 5) + 128

    def _decode(self, blocks: Tensor) -> Tensor:
        scales, minimums = _unpack_scales(blocks[:, 4:16])
        packed = blocks[:, -128:].view(-1, 4, 32)
        q = torch.empty(len(blocks), 4, 2, 32)
        q[:, :, 0] = packed & 15
        q[:, :, 1] = packed >> 4
        q = q.view(-1, 8, 32)
        if self.bits == 5:
            q += ((blocks[:, None, 16:48] >> _BIT[:, None]) & 1) << 4
        q.mul_((from_half(blocks[:, 0:2]) * scales).unsqueeze(2))
        return q.sub_((from_half(blocks[:, 2:4]) * minimums).unsqueeze(2))

    def _encode(self, blocks: Tensor) -> Tensor:
        """Sub-block by sub-block from its extremes: plain rounding, without a search for better scales."""
        top = (1 << self.bits) - 1
        groups = blocks.view(-1, 8, 32)
        depth = -groups.amin(dim=2).clamp(max=0)
        scale = (groups.amax(dim=2).clamp(min=0) + depth) / top
        d, dmin = (x.amax(dim=1, keepdim=True).div(63).half().float() for x in (scale, depth))
        scales, minimums = ((x * reciprocal(unit)).round().clamp(0, 63) for x, unit in ((scale, d), (depth, dmin)))
        q = (groups + (dmin * minimums).unsqueeze(2)) * reciprocal(d * scales).unsqueeze(2)
        codes = q.round().clamp(0, top).to(torch.uint8)
        pairs = codes.view(-1, 4, 2, 32)
        out = [to_half(d), to_half(dmin), _pack_scales(scales.to(torch.uint8), minimums.to(torch.uint8))]
        if self.bits == 5:
            out.append(((codes >> 4) << _BIT[:, None]).sum(dim=1, dtype=torch.uint8))
        out.append(((pairs[:, :, 0] & 15) | (pairs[:, :, 1] << 4)).view(-1, 128))
        return torch.cat(out, dim=1)


def _unpack_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [N, 12] -> 6-bit scales and minimums, uint8 [N, 8] each.

    Bytes 0-3 hold scales 0-3, bytes 4-7 minimums 0-3, each in its lower six bits; bytes 8-11 the lower four bits of
    scales 4-7 and, above them, of minimums 4-7, whose upper two bits are the upper two of bytes 0-3 and 4-7.
    """
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([a & 63, (c & 15) | ((a >> 2) & 48)], dim=1)
    minimums = torch.cat([b & 63, (c >> 4) | ((b >> 2) & 48)], dim=1)
    return scales, minimums


def _pack_scales(scales: Tensor, minimums: Tensor) -> Tensor:
    a, b = (x[:, :4] | ((x[:, 4:] >> 4) << 6) for x in (scales, minimums))
    return torch.cat([a, b, (scales[:, 4:] & 15) | (minimums[:, 4:] << 4)], dim=1)


@dataclass(frozen=True)
class SixBitFormat(BlockFormat):
    """Q6_K: w = (d s) (q - 32), with s of each of sixteen sub-blocks of 16.

    Either half of a block holds four runs of 32 weights: 64 bytes of nibbles (runs 0 and 1 low, 2 and 3 high) and 32
    bytes of bit pairs (run r in bits 2r and 2r + 1).
    """

    @property
    def block_size(self) -> int:
        return 256

    @property
    def block_bytes(self) -> int:
        return 128 + 64 + 16 + 2

    def _decode(self, blocks: Tensor) -> Tensor:
        low = blocks[:, :128].view(-1, 2, 1, 64)
        q = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
        q |= ((blocks[:, 128:192].view(-1, 2, 1, 32) >> _PAIR[:, None]) & 3) << 4
        scale = from_half(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8)
        return q.float().sub_(32).view(-1, 16, 16).mul_(scale.unsqueeze(2))

    def _encode(self, blocks: Tensor) -> Tensor:
        groups = blocks.view(-1, 16, 16)
        scale = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)).squeeze(2) / -32
        d = (scale.abs().amax(dim=1, keepdim=True) / 127).half().float()
        scales = (scale * reciprocal(d)).round().clamp(-128, 127)
        q = (groups * reciprocal(d * scales).unsqueeze(2)).round().clamp(-32, 31) + 32
        codes = q.to(torch.uint8).view(-1, 2, 4, 32)
        nibbles = (codes & 15).view(-1, 2, 2, 64)
        low = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
        high = ((codes >> 4) << _PAIR[:, None]).sum(dim=2, dtype=torch.uint8)
        parts = [low.view(-1, 128), high.view(-1, 64), scales.to(torch.int8).view(torch.uint8), to_half(d)]
        return torch.cat(parts, dim=1)


Q4_K = KFormat("Q4_K", bits=4)
Q5_K = KFormat("Q5_K", bits=5)
Q6_K = SixBitFormat("Q6_K")
