"""The reference filling of Ops: plain torch, on any device, for float32, bfloat16 and float16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.ops.table import Ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channels i and i + R/2 are a point of the plane, turned by the angle of channel i."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    # Written into place: half the calls of a concatenation, and one pass less over the result.
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out.to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


def reference_ops() -> Ops:
    return Ops(rms_norm=rms_norm, add_rms_norm=add_rms_norm, rotate=rotate, silu_mul=silu_mul)
