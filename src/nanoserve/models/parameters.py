"""Which tensors a model is made of, and the names a checkpoint has for them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nanoserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Part:
    name: str  # in Hugging Face's spelling
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight of ours, fused from `parts` below each other. Two dimensions: a matrix; one: a vector."""

    name: str  # "embed", "layers.3.qkv", "layers.3.attn_norm", "norm", "head", ...
    parts: tuple[Part, ...]

    @property
    def is_matrix(self) -> bool:
        return len(self.parts[0].shape) == 2


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """All weights of a model, in the order of its forward pass. A tied head is not among them."""
    hidden = config.hidden_size
    embedding = (config.vocab_size, hidden)
    found = [Parameter("embed", (Part("model.embed_tokens.weight", embedding),))]
    for i in range(config.num_layers):
        found += _layer(config, f"layers.{i}", f"model.layers.{i}")
    found.append(Parameter("norm", (Part("model.norm.weight", (hidden,)),)))
    if not config.tie_word_embeddings:
        found.append(Parameter("head", (Part("lm_head.weight", embedding),)))
    return tuple(found)


def num_parameters(config: ModelConfig) -> int:
    """How many numbers the model has; a tied head counts once."""
    return sum(prod(part.shape) for parameter in parameters(config) for part in parameter.parts)


def _layer(config: ModelConfig, ours: str, theirs: str) -> list[Parameter]:
    hidden, ffn, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": hidden,
            "gate_proj": ffn, "up_proj": ffn, "down_proj": hidden}  # fmt: skip

    def norm(name: str, module: str, size: int) -> list[Parameter]:
        return [Parameter(f"{ours}.{name}", (Part(f"{theirs}.{module}.weight", (size,)),))]

    def linear(name: str, module: str, names: tuple[str, ...], columns: int, bias: bool) -> list[Parameter]:
        weights = tuple(Part(f"{theirs}.{module}.{n}.weight", (rows[n], columns)) for n in names)
        biases = tuple(Part(f"{theirs}.{module}.{n}.bias", (rows[n],)) for n in names)
        return [Parameter(f"{ours}.{name}", weights)] + ([Parameter(f"{ours}.{name}_bias", biases)] if bias else [])

    found = norm("attn_norm", "input_layernorm", hidden)
    found += linear("qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), hidden, config.qkv_bias)
    if config.qk_norm:
        found += norm("q_norm", "self_attn.q_norm", head) + norm("k_norm", "self_attn.k_norm", head)
    found += linear("out", "self_attn", ("o_proj",), q, config.out_bias)
    found += norm("ffn_norm", "post_attention_layernorm", hidden)
    found += linear("gate_up", "mlp", ("gate_proj", "up_proj"), hidden, config.mlp_bias)
    return found + linear("down", "mlp", ("down_proj",), ffn, config.mlp_bias)
