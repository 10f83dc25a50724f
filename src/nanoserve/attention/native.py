"""Paged attention by the C++ kernels: float32 queries on the CPU, over a cache of any float type."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionMeta, AttentionSpec, KVPool
from nanoserve.ops.native.library import Library

CACHES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
NO_WINDOW = 1 << 62


class _Step(ctypes.Structure):
    """What the layers of a step share; attention.cpp has the same struct."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query_start", "lengths", "block_table", "slots")),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "tokens", "table_stride", "block_size", "heads", "kv_heads", "dim", "kv_format")
        ),
    )


class NativeAttention:
    """A row's result is bitwise the same whatever other rows are in the step and however many threads there are; it
    can differ by rounding when the same tokens come in chunks of other lengths."""

    def __init__(self, library: Library):
        self.library = library

    def begin(self, meta: AttentionMeta, pool: KVPool) -> NativeStep:
        return NativeStep(self.library, meta, pool)


class NativeStep:
    def __init__(self, library: Library, meta: AttentionMeta, pool: KVPool):
        assert pool.keys.dtype in CACHES, f"a cache of {pool.keys.dtype}"
        self.library = library
        table = meta.block_table if meta.block_table.stride(1) == 1 else meta.block_table.contiguous()
        self.tensors = meta.query_start.contiguous(), meta.lengths.contiguous(), table, meta.slots.contiguous()
        for tensor, dtype in zip(self.tensors, (torch.int32, torch.int32, torch.int32, torch.int64), strict=True):
            assert tensor.dtype == dtype
        self.pool = pool
        _, _, self.kv_heads, _, self.dim = pool.keys.shape
        self.stride = pool.keys.stride(0) * pool.keys.itemsize  # bytes of a layer
        self.step = _Step(
            *(tensor.data_ptr() for tensor in self.tensors),
            len(meta.lengths), len(meta.slots), table.stride(0), pool.block_size, 0, self.kv_heads, self.dim,
            CACHES[pool.keys.dtype],
        )  # fmt: skip
        self.address = ctypes.addressof(self.step)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if q.dtype is not torch.float32:
            return self.attend(layer, q.float(), k.float(), v.float(), spec).to(q.dtype)
        tokens, heads, dim = q.shape
        self.step.heads = heads
        q, k, v = (x if x.stride(1) == dim and x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty(tokens, heads, dim)
        at = layer * self.stride
        self.library.attention(
            self.library.pool, self.address, self.pool.keys.data_ptr() + at, self.pool.values.data_ptr() + at,
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), out.data_ptr(),
            spec.scale, spec.window or NO_WINDOW, spec.softcap or 0.0,
        )  # fmt: skip
        return out
