"""Every GGUF format against an independent implementation, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from nanoserve.core.errors import ConfigError
from nanoserve.loading.gguf import TYPES
from nanoserve.quant.gguf import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, gguf_format
from nanoserve.quant.gguf_k import Q4_K, Q5_K, Q6_K
from nanoserve.quant.weight import DenseMatrix, Weight

SIMPLE = [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0]
FORMATS = [*SIMPLE, Q4_K, Q5_K, Q6_K]
named = pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)


def kind(fmt):
    return gguf.GGMLQuantizationType[fmt.name]


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert ours.dtype == torch.float32
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours.numpy()), nan)
    assert np.array_equal(ours.numpy().view(np.int32)[~nan], theirs.view(np.int32)[~nan])


@named
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (7, 3), (65, 2)])
def test_dequantize_random_bits(fmt, shape):
    rows, blocks = shape
    data = np.random.default_rng(rows).integers(0, 256, (rows, blocks * fmt.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        same_bits(fmt.dequantize(torch.from_numpy(data.copy())), dequantize(data, kind(fmt)))


@named
@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7B, 0x7C, 0x7F, 0x80, 0xFB, 0xFC, 0xFF])
def test_dequantize_extreme_bits(fmt, byte):
    """Zeros, subnormal, largest, infinite and NaN scales."""
    data = np.full((2, 2 * fmt.block_bytes), byte, dtype=np.uint8)
    with np.errstate(all="ignore"):
        same_bits(fmt.dequantize(torch.from_numpy(data.copy())), dequantize(data, kind(fmt)))


@named
def test_dequantize_view_at_odd_offset(fmt):
    """A tensor mapped from a file may begin at any address."""
    data = np.random.default_rng(1).integers(0, 100, (4, fmt.block_bytes), dtype=np.uint8)
    buffer = torch.zeros(data.size + 1, dtype=torch.uint8)
    buffer[1:] = torch.from_numpy(data).flatten()
    same_bits(fmt.dequantize(buffer[1:].view(4, -1)), dequantize(data, kind(fmt)))


@pytest.mark.parametrize("fmt", SIMPLE, ids=lambda f: f.name)
def test_quantize_equals_reference(fmt):
    weight = torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    weight[2] = 0.0
    weight[3, :32] = 1.0
    weight[4] *= 1e-6
    weight[5, 7] = 300.0
    theirs = quantize(weight.numpy(), kind(fmt))
    ours = fmt.quantize(weight)
    assert ours.dtype == torch.uint8
    assert np.array_equal(ours.numpy(), theirs)


@named
def test_quantize_is_close(fmt):
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(3))
    weight[1] = 0.0
    back = fmt.dequantize(fmt.quantize(weight))
    worst = {4: 0.12, 5: 0.06, 6: 0.03, 8: 0.008}[int(fmt.name[1])]
    assert (back - weight).norm() / weight.norm() < worst
    assert torch.equal(back[1], weight[1])


@named
def test_quantize_refuses_columns_that_do_not_fit(fmt):
    with pytest.raises(ConfigError, match=rf"{fmt.name} .*blocks of {fmt.block_size}: {fmt.block_size + 16} columns"):
        fmt.quantize(torch.zeros(2, fmt.block_size + 16))


@named
def test_lookup_by_number(fmt):
    number = int(kind(fmt))
    assert gguf_format(number) is fmt
    assert TYPES[number] == (fmt.name, fmt.block_size, fmt.block_bytes)
    assert gguf.GGML_QUANT_SIZES[kind(fmt)] == (fmt.block_size, fmt.block_bytes)


def test_lookup_of_dense_and_unknown():
    assert [gguf_format(number) for number in (0, 1, 30, 255, -1)] == [None] * 5


def test_fusing_parts_of_different_formats():
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(5))
    parts = [Weight(fmt.quantize(weight), (8, 256), fmt) for fmt in (Q4_K, Q6_K, Q8_0)]
    parts.append(Weight(weight.bfloat16(), (8, 256)))
    fused = DenseMatrix.place(parts, torch.float32, torch.device("cpu"))
    assert fused.shape == (32, 256)
    assert torch.equal(fused.weight[8:16], Q6_K.dequantize(parts[1].data))
    assert torch.equal(fused.weight[24:], weight.bfloat16().float())
