"""The native attention, under the tests of every backend and some of its own: splits, odd heads, equal bits."""

from __future__ import annotations

import pytest
import torch

from nanoserve.attention.interface import AttentionMeta, AttentionSpec, KVPool
from nanoserve.attention.native import NativeAttention
from nanoserve.ops.native.library import load
from unit.test_attention import (  # noqa: F401
    MIXED,
    check,
    one_thread,
    test_a_cache_of_another_type,
    test_a_window_as_long_as_the_sequence_hides_nothing,
    test_chunks_longer_than_a_tile,
    test_head_dims_and_block_sizes,
    test_mixed_rows,
    test_one_row_alone,
    test_only_decodes_of_very_different_lengths,
)


@pytest.fixture(scope="module")
def backend() -> NativeAttention:
    return NativeAttention(load(threads=2))


@pytest.mark.parametrize("dim", [1, 7, 20, 256])
def test_odd_head_dims(backend: NativeAttention, dim: int) -> None:
    check(backend, MIXED, dim=dim)
    check(backend, MIXED, dim=dim, kv_dtype=torch.bfloat16)
    check(backend, MIXED, dim=dim, kv_dtype=torch.float16)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (16, 1), (7, 7), (100, 2)])
def test_groups_of_any_size(backend: NativeAttention, heads: int, kv_heads: int) -> None:
    check(backend, MIXED, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("window", [None, 1, 256, 300, 700])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_splits_of_long_rows(backend: NativeAttention, window: int | None, softcap: float | None) -> None:
    rows = [(700, 3), (1000, 4), (511, 1), (512, 1), (767, 2), (255, 1), (256, 1)]
    check(backend, rows, heads=3, kv_heads=1, window=window, softcap=softcap)


def test_bfloat16_queries_and_cache(backend: NativeAttention) -> None:
    check(backend, MIXED, dtype=torch.bfloat16, tolerance=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_cache_rounds_like_torch(backend: NativeAttention, dtype: torch.dtype) -> None:
    values = torch.tensor(
        [0.0, -0.0, 1.0, 2049.0, 65519.0, 65520.0, 1e-8, 6.1e-5, -5.97e-8, 2.98e-8, 3.4e38, -torch.inf]
    )
    numbers = torch.cat((values, torch.randn(20) * 1e-4)).view(1, 1, 32)
    pool = KVPool(1, 1, 4, 1, 32, dtype, torch.device("cpu"))
    one = torch.ones(1, dtype=torch.int32)
    meta = AttentionMeta(torch.tensor([0, 1]).int(), one, one.view(1, 1) - 1, torch.tensor([2]), 1, 1)
    backend.begin(meta, pool).attend(0, numbers, numbers, -numbers, AttentionSpec(scale=1.0))
    assert torch.equal(pool.keys[0, 0, 0, 2], numbers[0, 0].to(dtype))
    assert torch.equal(pool.values[0, 0, 0, 2], -numbers[0, 0].to(dtype))


def attend(threads: int, rows: list[tuple[int, int]], picked: list[int]) -> list[torch.Tensor]:
    """What each of the `picked` rows gets when they are in one step. Row number decides keys, queries and blocks."""
    generator = torch.Generator().manual_seed(0)
    pool = KVPool(1, 40 * len(rows), 16, 3, 64, torch.float32, torch.device("cpu"))
    pool.keys.normal_(generator=generator)
    pool.values.normal_(generator=generator)
    q, k, v = (torch.randn(len(rows), 600, heads, 64, generator=generator) for heads in (9, 3, 3))
    counts = [rows[row][1] for row in picked]
    table = torch.tensor([list(range(40 * row, 40 * row + 40)) for row in picked], dtype=torch.int32)
    meta = AttentionMeta(
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        lengths=torch.tensor([sum(rows[row]) for row in picked]).int(),
        block_table=table,
        slots=torch.cat([40 * 16 * row + torch.arange(rows[row][0], sum(rows[row])) for row in picked]),
        max_query=max(counts),
        max_length=max(sum(rows[row]) for row in picked),
    )
    q, k, v = (torch.cat([x[row, : rows[row][1]] for row in picked]) for x in (q, k, v))
    step = NativeAttention(load(threads)).begin(meta, pool)
    return list(step.attend(0, q, k, v, AttentionSpec(scale=0.125)).split(counts))


def test_a_row_does_not_depend_on_others_or_on_threads() -> None:
    rows = [(0, 50), (590, 1), (3, 1), (300, 33), (255, 1)]
    together = attend(2, rows, [0, 1, 2, 3, 4])
    for threads in (1, 3):
        assert all(map(torch.equal, attend(threads, rows, [0, 1, 2, 3, 4]), together))
    for row in range(len(rows)):
        assert torch.equal(attend(2, rows, [row])[0], together[row])
