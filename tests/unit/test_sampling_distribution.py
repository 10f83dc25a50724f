"""Chi-square: over many seeds, tokens come as often as the definition says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats

from nanoserve.core.params import SamplingParams
from nanoserve.sampling.draw import uniform
from nanoserve.sampling.params import RowSampling
from nanoserve.sampling.sampler import Sampler

VOCAB, DRAWS = 40, 2500


def expected(logits: list[float], temperature: float, keep: Any) -> list[float]:
    """Probabilities after temperature, of the tokens for which keep(rank, mass before, share of the largest)."""
    weights = [math.exp(value / temperature) for value in logits]
    whole, before, kept = sum(weights), 0.0, [0.0] * len(logits)
    for rank, token in enumerate(sorted(range(len(logits)), key=lambda t: -logits[t])):
        if keep(rank, before / whole, weights[token] / max(weights)):
            kept[token] = weights[token]
        before += weights[token]
    return [weight / sum(kept) for weight in kept]


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    ("params", "keep"),
    [
        ({"temperature": 1.0}, lambda rank, before, share: True),
        ({"temperature": 0.6}, lambda rank, before, share: True),
        ({"temperature": 1.8}, lambda rank, before, share: True),
        ({"temperature": 1.0, "top_k": 7}, lambda rank, before, share: rank < 7),
        ({"temperature": 1.3, "top_p": 0.8}, lambda rank, before, share: before < 0.8),
        ({"temperature": 1.2, "min_p": 0.08}, lambda rank, before, share: share >= 0.08),
    ],
)
def test_tokens_come_as_often_as_they_should(params: dict[str, Any], keep: Any, vary: str) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)) * 1.5
    sampling = SamplingParams(**params)
    place = range(DRAWS)
    rows = [
        RowSampling(params=sampling, seed=s if vary == "seed" else 77, prompt_length=1, stop_ids=frozenset())
        for s in place
    ]
    lengths = [5 if vary == "seed" else 1 + s for s in place]
    sampler = Sampler(VOCAB, torch.device("cpu"))
    found = sampler.sample(logits.expand(DRAWS, -1), rows, lambda s: torch.zeros(0), lengths)
    counts = torch.bincount(found.ids, minlength=VOCAB).tolist()
    odds = expected(logits.tolist(), sampling.temperature, keep)
    assert all(count == 0 for count, p in zip(counts, odds, strict=True) if p == 0.0)
    # Tokens too rare for the test's approximation share one cell.
    common = [t for t in range(VOCAB) if odds[t] * DRAWS >= 5]
    seen = [counts[t] for t in common] + [DRAWS - sum(counts[t] for t in common)]
    should = [odds[t] * DRAWS for t in common] + [DRAWS * (1 - sum(odds[t] for t in common))]
    if should[-1] < 1e-6:
        assert seen.pop() == 0
        should.pop()
    assert stats.chisquare(seen, [value * sum(seen) / sum(should) for value in should]).pvalue > 1e-3


def test_uniform_numbers_are_uniform_and_not_correlated() -> None:
    for numbers in (
        [uniform(seed, 10) for seed in range(20000)],
        [uniform(3, position) for position in range(20000)],
        [uniform(2**63 + 977 * i, i) for i in range(20000)],
    ):
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3
        assert abs(stats.pearsonr(numbers[:-1], numbers[1:]).statistic) < 0.03
