"""The native filling of Ops: float32 on the CPU. Other types go to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoserve.ops import reference
from nanoserve.ops.native.library import Library
from nanoserve.ops.table import Ops


def native_ops(library: Library) -> Ops:
    pool = library.pool

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is not torch.float32 or weight.dtype is not torch.float32:
            return reference.rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        n = weight.shape[0]
        library.rms_norm(pool, x.data_ptr(), weight.data_ptr(), eps, x.numel() // n, n, out.data_ptr())
        return out

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not x.dtype is residual.dtype is weight.dtype is torch.float32:
            return reference.add_rms_norm(x, residual, weight, eps)
        assert x.shape == residual.shape
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        n = weight.shape[0]
        library.add_rms_norm(pool, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, x.numel() // n, n,
                             out.data_ptr(), total.data_ptr())  # fmt: skip
        return out, total

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not x.dtype is cos.dtype is sin.dtype is torch.float32:
            return reference.rotate(x, cos, sin)
        tokens, heads, dim = x.shape
        token_stride, head_stride, stride = x.stride()
        if stride != 1:
            x = x.contiguous()
            token_stride, head_stride = heads * dim, dim
        cos, sin = cos.contiguous(), sin.contiguous()
        out = torch.empty(tokens, heads, dim)
        library.rotate(pool, x.data_ptr(), token_stride, head_stride, cos.data_ptr(), sin.data_ptr(), tokens, heads,
                       dim, cos.shape[1], out.data_ptr())  # fmt: skip
        return out

    def silu_mul(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return reference.silu_mul(x)
        x = x.contiguous()
        tokens, n = x.shape[0], x.shape[1] // 2
        out = torch.empty(tokens, n)
        library.silu_mul(pool, x.data_ptr(), tokens, n, out.data_ptr())
        return out

    return Ops(rms_norm=rms_norm, add_rms_norm=add_rms_norm, rotate=rotate, silu_mul=silu_mul)
