"""The sampler's spec, one row at a time in plain Python: slow, and short enough to be seen right.

Nothing serves from here; the tests compare sampler.py with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float

from nanoserve.core.plan import FAILED_SAMPLE
from nanoserve.sampling.params import RowSampling

LARGEST = (2.0 - 2.0**-23) * 2.0**127  # of float32


def float32(value: float) -> float:
    return c_float(min(value, LARGEST)).value


def stages(logits: Sequence[float], row: RowSampling, tokens: Sequence[int]) -> list[float]:
    """Logits [vocab] after the penalties, the bias and the min_tokens mask. tokens: prompt, then output."""
    p, x = row.params, list(logits)
    output = tokens[row.prompt_length :]
    for token in set(tokens):
        x[token] = float32(x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty)
    for token in set(output):
        x[token] = float32(x[token] - p.presence_penalty - p.frequency_penalty * output.count(token))
    for token, bias in p.logit_bias.items():
        x[token] = -math.inf if bias <= -100.0 else float32(x[token] + bias)
    if len(output) < p.min_tokens:
        for token in row.stop_ids:
            x[token] = -math.inf
    return x


def distribution(x: Sequence[float], row: RowSampling) -> list[float]:
    """The probability of each token, from its logit after the stages. Temperature 0: all on the first largest."""
    p, largest = row.params, max(x)
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if p.greedy:
        return [1.0 if token == order[0] else 0.0 for token in range(len(x))]
    weight = [math.exp((value - largest) / p.temperature) for value in x]
    kept = order[: p.top_k] if p.top_k > 0 else order
    if p.top_p < 1.0:
        whole, running, nucleus = sum(weight[token] for token in kept), 0.0, []
        for token in kept:
            if running < p.top_p * whole:
                nucleus.append(token)
            running += weight[token]
        kept = nucleus
    if p.min_p > 0.0:
        kept = [token for token in kept if weight[token] >= p.min_p]  # the largest weighs 1
    whole = math.fsum(weight[token] for token in kept)
    members = set(kept)
    return [weight[token] / whole if token in members else 0.0 for token in range(len(x))]


def pick(probabilities: Sequence[float], u: float) -> int:
    """The first token, by id, at which the running sum reaches u of the whole."""
    running, last = 0.0, FAILED_SAMPLE
    target = u * sum(probabilities)
    for token, probability in enumerate(probabilities):
        running += probability
        if probability > 0.0:
            last = token
            if running >= target:
                return token
    return last


def sample(logits: Sequence[float], row: RowSampling, tokens: Sequence[int], u: float) -> int:
    """logits: one row, the vocabulary alone; u: the row's uniform number."""
    if not _usable(logits):
        return FAILED_SAMPLE
    x = stages(logits, row, tokens)
    return pick(distribution(x, row), u) if _usable(x) else FAILED_SAMPLE


def logprobs(logits: Sequence[float]) -> list[float]:
    """Natural log of the softmax of the raw logits."""
    largest = max(logits)
    norm = largest + math.log(math.fsum(math.exp(value - largest) for value in logits))
    return [value - norm for value in logits]


def _usable(x: Sequence[float]) -> bool:
    return not any(math.isnan(value) for value in x) and math.isfinite(max(x))
