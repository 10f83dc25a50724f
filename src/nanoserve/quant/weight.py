"""Weight: a matrix as its checkpoint has it. Matrix: the same, placed on a device and ready to be multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class QuantFormat(Protocol):
    """A way to store rows of weights in blocks. Formats are stateless."""

    @property
    def name(self) -> str: ...
    @property
    def block_size(self) -> int: ...  # weights in a block; a row is a whole number of blocks
    @property
    def block_bytes(self) -> int: ...

    def dequantize(self, data: Tensor) -> Tensor:
        """uint8 [rows, bytes] -> float32 [rows, columns]. The definition of the format."""
        ...

    def quantize(self, weight: Tensor) -> Tensor:
        """float [rows, columns] -> uint8 [rows, bytes]. Raises ConfigError where columns do not fit blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a checkpoint, in host memory or mapped from the file."""

    data: Tensor  # dense: a float tensor of `shape`; otherwise uint8 [rows, bytes of a row]
    shape: tuple[int, ...]
    format: QuantFormat | None = None  # None: dense

    def dense(self) -> Tensor:
        """Float tensor of `shape` (float32 where the weight was quantized)."""
        return self.data if self.format is None else self.format.dequantize(self.data).view(self.shape)


class Matrix(Protocol):
    """A weight on its device. Vectors (norms, biases) are plain tensors; only matrices hide their format."""

    @property
    def shape(self) -> tuple[int, int]: ...  # out_features, in_features
    @property
    def nbytes(self) -> int: ...

    def matmul(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, out_features], of x's dtype."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """int [T] -> [T, in_features]: the embedding's gather."""
        ...


class DenseMatrix:
    """The reference: every weight dequantized once, multiplied by torch."""

    def __init__(self, weight: Tensor):
        self.weight = weight

    @classmethod
    def place(cls, parts: Sequence[Weight], dtype: torch.dtype, device: torch.device) -> DenseMatrix:
        """Fuse `parts` below each other (Q, K and V; gate and up) in one matrix."""
        dense = [part.dense().to(dtype) for part in parts]
        return cls((dense[0] if len(dense) == 1 else torch.cat(dense)).to(device).contiguous())

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def matmul(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]
