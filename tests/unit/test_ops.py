"""Every filling of the table of tensor functions, against formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanoserve.ops.reference import reference_ops
from nanoserve.ops.table import Ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=[reference_ops], ids=["reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return request.param()


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit * 4)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 4, 24)])
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rms_norm(ops: Ops, shape: tuple[int, ...], dtype: torch.dtype, eps: float) -> None:
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype, seed=1)
    close(ops.rms_norm(x, weight, eps), normed(x, weight, eps), dtype)


def test_rms_norm_of_large_values_does_not_overflow(ops: Ops) -> None:
    x = torch.full((1, 64), 3e4, dtype=torch.float16)
    close(ops.rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones(1, 64).double(), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_returns_the_sum_too(ops: Ops, dtype: torch.dtype) -> None:
    x, residual, weight = noise(5, 64, dtype=dtype), noise(5, 64, dtype=dtype, seed=1), noise(64, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    y, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    close(total, x.double() + residual.double(), dtype)
    close(y, normed(total, weight, 1e-5), dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "dim", "rotated"), [(1, 1, 2, 2), (7, 3, 16, 16), (5, 4, 80, 32)])
def test_rotate_turns_each_pair_and_leaves_the_rest(
    ops: Ops, dtype: torch.dtype, tokens: int, heads: int, dim: int, rotated: int
) -> None:
    x = noise(tokens, heads + 2, dim, dtype=dtype)[:, :heads]  # a view, as Q and K are of QKV
    angles = noise(tokens, rotated // 2, seed=1) * 3
    before = x.clone()
    y = ops.rotate(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., : rotated // 2].double(), x[..., rotated // 2 : rotated].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
    close(y, torch.cat((turned.real, turned.imag, x[..., rotated:].double()), -1), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(ops: Ops, dtype: torch.dtype) -> None:
    x = noise(5, 96, dtype=dtype) * 3
    before = x.clone()
    gate, up = x[:, :48].double(), x[:, 48:].double()
    close(ops.silu_mul(x), gate / (1 + (-gate).exp()) * up, dtype)
    assert torch.equal(x, before)
