"""The draw of one token: temperature, top_k, top_p, min_p, and one uniform number.

A row is drawn by itself: what else is in the batch cannot change a bit of it, and its working set stays in the
processor's cache. Weights are float32, their sums float64.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import torch
from torch import Tensor

from nanoserve.core.params import SamplingParams
from nanoserve.sampling.largest import descending, largest

COLDEST = 1e-30  # a temperature in float32; even logits that differ in their last bit only are far apart by then
FEW = 64  # a nucleus no larger is found without binning the row
BINS = 4096
DEPTH = 40.0  # nats below the largest that the bins span; the last bin holds all the rest
BLOCK = 256
_GAMMA, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1), 52 bits, decided by these two alone.

    The position-th output of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014), started at the mix of the seed so that neighbouring seeds are not neighbouring streams.
    """
    state = (_mix(seed & _MASK) + (position + 1) * _GAMMA) & _MASK
    return ((_mix(state) >> 12) + 0.5) * 2.0**-52


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def draw(x: Tensor, top: float, params: SamplingParams, u: float) -> int:
    """The token at u of the row's cumulative distribution, tokens in the order of their ids.

    x: adjusted logits [V]; top: the largest of them, finite; u: in (0, 1).
    """
    ids = None  # of the tokens still in the draw, ascending; None: all
    if 0 < params.top_k < x.shape[0]:
        ids = largest(x, params.top_k)
        x = x[ids]
    z = x - top
    if params.temperature != 1.0:
        z.div_(max(params.temperature, COLDEST))
    weights = z.exp()  # not normalised: the largest is 1
    if params.top_p < 1.0:
        limit = params.top_p * float(weights.sum(dtype=torch.float64))
        few = _nucleus_of_few(x, weights, limit)
        if few is None:
            _zero_outside_nucleus(x, z, weights, limit)
        else:
            ids, weights = few if ids is None else ids[few], weights[few]
    if params.min_p > 0.0:
        torch.threshold_(weights, params.min_p * (1 - 2.0**-24), 0.0)  # the float32 before min_p: what is over it stays
    index = _invert(weights, u)
    return index if ids is None else int(ids[index])


def _nucleus_of_few(x: Tensor, weights: Tensor, limit: float) -> Tensor | None:
    """Indices, ascending, of the nucleus: the fewest largest tokens whose weights [V] reach the limit. A token is in it
    if those before it (larger, or equal with a lower id) do not. None where that takes more than FEW tokens."""
    order = descending(x, largest(x, FEW))
    reach = weights[order].cumsum(0, dtype=torch.float64)
    count = int((reach < limit).sum()) + 1
    return order[:count].sort().values if count <= FEW else None


def _zero_outside_nucleus(x: Tensor, z: Tensor, weights: Tensor, limit: float) -> None:
    """For a nucleus of any size, and without sorting the row: weights are summed in bins of z. Bins before the one
    where the sum reaches the limit are inside, bins after it outside, and only that one is sorted."""
    bins = (z * (-BINS / DEPTH)).clamp_(max=BINS - 1).floor_()
    mass = torch.zeros(BINS, dtype=torch.float64, device=z.device)
    mass.scatter_add_(0, bins.long(), weights.double()).cumsum_(0)
    edge_bin = int(torch.searchsorted(mass, limit))  # BINS where rounding leaves the limit out of reach: all stay
    before = float(mass[edge_bin - 1]) if edge_bin else 0.0
    edge = descending(x, (bins == edge_bin).nonzero()[:, 0])
    reach = before + weights[edge].cumsum(0, dtype=torch.float64)
    count = int((reach < limit).sum()) + 1  # of the edge's tokens are inside
    weights.mul_((edge_bin + 1 - bins).clamp_(0.0, 1.0))  # 1 up to the edge, 0 after it; faster than a mask
    weights[edge[count:]] = 0.0


def _invert(weights: Tensor, u: float) -> int:
    """The first index whose running sum reaches u of the whole; it is never one of weight zero."""
    whole = weights.shape[0] - weights.shape[0] % BLOCK
    per_block = weights[:whole].view(-1, BLOCK).sum(1, dtype=torch.float64).tolist()
    if whole < weights.shape[0]:
        per_block.append(float(weights[whole:].sum(dtype=torch.float64)))
    sums = list(accumulate(per_block))
    target = u * sums[-1]
    block = bisect_left(sums, target)
    rest = target - (sums[block - 1] if block else 0.0)
    running = list(accumulate(weights[block * BLOCK : (block + 1) * BLOCK].tolist()))
    # The two sums may round apart; then the block's last token with weight is the one.
    return block * BLOCK + bisect_left(running, min(rest, running[-1]))
