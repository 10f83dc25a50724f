"""The largest of many numbers, exactly, with ties to the lower index, and without sorting them all.

The maxima of short blocks come first: that pass runs at the speed of memory, and leaves little for the slower
search. The numbers must hold no NaN, except that `first_max` hands one on as the row's value.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


def first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """[S, V] -> each row's maximum [S] (NaN where the row holds one) and the first index that has it, int64 [S]."""
    best, block = _block_maxima(x).max(-1)  # the first of equal blocks
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=x.device)
    ids.clamp_(max=x.shape[-1] - 1)  # the last block may be short
    inside = x.gather(-1, ids).max(-1).indices
    return best, ids.gather(-1, inside[:, None])[:, 0]


def largest(x: Tensor, k: int) -> Tensor:
    """[V] -> the indices of the k largest, ascending, int64 [min(k, V)]; of equal numbers the lower index is taken."""
    vocab = x.shape[0]
    if 2 * k * BLOCK < vocab:
        # k numbers at least reach the k-th largest block maximum: a block below it holds none of the k largest.
        maxima = _block_maxima(x[None])[0]
        blocks = (maxima >= maxima.topk(k).values[-1]).nonzero()
        ids = (blocks * BLOCK + torch.arange(BLOCK, device=x.device)).flatten()
        if vocab % BLOCK:
            ids = ids[ids < vocab]
        return ids[_largest(x[ids], k)]
    return _largest(x, min(k, vocab))


def descending(x: Tensor, ids: Tensor) -> Tensor:
    """The ids, given ascending, by descending number; of equal numbers the lower index comes first."""
    return ids[x[ids].argsort(descending=True, stable=True)]


def _largest(x: Tensor, k: int) -> Tensor:
    floor = x.topk(k, sorted=False).values.min()
    ids = (x >= floor).nonzero()[:, 0]
    surplus = ids.shape[0] - k  # so many more tie for the last place
    if surplus:
        tied = (x[ids] == floor).nonzero()[:, 0]
        keep = torch.ones_like(ids, dtype=torch.bool)
        keep[tied[-surplus:]] = False
        ids = ids[keep]
    return ids


def _block_maxima(x: Tensor) -> Tensor:
    """[S, V] -> [S, ceil(V / BLOCK)]"""
    vocab = x.shape[-1]
    whole = vocab - vocab % BLOCK
    maxima = x[:, :whole].view(x.shape[0], whole // BLOCK, BLOCK).amax(-1)
    if whole < vocab:
        maxima = torch.cat((maxima, x[:, whole:].amax(-1, keepdim=True)), -1)
    return maxima
