"""The C++ matmul against the dequantized matrix, in every format."""

from __future__ import annotations

import pytest
import torch

from nanoserve.ops.native.library import Library, load
from nanoserve.quant.blocks import BlockFormat
from nanoserve.quant.gguf import Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0
from nanoserve.quant.native import BlockMatrix
from nanoserve.quant.weight import Weight

FORMATS = [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def library() -> Library:
    return load(threads=2)


def quantized(format: BlockFormat, rows: int, columns: int) -> Weight:
    return Weight(format.quantize(torch.randn(rows, columns)), (rows, columns), format)


def assert_is_matmul(matrix: BlockMatrix, parts: list[Weight], x: torch.Tensor) -> None:
    """Within a few units of float32 of the sum of magnitudes, the bound on any order of summation."""
    weight = torch.cat([part.dense().double() for part in parts])
    out = matrix.matmul(x)
    assert out.dtype == x.dtype
    bound = x.double().abs() @ weight.abs().T * 3e-7 + 1e-30
    assert ((out.double() - x.double() @ weight.T).abs() <= bound).all()


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(1, 256), (23, 512), (50, 2304)], ids=str)
def test_matmul_of_blocks(library: Library, format: BlockFormat, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    part = quantized(format, *shape)
    matrix = BlockMatrix(library, [part])
    assert matrix.shape == shape
    assert matrix.nbytes == part.data.nbytes
    for rows in [*range(1, 10), 17, 33, 100]:
        assert_is_matmul(matrix, [part], torch.randn(rows, shape[1]))


@pytest.mark.parametrize("columns", [32, 96, 576])
def test_rows_of_short_blocks_may_end_anywhere(library: Library, columns: int) -> None:
    for format in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0):
        part = quantized(format, 29, columns)
        for rows in (1, 3, 5):
            assert_is_matmul(BlockMatrix(library, [part]), [part], torch.randn(rows, columns))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 31, 64, 577, 2050])
def test_matmul_of_dense_weights(library: Library, dtype: torch.dtype, columns: int) -> None:
    part = Weight(torch.randn(45, columns).to(dtype), (45, columns))
    for rows in (1, 2, 4, 7, 16):
        assert_is_matmul(BlockMatrix(library, [part]), [part], torch.randn(rows, columns))


def test_parts_of_any_format_lie_below_each_other(library: Library) -> None:
    parts = [quantized(Q4_1, 30, 512), quantized(Q6_K, 7, 512), Weight(torch.randn(25, 512), (25, 512)),
             Weight(torch.randn(2, 512).double(), (2, 512)), quantized(Q8_0, 24, 512)]  # fmt: skip
    matrix = BlockMatrix(library, parts)
    assert matrix.shape == (88, 512)
    for rows in (1, 6, 40):
        assert_is_matmul(matrix, parts, torch.randn(rows, 512))
    ids = torch.tensor([87, 0, 36, 37, 29, 30, 63, 0])
    assert torch.equal(matrix.rows(ids), torch.cat([part.dense().float() for part in parts])[ids])


def test_x_may_be_strided_and_of_other_types(library: Library) -> None:
    part = quantized(Q4_1, 48, 64)
    matrix = BlockMatrix(library, [part])
    wide = torch.randn(6, 200)
    assert torch.equal(matrix.matmul(wide[:, 10:74]), matrix.matmul(wide[:, 10:74].contiguous()))
    assert torch.equal(matrix.matmul(wide[::2, :64]), matrix.matmul(wide[::2, :64].contiguous()))
    turned = torch.randn(64, 6).T
    assert torch.equal(matrix.matmul(turned), matrix.matmul(turned.contiguous()))
    assert matrix.matmul(torch.randn(0, 64)).shape == (0, 48)
    half = torch.randn(3, 64).bfloat16()
    assert torch.equal(matrix.matmul(half), matrix.matmul(half.float()).bfloat16())


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_a_row_does_not_depend_on_its_batch_or_on_threads(library: Library, format: BlockFormat) -> None:
    parts = [quantized(format, 61, 2304), quantized(format, 10, 2304)]
    x = torch.randn(21, 2304)
    both = BlockMatrix(library, parts)
    whole = both.matmul(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 13):
        assert torch.equal(both.matmul(x[:rows]), whole[:rows])
    assert torch.equal(both.matmul(x[20:]), whole[20:])
    for threads in (1, 3):
        assert torch.equal(BlockMatrix(load(threads), parts).matmul(x), whole)


