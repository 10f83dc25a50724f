"""Sampler: one token for each row of logits. It knows a row's parameters and tokens, and nothing of requests.

Stages of a row, each applied only where the row asks for it: repetition, presence, frequency penalty; logit_bias;
min_tokens (adjust.py); then the largest logit, ties to the lowest id, where the temperature is 0; otherwise
temperature, top_k, top_p, min_p and the draw (draw.py). `reference.py` says the same slowly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanoserve.core.plan import FAILED_SAMPLE, TokenLogprobs
from nanoserve.sampling.adjust import adjusted
from nanoserve.sampling.draw import draw, uniform
from nanoserve.sampling.largest import descending, first_max, largest
from nanoserve.sampling.params import RowSampling


class Sampled(NamedTuple):
    ids: Tensor  # int64 [S]; FAILED_SAMPLE where a row's logits leave nothing to choose from
    logprobs: list[TokenLogprobs | None]  # None for rows that did not ask, or failed


class Sampler:
    def __init__(self, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.device = device

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[RowSampling],
        tokens: Callable[[int], Tensor],
        lengths: Sequence[int],
    ) -> Sampled:
        """logits: float32 [S, V], V >= vocab_size; ids from vocab_size on are padding and never sampled.
        tokens: gives row s's known tokens, prompt and output, int [lengths[s]]; called for rows with penalties.

        A row with a NaN or +inf among its logits, or with nothing over -inf before or after the stages, fails alone.
        """
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(rows) == len(lengths)
        assert logits.shape[1] >= self.vocab_size
        logits = logits[:, : self.vocab_size]
        best, ids = first_max(logits)
        work = [s for s, row in enumerate(rows) if not _plain(row, lengths[s])]
        ids = ids.masked_fill_(~best.isfinite(), FAILED_SAMPLE)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if not work:
            return Sampled(ids, logprobs)

        chosen, tops = ids.tolist(), best.tolist()
        for s in work:
            if chosen[s] == FAILED_SAMPLE:
                continue
            row, x, top = rows[s], logits[s], tops[s]
            generated = lengths[s] - row.prompt_length
            if row.adjusts(generated):
                x = adjusted(x, row, tokens(s) if row.penalised else None, generated)
                adjusted_top, first = first_max(x[None])
                top, chosen[s] = float(adjusted_top), int(first)
                if not math.isfinite(top):
                    chosen[s] = FAILED_SAMPLE
                    continue
            if not row.params.greedy:
                chosen[s] = draw(x, top, row.params, uniform(row.seed, lengths[s]))
            if row.params.logprobs is not None:
                logprobs[s] = _logprobs(logits[s], tops[s], chosen[s], row.params.logprobs)
        return Sampled(torch.tensor(chosen, dtype=torch.int64, device=self.device), logprobs)


def _plain(row: RowSampling, length: int) -> bool:
    """Whether the row takes the largest of its logits as they are, and asks for no more."""
    return row.params.temperature == 0.0 and row.params.logprobs is None and not row.adjusts(length - row.prompt_length)


def _logprobs(logits: Tensor, top: float, chosen: int, count: int) -> TokenLogprobs:
    """log_softmax of the raw logits [V], whose largest is `top`. The list leaves out tokens of probability zero."""
    norm = top + math.log(float((logits - top).exp_().sum(dtype=torch.float64)))
    listed = descending(logits, largest(logits, count)) if count else logits[:0].long()
    listed = listed[logits[listed] > -math.inf]
    return TokenLogprobs(
        float(logits[chosen]) - norm,
        tuple(listed.tolist()),
        tuple(value - norm for value in logits[listed].tolist()),
    )
