"""RowTable: the runner's mirror of running sequences, in host memory. `apply` and `append` are its only writers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoserve.attention.interface import AttentionMeta
from nanoserve.core.plan import SeqWork, StepPlan
from nanoserve.sampling.params import RowSampling


@dataclass(frozen=True, slots=True)
class Batch:
    """What a forward pass needs of a step."""

    ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    meta: AttentionMeta
    sample_rows: list[int]
    sample_tokens: Tensor  # int64: of the T tokens, those after which a row samples


class RowTable:
    def __init__(self, max_rows: int, max_len: int, block_size: int, device: torch.device):
        self.block_size = block_size
        self.device = device
        blocks = -(-max_len // block_size) + 1
        self.tokens: NDArray[np.int32] = np.zeros((max_rows, max_len + 1), dtype=np.int32)
        self.length: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # known tokens
        self.blocks: NDArray[np.int32] = np.zeros((max_rows, blocks), dtype=np.int32)
        self.num_blocks: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self.sampling: list[RowSampling | None] = [None] * max_rows

    def apply(self, plan: StepPlan) -> None:
        for row in plan.closes:
            self.sampling[row] = None
            self.length[row] = self.num_blocks[row] = 0
        for opening in plan.opens:
            row, length = opening.row, len(opening.tokens)
            self.tokens[row, :length] = opening.tokens
            self.length[row] = length
            self.blocks[row, : len(opening.blocks)] = opening.blocks
            self.num_blocks[row] = len(opening.blocks)
            self.sampling[row] = RowSampling(
                params=opening.sampling,
                seed=opening.seed,
                prompt_length=opening.prompt_length,
                stop_ids=opening.stop_ids,
            )
        for row, blocks in plan.grows:
            first = self.num_blocks[row]
            self.blocks[row, first : first + len(blocks)] = blocks
            self.num_blocks[row] += len(blocks)

    def append(self, row: int, token: int) -> None:
        """A sampled token becomes known, before the host's book hears of it."""
        self.tokens[row, self.length[row]] = token
        self.length[row] += 1

    def known(self, row: int) -> Tensor:
        """int32 [length]: the row's known tokens, prompt and output."""
        return torch.from_numpy(self.tokens[row, : self.length[row]]).to(self.device)

    def batch(self, work: list[SeqWork]) -> Batch:
        """Lay the step's tokens end to end, row after row."""
        table = np.array(work, dtype=np.int64)  # S x (row, start, num_tokens, samples)
        rows, starts, counts = table[:, 0], table[:, 1], table[:, 2]
        ends = np.cumsum(counts)
        total = int(ends[-1])
        token_rows = np.repeat(rows, counts)
        positions = np.arange(total) - np.repeat(ends - counts - starts, counts)
        slots = self.blocks[token_rows, positions // self.block_size].astype(np.int64) * self.block_size
        slots += positions % self.block_size
        lengths = starts + counts
        max_length = int(lengths.max())
        query_start = np.zeros(len(work) + 1, dtype=np.int32)
        query_start[1:] = ends
        sampling = table[:, 3] != 0
        meta = AttentionMeta(
            query_start=self._send(query_start),
            lengths=self._send(lengths.astype(np.int32)),
            block_table=self._send(self.blocks[rows, : -(-max_length // self.block_size)]),
            slots=self._send(slots),
            max_query=int(counts.max()),
            max_length=max_length,
        )
        return Batch(
            ids=self._send(self.tokens[token_rows, positions].astype(np.int64)),
            positions=self._send(positions),
            meta=meta,
            sample_rows=rows[sampling].tolist(),
            sample_tokens=self._send(ends[sampling] - 1),
        )

    def _send(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