@pytest.mark.parametrize("weight", [Q4_1, Q6_K, *DTYPES], ids=str)
def test_a_row_does_not_depend_on_a_batch_of_many(library: Library, weight: BlockFormat | torch.dtype) -> None:
    """Long batches go in blocks, and rows end where vectors do not."""
    columns = 1601 if isinstance(weight, torch.dtype) else 1792
    dense = torch.randn(50, columns)
    part = (Weight(dense.to(weight), (50, columns)) if isinstance(weight, torch.dtype)
            else Weight(weight.quantize(dense), (50, columns), weight))  # fmt: skip
    matrix = BlockMatrix(library, [part])
    x = torch.randn(263, columns)
    whole = matrix.matmul(x)
    assert_is_matmul(matrix, [part], x)
    for rows in (1, 4, 5, 6, 7, 64, 129):
        for begin in (0, 126, 263 - rows):
            assert torch.equal(matrix.matmul(x[begin : begin + rows]), whole[begin : begin + rows])


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_gathered_rows_equal_the_dequantized(library: Library, format: BlockFormat) -> None:
    part = quantized(format, 40, 768)
    ids = torch.tensor([39, 0, 5, 5, 17], dtype=torch.int32)
    assert torch.equal(BlockMatrix(library, [part]).rows(ids), part.dense()[ids])


def test_gathered_ids_are_checked(library: Library) -> None:
    matrix = BlockMatrix(library, [quantized(Q4_1, 4, 64)])
    for bad in (4, -1):
        with pytest.raises(IndexError):
            matrix.rows(torch.tensor([0, bad]))
    assert matrix.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 64)


@pytest.mark.parametrize("format", [Q4_0, Q4_1, Q8_0, Q6_K, None], ids=str)
def test_nan_and_infinity_spread_as_they_should(library: Library, format: BlockFormat | None) -> None:
    weight = torch.randn(30, 256) + 0.01
    part = Weight(weight, (30, 256)) if format is None else Weight(format.quantize(weight), (30, 256), format)
    matrix = BlockMatrix(library, [part])
    for rows in (2, 9):
        x = torch.randn(rows, 256)
        clean = matrix.matmul(x)
        for value in (float("nan"), float("inf")):
            dirty = x.clone()
            dirty[1, 200] = value
            out = matrix.matmul(dirty)
            assert torch.equal(out[0], clean[0])
            assert not out[1].isfinite().any()


def test_a_nan_scale_poisons_its_row_alone(library: Library) -> None:
    part = quantized(Q4_1, 26, 64)
    part.data[7, :2] = torch.tensor([torch.nan], dtype=torch.float16).view(torch.uint8)
    for rows in (1, 5):
        out = BlockMatrix(library, [part]).matmul(torch.randn(rows, 64))
        assert out[:, 7].isnan().all()
        assert out[:, [6, 8]].isfinite().all()


def test_subnormal_and_extreme_scales_are_exact(library: Library) -> None:
    part = quantized(Q8_0, 4, 32)
    scales = torch.tensor([2.0**-24, 65504.0, -(2.0**-14), 0.0], dtype=torch.float16)
    part.data[:, :2] = scales.view(-1, 1).view(torch.uint8)
    matrix = BlockMatrix(library, [part])
    assert torch.equal(matrix.rows(torch.arange(4)), part.dense())
    assert_is_matmul(matrix, [part], torch.randn(1, 32))
