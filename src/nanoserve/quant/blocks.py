"""BlockFormat: what formats that cut rows into blocks have in common. It does not know how a block is packed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.core.errors import ConfigError


@dataclass(frozen=True)
class BlockFormat(ABC):
    """A QuantFormat whose blocks can be read one by one: N below is rows times blocks in a row."""

    name: str

    @property
    @abstractmethod
    def block_size(self) -> int: ...

    @property
    @abstractmethod
    def block_bytes(self) -> int: ...

    @abstractmethod
    def _decode(self, blocks: Tensor) -> Tensor:
        """uint8 [N, block_bytes] -> float32 of N * block_size elements."""

    @abstractmethod
    def _encode(self, blocks: Tensor) -> Tensor:
        """float32 [N, block_size] -> uint8 [N, block_bytes]."""

    def dequantize(self, data: Tensor) -> Tensor:
        """uint8 [rows, bytes] -> float32 [rows, columns]."""
        columns = data.shape[1] // self.block_bytes * self.block_size
        return self._decode(data.reshape(-1, self.block_bytes)).view(-1, columns)

    def quantize(self, weight: Tensor) -> Tensor:
        """float [rows, columns] -> uint8 [rows, bytes]."""
        rows, columns = weight.shape
        if columns % self.block_size:
            raise ConfigError(f"{self.name} stores rows in blocks of {self.block_size}: {columns} columns do not fit")
        return self._encode(weight.float().reshape(-1, self.block_size)).view(rows, -1)


def from_half(data: Tensor) -> Tensor:
    """Little-endian float16 in uint8 [N, 2k] -> float32 [N, k]."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.float16).float()  # aligned


def to_half(values: Tensor) -> Tensor:
    """float [N, k] -> uint8 [N, 2k]."""
    return values.to(torch.float16).view(torch.uint8)


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where the scale is 0: a block of zeros stays zero."""
    return torch.where(scale == 0, 0.0, 1.0 / scale)
