"""The stages before the temperature: repetition, presence and frequency penalties; logit_bias; min_tokens.

Each touches few logits of a row. They compute in float64 and round to float32 after each stage, as the reference
does. Ids outside the vocabulary are passed over: they cannot be sampled anyway.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanoserve.core.params import BAN
from nanoserve.sampling.params import RowSampling

_LARGEST = torch.finfo(torch.float32).max


def adjusted(logits: Tensor, row: RowSampling, known: Tensor | None, generated: int) -> Tensor:
    """A copy of the row's logits [V] with every stage applied that the row asks for.

    known: the row's tokens, prompt and output; needed by penalties alone.
    """
    p = row.params
    x = logits.clone()
    if known is not None:
        known = known[known < x.shape[0]].long()
        if p.repetition_penalty != 1.0:
            # CTRL (arXiv:1909.05858), with the sign taken into account. Duplicates write the same value.
            seen = x[known].double()
            _put(x, known, torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty))
        if generated and (p.presence_penalty or p.frequency_penalty):
            ids, counts = torch.unique(known[-generated:], return_counts=True)
            _put(x, ids, x[ids].double() - p.presence_penalty - p.frequency_penalty * counts)
    if p.logit_bias:
        bias = {token: value for token, value in p.logit_bias.items() if token < x.shape[0]}
        ids = torch.tensor(list(bias), dtype=torch.int64, device=x.device)
        values = [-math.inf if value <= BAN else value for value in bias.values()]
        _put(x, ids, x[ids].double() + torch.tensor(values, dtype=torch.float64, device=x.device))
    if generated < p.min_tokens:
        x[[token for token in row.stop_ids if token < x.shape[0]]] = -math.inf
    return x


def _put(x: Tensor, ids: Tensor, values: Tensor) -> None:
    x[ids] = values.clamp(max=_LARGEST).float()  # a tiny penalty must not make a +inf; -inf stays a ban
