"""What the config.json of nearly every decoder says in the same words."""

from __future__ import annotations

from nanoserve.models.config import LayerConfig, ModelConfig
from nanoserve.models.fields import Fields
from nanoserve.models.rope import longest_sequence, rope_config

MOST_LAYERS = 4096


def decoder_config(
    fields: Fields,
    *,
    family: str,
    head_dim: int | None = None,
    theta: float = 10000.0,
    tied: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """A decoder whose layers are alike: RoPE, no window. Arguments are the family's defaults for what its file leaves
    out, and the facts that its file does not state. A family changes the rest with dataclasses.replace."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads, {heads}")
    if fields.has("head_dim") or head_dim is not None:
        head_dim = fields.integer("head_dim", head_dim)
    elif hidden % heads:
        raise fields.error("num_attention_heads", f"is {heads}, which does not divide hidden_size, {hidden}")
    else:
        head_dim = hidden // heads
    fields.word("hidden_act", ("silu",), "silu")
    rope = rope_config(fields, head_dim, theta)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        max_position_embeddings=longest_sequence(rope),
        layers=(LayerConfig(rope=rope),) * fields.integer("num_hidden_layers", at_most=MOST_LAYERS),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        qk_norm=qk_norm,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", tied),
    )


def windows(fields: Fields, window: int | None, default: list[str]) -> list[int | None]:
    """Each layer's sliding window. `default` are the layer types where the file lists none."""
    kinds = fields.sequence("layer_types", len(default), ("full_attention", "sliding_attention"), default)
    return [window if kind == "sliding_attention" else None for kind in kinds]
