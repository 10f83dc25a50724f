"""Ops: the tensor functions a model is made of. Every filling of the table runs under the same tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ops:
    """Shapes: T tokens, H query heads, K kv heads, D head dim, R rotated channels (R <= D, even)."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., n], weight [n], eps) -> [..., n]. Statistics in float32."""

    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """(x, residual, weight, eps) -> (norm of the sum, the sum, which is the next residual)."""

    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    """RoPE in the half-split layout: (x [T, heads, D], cos [T, R/2], sin [T, R/2]) -> [T, heads, D]."""

    silu_mul: Callable[[Tensor], Tensor]
    """[T, 2n], gate then up -> silu(gate) * up, [T, n]."""
