"""Backend: the tensor functions, attention and weight placement of one device, chosen once and passed by value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nanoserve.attention.interface import AttentionBackend
from nanoserve.ops.table import Ops
from nanoserve.quant.weight import DenseMatrix, Matrix, Weight


@dataclass(frozen=True, slots=True)
class Backend:
    name: str
    device: torch.device
    dtype: torch.dtype  # of activations
    ops: Ops
    attention: AttentionBackend
    place: Callable[[Sequence[Weight]], Matrix]  # fuses parts below each other


def torch_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Plain torch everywhere: runs on every device, and is what faster backends are compared with."""
    from nanoserve.attention.sdpa import SdpaAttention
    from nanoserve.ops.reference import reference_ops

    def place(parts: Sequence[Weight]) -> Matrix:
        return DenseMatrix.place(parts, dtype, device)

    return Backend("torch", device, dtype, reference_ops(), SdpaAttention(), place)


def native_backend(threads: int) -> Backend:
    """Our C++ kernels: a CPU, activations in float32, weights as the checkpoint has them. Raises NativeError where
    they cannot be had."""
    from nanoserve.attention.native import NativeAttention
    from nanoserve.ops.native.library import load
    from nanoserve.ops.native.ops import native_ops
    from nanoserve.quant.native import BlockMatrix

    library = load(threads)

    def place(parts: Sequence[Weight]) -> Matrix:
        return BlockMatrix(library, parts)

    return Backend("native", torch.device("cpu"), torch.float32, native_ops(library), NativeAttention(library), place)
