"""BlockMatrix: weights multiplied as the checkpoint has them, by the C++ kernels.

Parts (Q, K and V; gate and up) stay where they are, usually in the mapped file: the kernels write each into its
columns of one output. Activations are float32; results equal those of the dequantized float32 matrix up to the order
of sums, and are bitwise the same for a row of x whatever other rows are with it and however many threads there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from nanoserve.ops.native.library import Library, Part
from nanoserve.quant.weight import Weight

# The kernels know formats by their number in a GGUF file.
FORMATS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
DENSE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


class BlockMatrix:
    def __init__(self, library: Library, parts: Sequence[Weight]):
        """Parts lie one below the other, each in its own format. What the kernels do not know becomes float32."""
        columns = {part.shape[1] for part in parts}
        assert len(columns) == 1, f"parts of {columns} columns do not fit below each other"
        self._library = library
        self._data = []  # what the addresses in `table` point into
        table = (Part * len(parts))()
        for entry, part in zip(table, parts, strict=True):
            number, data = _native(part)
            assert data.device.type == "cpu"
            self._data.append(data)
            entry.data, entry.row_bytes = data.data_ptr(), data.shape[1] * data.itemsize
            entry.rows, entry.format = part.shape[0], number
        self._table = table
        self._address = ctypes.addressof(table)
        self._shape = sum(part.shape[0] for part in parts), columns.pop()

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self._data)

    def matmul(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            return self.matmul(x.float()).to(x.dtype)
        rows, columns = self._shape
        count, width = x.shape
        assert width == columns
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(count, rows)
        library = self._library
        library.matmul(library.pool, self._address, len(self._table), columns, x.data_ptr(), x.stride(0), count,
                       out.data_ptr(), rows)  # fmt: skip
        return out

    def rows(self, ids: Tensor) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(len(ids), self._shape[1])
        if self._library.gather(self._address, len(self._table), self._shape[1], ids.data_ptr(), len(ids),
                                out.data_ptr()):  # fmt: skip
            raise IndexError(f"ids outside of [0, {self._shape[0]})")
        return out


def _native(part: Weight) -> tuple[int, Tensor]:
    """Number of the format, and the data [rows, bytes or weights of a row]."""
    if part.format is not None and part.format.name in FORMATS:
        rows, columns = part.shape
        assert part.data.shape == (rows, columns // part.format.block_size * part.format.block_bytes)
        return FORMATS[part.format.name], part.data.contiguous()
    dense = part.dense()
    assert dense.shape == part.shape
    if dense.dtype not in DENSE:
        dense = dense.float()
    return DENSE[dense.dtype], dense.contiguous()
