"""Every attention backend against dense attention over contiguous keys, on pools that are NaN where nothing is
written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionMeta, AttentionSpec, KVPool
from nanoserve.attention.reference import ReferenceAttention
from nanoserve.attention.sdpa import TILE, SdpaAttention

BACKENDS = [ReferenceAttention, SdpaAttention]
# (start, count) of each row: decodes and chunks, fresh and on a cached prefix, at both sides of block borders.
MIXED = [(0, 1), (15, 1), (0, 17), (16, 16), (16, 1), (7, 5), (31, 1), (0, 2), (63, 1)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for a busy machine's other core make these small cases a hundred times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS, ids=lambda kind: kind.__name__)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return request.param()


def check(
    backend: AttentionBackend,
    rows: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    tolerance: float = 1e-5,
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [start + count for start, count in rows]
    blocks = [-(-length // block_size) for length in lengths]
    pool = KVPool(2, sum(blocks) + 3, block_size, kv_heads, dim, kv_dtype or dtype, torch.device("cpu"))
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    order = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    untouched = order.pop()
    table = torch.full((len(rows), max(blocks) + 2), untouched, dtype=torch.int32)  # wider than needed, padded
    for row, number in enumerate(blocks):
        table[row, :number] = torch.tensor([order.pop() for _ in range(number)])

    def slots(row: int, first: int, last: int) -> Tensor:
        positions = torch.arange(first, last)
        return table[row].long()[positions // block_size] * block_size + positions % block_size

    def noise(tokens: int, n: int) -> Tensor:
        return torch.randn(tokens, n, dim, generator=generator).to(dtype)

    spec = AttentionSpec(scale=0.7 * dim**-0.5, window=window, softcap=softcap)
    layer = 1
    queries, keys, values, expected = [], [], [], []
    for row, (start, count) in enumerate(rows):
        q, k, v = noise(count, heads), noise(start + count, kv_heads), noise(start + count, kv_heads)
        pool.write(layer, slots(row, 0, start), k[:start], v[:start])
        queries.append(q)
        keys.append(k[start:])
        values.append(v[start:])
        stored = k.to(pool.keys.dtype).float(), v.to(pool.keys.dtype).float()
        expected.append(dense(q.float(), *stored, spec))
    counts = torch.tensor([count for _, count in rows])
    meta = AttentionMeta(
        query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        lengths=torch.tensor(lengths).int(),
        block_table=table,
        slots=torch.cat([slots(row, start, start + count) for row, (start, count) in enumerate(rows)]),
        max_query=int(counts.max()),
        max_length=max(lengths),
    )
    # Keys as the model has them: a view into Q, K and V side by side.
    k, v = torch.cat(keys), torch.cat(values)
    fused = torch.cat((torch.cat(queries), k, v), 1)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    step = backend.begin(meta, pool)
    actual = step.attend(layer, q, k, v, spec)
    assert actual.shape == q.shape
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), torch.cat(expected), rtol=tolerance, atol=tolerance)
    assert torch.equal(step.attend(layer, q, k, v, spec), actual), "a second layer of the step differs"
    assert pool.keys[0].isnan().all(), "another layer was written"
    assert pool.keys[layer, untouched].isnan().all(), "a block of no row was written"


def dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """One query at a time: slices where the backends have masks."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = torch.empty_like(q)
    for t in range(q.shape[0]):
        last = k.shape[0] - q.shape[0] + t
        first = 0 if spec.window is None else max(0, last - spec.window + 1)
        scores = (k[first : last + 1] * q[t]).sum(-1) * spec.scale  # L H
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        out[t] = (scores.softmax(0)[..., None] * v[first : last + 1]).sum(0)
    return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 8, 17])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
def test_mixed_rows(
    backend: AttentionBackend, heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    check(backend, MIXED, heads=heads, kv_heads=kv_heads, window=window, softcap=softcap)


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_head_dims_and_block_sizes(backend: AttentionBackend, dim: int, block_size: int) -> None:
    check(backend, MIXED, dim=dim, block_size=block_size, window=9)
    check(backend, MIXED, dim=dim, block_size=block_size)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_one_row_alone(backend: AttentionBackend, length: int) -> None:
    check(backend, [(length - 1, 1)])
    check(backend, [(0, length)])
    check(backend, [(length // 2, length - length // 2)])


def test_only_decodes_of_very_different_lengths(backend: AttentionBackend) -> None:
    check(backend, [(2, 1), (700, 1), (300, 1), (257, 1), (256, 1), (255, 1), (4, 1)])
    check(backend, [(2, 1), (700, 1), (300, 1)], window=50)


@pytest.mark.parametrize("window", [None, 100, TILE + 30])
def test_chunks_longer_than_a_tile(backend: AttentionBackend, window: int | None) -> None:
    check(backend, [(0, TILE + 1), (40, 2 * TILE), (TILE, TILE)], heads=2, kv_heads=1, window=window)


@pytest.mark.parametrize("window", [64, 65, 1000])
def test_a_window_as_long_as_the_sequence_hides_nothing(backend: AttentionBackend, window: int) -> None:
    check(backend, MIXED, window=window)


def test_half_precision(backend: AttentionBackend) -> None:
    check(backend, MIXED, dtype=torch.bfloat16, tolerance=2e-2)
    check(backend, MIXED, dtype=torch.bfloat16, softcap=3.0, tolerance=3e-2)
    check(backend, MIXED, dtype=torch.float16, tolerance=3e-3)


def test_a_cache_of_another_type(backend: AttentionBackend) -> None:
    check(backend, MIXED, kv_dtype=torch.bfloat16)
