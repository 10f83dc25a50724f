"""What each parameter does to a token, and that a row is alone in a batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import FAILED_SAMPLE
from nanoserve.sampling.draw import uniform
from nanoserve.sampling.params import RowSampling
from nanoserve.sampling.sampler import Sampled, Sampler

VOCAB = 12


def row(prompt_length: int = 1, seed: int = 0, stop_ids: tuple[int, ...] = (), **params: Any) -> RowSampling:
    params.setdefault("temperature", 0.0)
    return RowSampling(
        params=SamplingParams(**params), seed=seed, prompt_length=prompt_length, stop_ids=frozenset(stop_ids)
    )


def sample(logits: Tensor, rows: list[RowSampling], tokens: list[list[int]], vocab: int = VOCAB) -> Sampled:
    known = [torch.tensor(t, dtype=torch.int32) for t in tokens]
    return Sampler(vocab, torch.device("cpu")).sample(logits, rows, lambda s: known[s], [len(t) for t in tokens])


def scripted(**logits: float) -> Tensor:
    """One row of logits, zero but for t3=5.0 and the like."""
    x = torch.zeros(1, VOCAB)
    for name, value in logits.items():
        x[0, int(name[1:])] = value
    return x


def one(logits: Tensor, sampling: RowSampling, tokens: list[int]) -> int:
    return int(sample(logits, [sampling], [tokens]).ids)


def drawn(logits: Tensor, **params: Any) -> set[int]:
    """The tokens that 200 seeds give."""
    rows = [row(seed=seed, **({"temperature": 1.0} | params)) for seed in range(200)]
    return set(sample(logits.expand(200, -1), rows, [[0]] * 200).ids.tolist())


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    assert one(scripted(t9=2.0, t4=2.0), row(), [0]) == 4
    assert one(torch.zeros(1, VOCAB), row(), [0]) == 0


def test_plain_greedy_reads_no_tokens_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> Any:
        raise AssertionError("not for plain greedy rows")

    monkeypatch.setattr("nanoserve.sampling.sampler.draw", never)
    monkeypatch.setattr("nanoserve.sampling.sampler.adjusted", never)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [row(stop_ids=(1,), min_tokens=2, prompt_length=3)] * 5
    found = Sampler(VOCAB, torch.device("cpu")).sample(logits, rows, never, [5] * 5)
    assert found.ids.tolist() == logits.argmax(-1).tolist()
    assert found.logprobs == [None] * 5


def test_tokens_are_read_for_rows_with_penalties_alone() -> None:
    read = []

    def tokens(s: int) -> Tensor:
        read.append(s)
        return torch.tensor([1, 2], dtype=torch.int32)

    rows = [row(), row(temperature=1.0), row(repetition_penalty=2.0), row(logit_bias={1: 1.0})]
    Sampler(VOCAB, torch.device("cpu")).sample(torch.zeros(4, VOCAB), rows, tokens, [2] * 4)
    assert read == [2]


def test_padded_embedding_rows_are_never_sampled() -> None:
    logits = torch.zeros(3, VOCAB + 4)
    logits[:, VOCAB:] = 50.0
    rows = [row(), row(temperature=1.0), row(temperature=1.0, top_k=3, logprobs=20)]
    found = sample(logits, rows, [[0]] * 3)
    assert all(0 <= token < VOCAB for token in found.ids.tolist())
    assert found.logprobs[2] is not None
    assert sorted(found.logprobs[2].top_ids) == list(range(VOCAB))


# --- each parameter changes the token (A16) ---


def test_A16_repetition_penalty() -> None:
    logits = scripted(t3=4.0, t5=3.0)
    assert one(logits, row(), [3]) == 3
    assert one(logits, row(repetition_penalty=2.0), [3]) == 5, "4 / 2 < 3; the prompt counts"
    below = torch.full((1, VOCAB), -9.0)
    below[0, 3], below[0, 5] = -2.0, -3.0
    assert one(below, row(repetition_penalty=2.0), [3]) == 5, "-2 * 2 < -3: a negative logit is multiplied"
    assert one(below, row(repetition_penalty=2.0), [3, 3, 3]) == 5, "once, however often the token was seen"


def test_A16_presence_penalty() -> None:
    logits = scripted(t3=4.0, t5=3.0)
    assert one(logits, row(presence_penalty=1.5, prompt_length=1), [3]) == 3, "the prompt does not count"
    assert one(logits, row(presence_penalty=1.5, prompt_length=1), [0, 3]) == 5
    assert one(scripted(t3=4.0, t5=2.0), row(presence_penalty=1.5, prompt_length=1), [0, 3, 3, 3]) == 3, "once"


def test_A16_frequency_penalty() -> None:
    logits = scripted(t3=4.0, t5=3.0)
    assert one(logits, row(frequency_penalty=0.6, prompt_length=2), [3, 3]) == 3, "the prompt does not count"
    assert one(logits, row(frequency_penalty=0.6, prompt_length=2), [3, 3, 3]) == 3
    assert one(logits, row(frequency_penalty=0.6, prompt_length=2), [3, 3, 3, 3]) == 5, "each time counts"


def test_A16_logit_bias() -> None:
    assert one(scripted(t3=4.0, t5=3.0), row(logit_bias={5: 1.5}), [0]) == 5
    assert one(scripted(t3=4.0, t5=3.0), row(logit_bias={3: -1.5}), [0]) == 5


def test_A16_temperature() -> None:
    logits = scripted(t3=4.0, t5=3.0)
    assert drawn(logits, temperature=1.0) > {3, 5}
    assert drawn(logits, temperature=0.1) == {3}
    assert drawn(logits, temperature=1e-300) == {3}
    assert drawn(scripted(t3=4.0, t5=4.0), temperature=1e-5) == {3, 5}, "ties are drawn from, and only greedy picks"


def test_A16_top_k() -> None:
    logits = scripted(t3=3.0, t5=2.5, t7=2.0)
    assert drawn(logits, top_k=1) == {3}
    assert drawn(logits, top_k=2) == {3, 5}
    assert drawn(torch.zeros(1, VOCAB), top_k=2) == {0, 1}, "ties to the lower ids"
    assert drawn(torch.zeros(1, VOCAB), top_k=0) == drawn(torch.zeros(1, VOCAB), top_k=-1) == set(range(VOCAB))


def test_A16_top_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05] + [0.0] * 8]).log()
    assert drawn(logits, top_p=0.45) == {0}
    assert drawn(logits, top_p=0.79) == {0, 1}
    assert drawn(logits, top_p=0.81) == {0, 1, 2}
    assert drawn(logits, top_p=1e-300) == {0}
    assert drawn(torch.zeros(1, VOCAB), top_p=0.25) == {0, 1, 2}, "12 equal ones: 3 hold a quarter"


def test_A16_min_p() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05] + [0.0] * 8]).log()
    assert drawn(logits, min_p=0.05) == {0, 1, 2, 3}
    assert drawn(logits, min_p=0.2) == {0, 1, 2}
    assert drawn(logits, min_p=0.5) == {0, 1}
    assert drawn(logits, min_p=1.0) == {0}
    assert drawn(scripted(t3=4.0, t5=4.0), min_p=1.0) == {3, 5}


def test_A16_seed() -> None:
    assert len(drawn(torch.zeros(1, VOCAB))) == VOCAB


def test_A16_order_top_p_counts_what_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1] + [0.0] * 7]).log()
    assert drawn(logits, top_p=0.5) == {0, 1}
    assert drawn(logits, top_p=0.65, top_k=2) == {0}, "0.4 of 0.6"
    assert drawn(logits, top_p=0.65) == {0, 1, 2}


# --- bans ---


def test_A14_a_bias_of_minus_100_bans() -> None:
    logits = scripted(t3=1000.0, t5=3.0)
    assert one(logits, row(logit_bias={3: -100}), [0]) == 5, "adding -100 would leave 900"
    assert drawn(logits, logit_bias={3: -100}) == set(range(VOCAB)) - {3}
    assert one(scripted(t3=10.0), row(logit_bias={5: 100}), [0]) == 5


def test_A14_ids_outside_of_the_vocabulary_harm_nobody() -> None:
    logits = torch.zeros(2, VOCAB + 4)
    logits[:, 2] = 1.0
    wild = row(logit_bias={VOCAB: 5.0, 99999999: -100.0}, stop_ids=(VOCAB + 1,), min_tokens=4, repetition_penalty=1.1)
    assert sample(logits, [wild, row()], [[VOCAB + 2, 0], [1]]).ids.tolist() == [2, 2]


def test_a_row_with_everything_banned_fails_alone() -> None:
    logits = scripted(t3=1.0).expand(2, -1)
    banned = row(temperature=1.0, logprobs=3, logit_bias=dict.fromkeys(range(VOCAB), -100.0))
    found = sample(logits, [banned, row()], [[0], [0]])
    assert found.ids.tolist() == [FAILED_SAMPLE, 3]
    assert found.logprobs == [None, None]


def test_A15_min_tokens_masks_every_end_token() -> None:
    logits = scripted(t7=9.0, t2=8.0, t9=7.0, t4=1.0)  # 2 and 7 are EOS ids, 9 a stop token id
    sampling = row(prompt_length=3, stop_ids=(2, 7, 9), min_tokens=5)
    for generated in range(5):
        assert one(logits, sampling, [2] * 3 + [4] * generated) == 4, "the prompt does not count"
    assert one(logits, sampling, [2] * 3 + [4] * 5) == 7
    hot = [row(prompt_length=3, seed=s, stop_ids=(2, 7, 9), min_tokens=5, temperature=100.0) for s in range(300)]
    found = sample(logits.expand(300, -1), hot, [[1] * 7] * 300).ids.tolist()
    assert set(found) == set(range(VOCAB)) - {2, 7, 9}


def test_A05_each_row_has_its_own_stop_ids() -> None:
    logits = scripted(t1=9.0, t2=8.0, t3=7.0).expand(3, -1)
    rows = [
        row(stop_ids=(1, 2), min_tokens=2),
        row(stop_ids=(2,), min_tokens=2),
        row(stop_ids=(), min_tokens=2),
    ]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        found = sample(logits, [rows[s] for s in order], [[0]] * 3).ids.tolist()
        assert found == [{0: 3, 1: 1, 2: 1}[s] for s in order]


# --- a row is alone ---


def test_A12_a_seed_gives_its_tokens_whatever_is_in_the_batch() -> None:
    vocab, steps = 3000, 16
    logits = torch.randn(8, steps, vocab, generator=torch.Generator().manual_seed(1)) * 2
    seeded = row(seed=42, temperature=1.0)
    others = [
        row(seed=1, temperature=1.0),
        row(),
        row(seed=3, temperature=0.5, top_p=0.8),
        row(seed=4, temperature=2.0, top_k=50),
        row(seed=5, temperature=1.0, repetition_penalty=1.3),
        row(seed=6, temperature=1.0, min_p=0.1, logprobs=2),
        row(seed=42, temperature=1.0),
    ]

    def generate(place: int, batch: list[RowSampling]) -> list[int]:
        tokens = [[9] for _ in batch]
        for step in range(steps):
            rest = iter(range(1, 8))
            index = [0 if s == place else next(rest) for s in range(len(batch))]
            for known, token in zip(
                tokens, sample(logits[index, step], batch, tokens, vocab).ids.tolist(), strict=True
            ):
                known.append(token)
        return tokens[place]

    alone = generate(0, [seeded])
    assert generate(0, [seeded, others[0]]) == alone
    assert generate(1, [others[1], seeded]) == alone
    assert generate(5, [*others[:5], seeded, *others[5:]]) == alone


def test_A12_equal_seeds_and_logits_give_equal_tokens_and_other_seeds_vary() -> None:
    logits = torch.zeros(1, 3000).expand(4, -1)
    rows = [row(seed=s, temperature=1.0) for s in (7, 7, 8, -7)]
    a, b, c, d = sample(logits, rows, [[0]] * 4, 3000).ids.tolist()
    assert a == b
    assert len({a, c, d}) == 3


def test_A34_a_resumed_row_goes_on_with_its_draws() -> None:
    """The draw hangs on the number of known tokens: none are lost or repeated by a preemption."""
    logits = torch.zeros(1, 3000)
    sampling = row(seed=5, temperature=1.0, prompt_length=2)
    stream = [int(sample(logits, [sampling], [[0] * n], 3000).ids) for n in range(2, 12)]
    assert len(set(stream)) > 8
    assert [int(sample(logits, [sampling], [[0] * n], 3000).ids) for n in range(2, 12)] == stream


def test_A13_penalties_do_not_depend_on_the_order_of_rows() -> None:
    logits = scripted(t3=4.0, t5=3.0, t0=2.9).expand(3, -1)
    plain, repeats = row(), row(repetition_penalty=2.0)
    frequent = row(frequency_penalty=1.5, prompt_length=6)
    tokens = {id(plain): [3], id(repeats): [3], id(frequent): [3, 3, 3, 0, 0, 0, 3]}
    expected = {id(plain): 3, id(repeats): 5, id(frequent): 5}
    for rows in ([plain, repeats, frequent], [repeats, plain, frequent], [frequent, repeats, plain]):
        found = sample(logits, rows, [tokens[id(r)] for r in rows]).ids.tolist()
        assert found == [expected[id(r)] for r in rows]


@pytest.mark.parametrize("others", [{}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.5}])
def test_A44_rows_that_are_not_finite_fail_alone(others: dict[str, Any]) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[1, 4] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    logits[5, 1:] = -math.inf  # one token left: a distribution
    rows = [row(seed=s, logprobs=2, **others) for s in range(6)]
    found = sample(logits, rows, [[1]] * 6)
    assert found.ids[[1, 2, 3]].tolist() == [FAILED_SAMPLE] * 3
    assert [found.logprobs[s] for s in (1, 2, 3)] == [None] * 3
    assert found.ids[5] == 0
    for s in (0, 4, 5):
        assert int(sample(logits[s : s + 1], [rows[s]], [[1]]).ids) == found.ids[s]


def test_A44_a_nan_at_a_masked_token_is_still_noticed() -> None:
    logits = scripted(t3=1.0)
    logits[0, 7] = math.nan
    assert one(logits, row(logit_bias={7: -100.0}), [0]) == FAILED_SAMPLE


# --- logprobs ---


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_A07_logprobs_are_the_natural_log_of_the_models_own_distribution(temperature: float) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    exact = torch.log_softmax(logits.double(), -1)
    shaped = {"repetition_penalty": 1.7, "logit_bias": {1: 3.0}, "top_p": 0.9}  # they do not show in logprobs
    rows = [row(seed=s, temperature=temperature, logprobs=20, **(shaped if s % 2 else {})) for s in range(4)]
    found = sample(logits, rows, [[1, 2]] * 4)
    for s, (token, given) in enumerate(zip(found.ids.tolist(), found.logprobs, strict=True)):
        assert given is not None
        assert sorted(given.top_ids) == list(range(VOCAB))
        assert given.top_logprobs == tuple(sorted(given.top_logprobs, reverse=True))
        assert max(given.top_logprobs) <= 0.0
        assert sum(math.exp(value) for value in given.top_logprobs) == pytest.approx(1.0, abs=1e-6)
        assert given.logprob == given.top_logprobs[given.top_ids.index(token)]
        assert given.top_logprobs == pytest.approx(exact[s, list(given.top_ids)].tolist(), abs=1e-5)


def test_logprobs_only_for_rows_that_ask_and_as_many_as_they_ask() -> None:
    logits = scripted(t3=4.0, t5=3.0).expand(4, -1)
    found = sample(logits, [row(), row(logprobs=0), row(logprobs=2), row(temperature=1.0, logprobs=5)], [[0]] * 4)
    none, chosen, two, five = found.logprobs
    assert none is None
    assert chosen is not None
    assert (chosen.top_ids, chosen.top_logprobs) == ((), ())
    assert two is not None
    assert two.top_ids == (3, 5)
    assert five is not None
    assert five.top_ids == (3, 5, 0, 1, 2), "ties by id"


def test_logprobs_leave_out_what_is_impossible() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 4] = 1.0
    given = sample(logits, [row(logprobs=5)], [[0]]).logprobs[0]
    assert given == (0.0, (4,), (0.0,))


# --- the uniform numbers ---


def test_uniform_is_splitmix64() -> None:
    """Against the published generator: seed 0 gives 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F.
    (The mix of 0 is 0, so that seed 0 here is seed 0 there.)"""
    for position, word in enumerate((0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)):
        assert uniform(0, position) == ((word >> 12) + 0.5) / 2**52


def test_uniform_is_never_0_or_1() -> None:
    assert (0 + 0.5) * 2.0**-52 > 0.0
    assert ((2**52 - 1) + 0.5) * 2.0**-52 < 1.0
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
