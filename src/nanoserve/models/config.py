"""ModelConfig: the facts of a decoder in one normal form. Dimensions keep their Hugging Face names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions of a layer."""

    theta: float = 10000.0
    dim: int  # rotated channels of a head; below head_dim it is a partial rotary
    kind: str = "default"  # default, linear, dynamic, llama3, yarn, longrope
    scaling: tuple[tuple[str, float | tuple[float, ...] | bool], ...] = ()  # the checkpoint's numbers, sorted by name
    max_position_embeddings: int  # the length that `kind` stretches from, where `scaling` names none


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    rope: RopeConfig | None  # None: a layer without positions (NoPE)
    window: int | None = None  # sliding window; None: sees everything


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    family: str  # the `model_type` it was read from
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False  # RMSNorm on each head of Q and K before RoPE
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)
