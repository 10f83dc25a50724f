"""The fast sampler against its slow spec, over many combinations of parameters, ties and extremes."""

from __future__ import annotations

import math
import random
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import FAILED_SAMPLE
from nanoserve.sampling import reference
from nanoserve.sampling.draw import BINS, draw, uniform
from nanoserve.sampling.draw import BLOCK as SUM_BLOCK
from nanoserve.sampling.largest import BLOCK, descending, first_max, largest
from nanoserve.sampling.params import RowSampling
from nanoserve.sampling.sampler import Sampled, Sampler

CHOICES = {
    "temperature": (0.0, 0.0, 1e-300, 1e-5, 0.3, 1.0, 1.7, 100.0),
    "top_k": (0, 0, -1, 1, 2, 7, 50, 10**9),
    "top_p": (1.0, 1.0, 1e-300, 1e-3, 0.5, 0.9, 0.9999999),
    "min_p": (0.0, 0.0, 1e-6, 0.1, 1.0),
    "repetition_penalty": (1.0, 1.0, 1e-300, 0.5, 1.3, 100.0),
    "presence_penalty": (0.0, 0.0, -2.0, 0.7),
    "frequency_penalty": (0.0, 0.0, -1.0, 2.0),
}


def random_row(rng: random.Random, vocab: int) -> tuple[RowSampling, list[int]]:
    chosen = {name: rng.choice(values) for name, values in CHOICES.items()}
    bias = {}
    if rng.random() < 0.4:
        bias = {rng.randrange(vocab): rng.choice((-100.0, 100.0, -3.0, 0.5)) for _ in range(rng.randint(1, 6))}
    prompt, output = rng.randint(1, 12), rng.randint(0, 12)
    row = RowSampling(
        params=SamplingParams(**chosen, logit_bias=bias, min_tokens=rng.choice((0, 0, 5))),
        seed=rng.getrandbits(64),
        prompt_length=prompt,
        stop_ids=frozenset(rng.randrange(vocab) for _ in range(rng.randint(0, 3))),
    )
    return row, [rng.randrange(vocab) for _ in range(prompt + output)]


