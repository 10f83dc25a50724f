"""The native filling of the table of tensor functions, under the tests of every filling."""

from __future__ import annotations

import pytest
import torch

from nanoserve.ops.native.library import load
from nanoserve.ops.native.ops import native_ops
from nanoserve.ops.reference import reference_ops
from nanoserve.ops.table import Ops
from unit.test_ops import (  # noqa: F401
    close,
    noise,
    normed,
    test_add_rms_norm_returns_the_sum_too,
    test_rms_norm,
    test_rms_norm_of_large_values_does_not_overflow,
    test_rotate_turns_each_pair_and_leaves_the_rest,
    test_silu_mul,
)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return native_ops(load(threads=2))


@pytest.mark.parametrize("width", [1, 7, 33, 576])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_any_width_and_many_rows(ops: Ops, rows: int, width: int) -> None:
    x, weight = noise(rows, width), noise(width, seed=1)
    close(ops.rms_norm(x, weight, 1e-5), normed(x, weight, 1e-5), torch.float32)
    y, total = ops.add_rms_norm(x, 2 * x, weight, 1e-5)
    assert torch.equal(total, x + 2 * x)
    assert torch.equal(y, ops.rms_norm(total, weight, 1e-5))
    gate, up = noise(rows, width, seed=2) * 4, noise(rows, width, seed=3)
    close(ops.silu_mul(torch.cat((gate, up), 1)), gate.double().sigmoid() * gate * up, torch.float32)
    heads = noise(rows, 2, 2 * width)
    angles = noise(rows, width, seed=4)
    torch.testing.assert_close(
        ops.rotate(heads, angles.cos(), angles.sin()), reference_ops().rotate(heads, angles.cos(), angles.sin())
    )


def test_silu_of_extremes(ops: Ops) -> None:
    gate = torch.tensor([[0.0, -0.0, 90.0, -90.0, -1000.0, 3e38, torch.inf, torch.nan, 1e-30, -87.5]])
    out = ops.silu_mul(torch.cat((gate, torch.ones_like(gate)), 1))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-35, equal_nan=True)


def test_strided_x(ops: Ops) -> None:
    wide = noise(4, 6, 40)
    weight = noise(16)
    assert torch.equal(
        ops.rms_norm(wide[:, 2:4, 8:24], weight, 1e-5), ops.rms_norm(wide[:, 2:4, 8:24].clone(), weight, 1e-5)
    )
    assert torch.equal(ops.silu_mul(wide[:, 0, ::2]), ops.silu_mul(wide[:, 0, ::2].clone()))
