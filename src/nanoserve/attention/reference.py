"""The definition of paged attention: row by row, in float32, with nothing clever in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionMeta, AttentionSpec, KVPool


class ReferenceAttention:
    def begin(self, meta: AttentionMeta, pool: KVPool) -> ReferenceStep:
        return ReferenceStep(meta, pool)


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    meta: AttentionMeta
    pool: KVPool

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.pool.write(layer, self.meta.slots, k, v)
        starts = self.meta.query_start.tolist()
        out = torch.empty_like(q)
        for row, length in enumerate(self.meta.lengths.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            keys = self._gather(self.pool.keys[layer], row, length, q.shape[1])
            values = self._gather(self.pool.values[layer], row, length, q.shape[1])
            out[tokens] = _attention(q[tokens].float(), keys, values, spec).to(q.dtype)
        return out

    def _gather(self, stored: Tensor, row: int, length: int, heads: int) -> Tensor:
        """[N, K, P, D] -> [length, H, D]: what the row has written, each kv head repeated for its query heads."""
        blocks = self.meta.block_table[row, : -(-length // self.pool.block_size)]
        slots = stored[blocks].transpose(1, 2).flatten(0, 1)[:length]  # length K D
        return slots.float().repeat_interleave(heads // slots.shape[1], dim=1)


def _attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """q [T, H, D]: the last T of k's L tokens; k, v [L, H, D]."""
    scores = torch.einsum("thd,lhd->htl", q, k) * spec.scale
    if spec.softcap is not None:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    j = torch.arange(k.shape[0], device=q.device)
    i = j[k.shape[0] - q.shape[0] :, None]
    hidden = j > i
    if spec.window is not None:
        hidden |= j <= i - spec.window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v)