def random_logits(rng: random.Random, vocab: int, padding: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    x = torch.randn(vocab + padding, generator=generator) * rng.choice((0.1, 1.0, 4.0, 30.0))
    kind = rng.randrange(6)
    if kind == 0:
        x = x.round()  # many ties
    elif kind == 1:
        x = torch.zeros_like(x)  # nothing but ties
    elif kind == 2:
        x[rng.randrange(vocab)] = -math.inf
    elif kind == 3:
        x = x.sign() * 1e30
    x[vocab:] = rng.choice((math.nan, math.inf, 1e9))  # what lies in the padding must not matter
    return x


def run(logits: Tensor, rows: list[RowSampling], tokens: list[list[int]], vocab: int) -> Sampled:
    known = [torch.tensor(row, dtype=torch.int32) for row in tokens]
    return Sampler(vocab, torch.device("cpu")).sample(logits, rows, lambda s: known[s], [len(t) for t in tokens])


@pytest.mark.parametrize("trial", range(120))
def test_equals_the_reference(trial: int) -> None:
    rng = random.Random(trial)
    vocab, padding = rng.choice((3, 64, 100, 257, 640, 1009)), rng.choice((0, 0, 1, 37))
    made = [random_row(rng, vocab) for _ in range(rng.randint(1, 9))]
    rows, tokens = [row for row, _ in made], [known for _, known in made]
    logits = torch.stack([random_logits(rng, vocab, padding) for _ in rows])
    before = logits.clone()
    found = run(logits, rows, tokens, vocab).ids.tolist()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "logits belong to the caller"
    for s, (row, known) in enumerate(made):
        plain = logits[s, :vocab].tolist()
        u = uniform(row.seed, len(known))
        expected = reference.sample(plain, row, known, u)
        if found[s] != expected:  # float32 weights: then u must lie at the very border of two tokens
            x = reference.stages(plain, row, known)
            odds = reference.distribution(x, row)
            assert expected != FAILED_SAMPLE
            assert odds[found[s]] > 0.0, (row, found[s], expected)
            near = {reference.pick(odds, min(max(u + d, 1e-12), 1.0)) for d in (-1e-5, 1e-5)}
            assert found[s] in near, (row, found[s], expected)


@pytest.mark.parametrize("trial", range(10))
def test_rows_do_not_depend_on_their_order(trial: int) -> None:
    rng = random.Random(1000 + trial)
    vocab = 1000
    made = [random_row(rng, vocab) for _ in range(9)]
    logits = torch.stack([random_logits(rng, vocab, 5) for _ in made])
    rows, tokens = [row for row, _ in made], [known for _, known in made]
    together = run(logits, rows, tokens, vocab).ids.tolist()
    order = rng.sample(range(9), 9)
    shuffled = run(logits[order], [rows[s] for s in order], [tokens[s] for s in order], vocab).ids.tolist()
    assert shuffled == [together[s] for s in order]
    assert together == [run(logits[s : s + 1], [rows[s]], [tokens[s]], vocab).ids.item() for s in range(9)]


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 1000, 9000])
@pytest.mark.parametrize("distinct", [1, 3, 10**6])
def test_the_largest_and_their_ties(vocab: int, distinct: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randint(distinct, (3, vocab), generator=generator).float()
    x[1, : vocab // 2] = -math.inf
    best, ids = first_max(x)
    for row, numbers in enumerate(x.tolist()):
        order = sorted(range(vocab), key=lambda i: (-numbers[i], i))
        assert (best[row].item(), ids[row].item()) == (x[row].max().item(), order[0])
        for k in (1, 2, 20, 150, vocab, vocab + 5):
            found = largest(x[row], k)
            assert found.tolist() == sorted(order[:k])
            assert descending(x[row], found).tolist() == order[:k]


def test_a_row_of_real_size() -> None:
    """Blocks and bins are all in use: a nucleus of thousands, top_k over many blocks."""
    vocab = 50257
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(vocab, generator=generator) * 2
    assert vocab > 100 * BLOCK
    assert vocab > BINS
    for kwargs in ({"top_p": 0.95}, {"top_k": 40}, {"top_k": 4000, "top_p": 0.9}, {"min_p": 0.01}, {"top_p": 0.1}):
        params = SamplingParams(temperature=1.3, **kwargs)
        rows = [RowSampling(params=params, seed=s, prompt_length=1, stop_ids=frozenset()) for s in range(8)]
        found = run(x.expand(8, -1), rows, [[0]] * 8, vocab).ids.tolist()
        odds = reference.distribution(x.tolist(), rows[0])
        assert found == [reference.pick(odds, uniform(s, 1)) for s in range(8)]


def test_a_number_at_the_border_of_two_blocks_finds_a_token_with_weight() -> None:
    """The sum of a block and the running sum of its tokens may round apart."""
    for seed in range(30):
        x = torch.randn(20 * SUM_BLOCK, generator=torch.Generator().manual_seed(seed)) * 6
        blocks = x.view(20, SUM_BLOCK)
        blocks[:, 0] = blocks[:, -1] = -math.inf
        top = float(x.max())
        sums = list(accumulate((blocks - top).exp().sum(1, dtype=torch.float64).tolist()))
        for block, reached in enumerate(sums[:-1]):
            token = draw(x, top, SamplingParams(), reached / sums[-1])
            assert x[token] > -math.inf
            assert token // SUM_BLOCK in (block, block + 1)


@pytest.mark.parametrize("top_p", [1.0, 1.0 - 2.0**-53])
def test_numbers_and_masses_at_the_very_end(top_p: float) -> None:
    for seed in range(30):
        x = torch.randn(3000, generator=torch.Generator().manual_seed(seed)) * 6  # so wide that float64 must round
        x[2800:] = -math.inf
        x[[0, 2799]] = top = float(x.max()) + 1.0
        params = SamplingParams(top_p=top_p)
        assert draw(x, top, params, 1.0 - 2.0**-53) == 2799
        assert draw(x, top, params, 2.0**-53) == 0
