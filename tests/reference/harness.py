"""Runs a Transformer by hand, without scheduler and runner: a paged pool of shuffled blocks that is NaN where nothing
is written, and steps that mix rows and chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import torch
import transformers
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionMeta, KVPool
from nanoserve.attention.sdpa import SdpaAttention
from nanoserve.models.config import ModelConfig
from nanoserve.models.parameters import parameters
from nanoserve.models.transformer import Transformer
from nanoserve.ops.reference import reference_ops
from nanoserve.quant.weight import DenseMatrix, Matrix

CPU = torch.device("cpu")


# Standard deviations over 1/sqrt(inputs), and means of norms: loud enough that outputs do not fall into repeating one
# token, quiet enough that rounding stays small through all layers.
GAINS = {"q_proj": 1.4, "k_proj": 1.4, "o_proj": 3.0, "down_proj": 6.0, "q_norm": 1.5, "k_norm": 1.5}


def random_model(config: transformers.PretrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """A reference model in float32 whose every weight matters, norms and biases too."""
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            module = name.split(".")[-2]
            gain, noise = GAINS.get(module, 1.0), torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise * (gain / weight.shape[1] ** 0.5))
            else:
                weight.copy_(noise * 0.15 + gain if "norm" in module else noise * 0.3)
    return model


def config_json(config: transformers.PretrainedConfig) -> dict[str, Any]:
    """What save_pretrained would write."""
    return json.loads(config.to_json_string(use_diff=True)) | {"model_type": config.model_type}


def weights_of(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Matrix | Tensor]:
    found: dict[str, Matrix | Tensor] = {}
    for parameter in parameters(config):
        fused = torch.cat([state[part.name].detach() for part in parameter.parts])
        assert fused.shape[0] == sum(part.shape[0] for part in parameter.parts)
        found[parameter.name] = DenseMatrix(fused) if parameter.is_matrix else fused
    return found


def ours(
    config: ModelConfig,
    state: dict[str, Tensor],
    max_len: int,
    attention: AttentionBackend | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    weights = weights_of(state, config)
    return Transformer(config, weights, reference_ops(), attention or SdpaAttention(), max_len, CPU, dtype)


class Run:
    """Some rows of at most `max_len` tokens."""

    def __init__(self, model: Transformer, max_len: int, rows: int = 1, block_size: int = 4, seed: int = 0):
        config, blocks = model.config, -(-max_len // block_size)
        self.model = model
        self.block_size = block_size
        self.pool = KVPool(config.num_layers, rows * blocks + 2, block_size, config.num_key_value_heads,
                           config.head_dim, model.dtype, CPU)  # fmt: skip
        self.pool.keys.fill_(torch.nan)
        self.pool.values.fill_(torch.nan)
        order = torch.randperm(rows * blocks + 2, generator=torch.Generator().manual_seed(seed))
        self.table = order[: rows * blocks].view(rows, blocks).int()
        self.length = [0] * rows

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """(row, its next tokens) each -> the logits after each of these tokens, [count, vocab] a row."""
        rows = [row for row, _ in work]
        counts = torch.tensor([len(tokens) for _, tokens in work])
        positions = torch.cat([self.length[row] + torch.arange(len(tokens)) for row, tokens in work])
        of_token = torch.tensor(rows).repeat_interleave(counts)
        block = self.table.long()[of_token, positions // self.block_size]
        for row, tokens in work:
            self.length[row] += len(tokens)
        lengths = torch.tensor([self.length[row] for row in rows])
        longest = int(lengths.max())
        meta = AttentionMeta(
            query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
            lengths=lengths.int(),
            block_table=self.table[rows, : -(-longest // self.block_size)],
            slots=block * self.block_size + positions % self.block_size,
            max_query=int(counts.max()),
            max_length=longest,
        )
        ids = torch.tensor(list(chain.from_iterable(tokens for _, tokens in work)))
        hidden = self.model.forward(ids, positions, meta, self.pool)
        return list(self.model.logits(hidden).split(counts.tolist()))


def prefill(run: Run, ids: Sequence[int], chunks: Sequence[int], row: int = 0) -> Tensor:
    """Logits after each of `ids`, [len(ids), vocab], computed in chunks; the last size repeats."""
    found, sizes, at = [], chain(chunks, repeat(chunks[-1])), 0
    while at < len(ids):
        size = next(sizes)
        found += run.step([(row, ids[at : at + size])])
        at += size
    return torch.cat(found)


def greedy(run: Run, prompt: Sequence[int], count: int, chunks: Sequence[int]) -> tuple[list[int], Tensor]:
    """`count` tokens, and the logits after the prompt and each of them."""
    logits = prefill(run, prompt, chunks)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(logits[-1].argmax()))
        logits = torch.cat((logits, *run.step([(0, tokens[-1:])])))
    return tokens, logits


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(ids)])).logits[0]


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest logit. NaN counts as infinite."""
    assert actual.shape == expected.shape
    return float(((actual - expected).abs().max() / expected.abs().max()).nan_to_num(torch.inf))
