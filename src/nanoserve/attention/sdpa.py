"""Attention on torch's scaled_dot_product_attention: the keys and values that a query may see are gathered from their
blocks, decoding rows of similar length together, chunks of a prompt in tiles.

Only written slots are gathered (a padded place repeats its row's last token, masked), so that whatever a fresh block
holds, NaN included, cannot reach a result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention.interface import AttentionMeta, AttentionSpec, KVPool

TILE = 256  # queries of a chunk that are computed at once: keys after a tile's end are never touched
SHORT = 256  # decoding rows up to this length are padded to each other; longer ones up to twice their length


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries that are computed by one call."""

    tokens: slice | Tensor  # of the step's T
    decodes: bool  # B rows of one query each; otherwise B = 1 row of many queries
    index: Tensor  # int64 [B * K * L]: rows of the pool seen as [N * K * P, D]
    length: int  # L
    mask: Tensor | None  # bool, true where a query sees a key: [B, 1, 1, L], or [queries, L]; None: all


class SdpaAttention:
    def begin(self, meta: AttentionMeta, pool: KVPool) -> SdpaStep:
        return SdpaStep(meta, pool)


class SdpaStep:
    def __init__(self, meta: AttentionMeta, pool: KVPool):
        self.meta = meta
        self.block_size = pool.block_size
        layers, _, self.kv_heads, _, head_dim = pool.keys.shape
        self.keys = pool.keys.view(layers, -1, head_dim)
        self.values = pool.values.view(layers, -1, head_dim)
        self.heads = torch.arange(self.kv_heads, device=meta.slots.device)[:, None]  # K 1
        self.written = self._index(meta.slots)  # K T
        self.starts: list[int] = meta.query_start.tolist()
        self.lengths: list[int] = meta.lengths.tolist()
        self.pieces: dict[int | None, list[Piece]] = {}  # by window

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys[self.written] = k.transpose(0, 1).to(keys.dtype)
        values[self.written] = v.transpose(0, 1).to(values.dtype)
        window = spec.window if spec.window is not None and spec.window < self.meta.max_length else None
        if window not in self.pieces:
            self.pieces[window] = self._decodes(window) + self._chunks(window)
        pieces = self.pieces[window]
        if len(pieces) == 1:
            return self._compute(pieces[0], q, keys, values, spec)
        out = torch.empty_like(q)
        for piece in pieces:
            out[piece.tokens] = self._compute(piece, q[piece.tokens], keys, values, spec)
        return out

    def _compute(self, piece: Piece, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
        shape = (-1, self.kv_heads, piece.length, q.shape[-1])
        k = keys.index_select(0, piece.index).view(shape).to(q.dtype)
        v = values.index_select(0, piece.index).view(shape).to(q.dtype)
        grouped = q.view(q.shape[0], self.kv_heads, -1, q.shape[-1])  # T K G D
        if piece.decodes:  # the query heads of a kv head are its "queries"
            return _attention(grouped, k, v, piece.mask, spec).flatten(1, 2)
        group = grouped.shape[2]
        k, v = k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1)
        out = _attention(grouped.permute(2, 1, 0, 3), k, v, piece.mask, spec)  # G K T D
        return out.permute(2, 1, 0, 3).flatten(1, 2)

    def _decodes(self, window: int | None) -> list[Piece]:
        groups: dict[int, list[int]] = {}
        for row, length in enumerate(self.lengths):
            if self.starts[row + 1] - self.starts[row] == 1:
                groups.setdefault(max(length - 1, SHORT - 1).bit_length(), []).append(row)
        found = []
        for rows in groups.values():
            lengths = [self.lengths[row] for row in rows]
            firsts = [0 if window is None else max(0, length - window) for length in lengths]
            counts = [length - first for length, first in zip(lengths, firsts, strict=True)]
            longest = max(counts)
            first, count, row_ids = self._send(firsts), self._send(counts), self._send(rows)
            places = torch.arange(longest, device=row_ids.device)
            positions = first[:, None] + places.minimum(count[:, None] - 1)  # B L
            blocks = self.meta.block_table[row_ids].long().gather(1, positions // self.block_size)
            index = self._index(blocks * self.block_size + positions % self.block_size)  # K B L
            mask = None if min(counts) == longest else (places < count[:, None])[:, None, None]
            alone = len(rows) == len(self.starts) - 1
            tokens = slice(None) if alone else self._send([self.starts[row] for row in rows])
            found.append(Piece(tokens, True, index.transpose(0, 1).flatten(), longest, mask))
        return found

    def _chunks(self, window: int | None) -> list[Piece]:
        found = []
        for row, length in enumerate(self.lengths):
            begin, end = self.starts[row], self.starts[row + 1]
            if end - begin == 1:
                continue
            for tile in range(begin, end, TILE):
                tile_end = min(tile + TILE, end)
                first = length - (end - tile)  # position of the tile's first query
                last = length - (end - tile_end)
                seen = 0 if window is None else max(0, first + 1 - window)
                j = torch.arange(seen, last, device=self.heads.device)
                i = j[first - seen :, None]
                mask = j <= i
                if window is not None:
                    mask &= j > i - window
                slots = self.meta.block_table[row].long()[j // self.block_size] * self.block_size + j % self.block_size
                found.append(Piece(slice(tile, tile_end), False, self._index(slots).flatten(), last - seen, mask))
        return found

    def _index(self, slots: Tensor) -> Tensor:
        """Slots [...] -> [K, ...]: where each head's keys of a slot lie in the pool seen as [N * K * P, D]."""
        block, offset = slots // self.block_size, slots % self.block_size
        heads = self.heads.view(-1, *[1] * slots.dim())
        return (block * self.kv_heads + heads) * self.block_size + offset

    def _send(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.heads.device)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    if spec.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=spec.scale)
    scores = (q @ k.transpose(-1, -2)).float() * (spec.scale / spec.softcap)
    scores = scores.tanh() * spec.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v
