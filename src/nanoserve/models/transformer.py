"""Transformer: the decoder that every family is, assembled from its ModelConfig. It knows tokens and layers; requests,
rows and where keys live are for others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.attention.interface import AttentionBackend, AttentionMeta, AttentionSpec, KVPool
from nanoserve.models.config import ModelConfig, RopeConfig
from nanoserve.models.rope import rope_tables
from nanoserve.ops.table import Ops
from nanoserve.quant.weight import Matrix


@dataclass(frozen=True, slots=True)
class Linear:
    matrix: Matrix
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = self.matrix.matmul(x)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear
    rope: int | None  # which of the model's tables of positions
    spec: AttentionSpec


class Transformer:
    """T tokens of any rows, laid end to end; S of them sample. Call under torch.inference_mode."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Matrix | Tensor],  # by the names of models.parameters
        ops: Ops,
        attention: AttentionBackend,
        max_len: int,  # of any sequence; chooses the tables of positions, see models.rope
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.config = config
        self.ops = ops
        self.attention = attention
        self.dtype = dtype
        self.embed = _matrix(weights, "embed")
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None))
        self.tables = [rope_tables(rope, max_len, device) for rope in ropes]
        self.layers = [_layer(config, weights, i, ropes) for i in range(config.num_layers)]
        self.norm = _vector(weights, "norm")
        self.head = self.embed if config.tie_word_embeddings else _matrix(weights, "head")

    def forward(self, ids: Tensor, positions: Tensor, meta: AttentionMeta, pool: KVPool) -> Tensor:
        """ids and positions: int64 [T]. Writes their KV; returns [T, hidden], normed and ready for `logits`."""
        eps, ops = self.config.rms_norm_eps, self.ops
        step = self.attention.begin(meta, pool)
        angles = [(cos[positions], sin[positions]) for cos, sin in self.tables]
        residual = self.embed.rows(ids).to(self.dtype)
        x = ops.rms_norm(residual, self.layers[0].attn_norm, eps)
        for i, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, x, angles)
            x = layer.out(step.attend(i, q, k, v, layer.spec).flatten(1))
            x, residual = ops.add_rms_norm(x, residual, layer.ffn_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            following = self.layers[i + 1].attn_norm if i + 1 < len(self.layers) else self.norm
            x, residual = ops.add_rms_norm(x, residual, following, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden], rows of what `forward` returned -> float32 [S, vocab]."""
        return self.head.matmul(hidden).float()

    def _heads(self, layer: Layer, x: Tensor, angles: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] -> q [T, H, D], k and v [T, K, D]. Q and K lie side by side, so that one call rotates both."""
        config, ops = self.config, self.ops
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, config.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(qk[:, :heads], layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(qk[:, heads:], layer.k_norm, config.rms_norm_eps)
            qk = torch.cat((q, k), 1)
        if layer.rope is not None:
            qk = ops.rotate(qk, *angles[layer.rope])
        return qk[:, :heads], qk[:, heads:], v


def _layer(config: ModelConfig, weights: Mapping[str, Matrix | Tensor], i: int, ropes: list[RopeConfig]) -> Layer:
    def vector(name: str) -> Tensor:
        return _vector(weights, f"layers.{i}.{name}")

    def linear(name: str, bias: bool) -> Linear:
        return Linear(_matrix(weights, f"layers.{i}.{name}"), vector(f"{name}_bias") if bias else None)

    facts = config.layers[i]
    return Layer(
        attn_norm=vector("attn_norm"),
        qkv=linear("qkv", config.qkv_bias),
        q_norm=vector("q_norm") if config.qk_norm else None,
        k_norm=vector("k_norm") if config.qk_norm else None,
        out=linear("out", config.out_bias),
        ffn_norm=vector("ffn_norm"),
        gate_up=linear("gate_up", config.mlp_bias),
        down=linear("down", config.mlp_bias),
        rope=None if facts.rope is None else ropes.index(facts.rope),
        spec=AttentionSpec(scale=config.head_dim**-0.5, window=facts.window),
    )


def _matrix(weights: Mapping[str, Matrix | Tensor], name: str) -> Matrix:
    weight = weights[name]
    assert not isinstance(weight, Tensor), f"{name} is a vector"
    return weight


def _vector(weights: Mapping[str, Matrix | Tensor], name: str) -> Tensor:
    weight = weights[name]
    assert isinstance(weight, Tensor), f"{name} is a matrix"
    return weight
