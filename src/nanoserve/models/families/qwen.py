"""Qwen2, Qwen2.5 (biases on Q, K and V) and Qwen3 (norms on the heads of Q and K)."""

from __future__ import annotations

from dataclasses import replace

from nanoserve.models.config import ModelConfig
from nanoserve.models.decoder import decoder_config, windows
from nanoserve.models.fields import Fields


def qwen2(fields: Fields) -> ModelConfig:
    config = decoder_config(fields, family="qwen2", attention_bias=True)
    return replace(_windowed(config, fields), out_bias=False)


def qwen3(fields: Fields) -> ModelConfig:
    bias = fields.boolean("attention_bias", False)
    return _windowed(
        decoder_config(fields, family="qwen3", head_dim=128, attention_bias=bias, qk_norm=True),
        fields,
    )


def _windowed(config: ModelConfig, fields: Fields) -> ModelConfig:
    """`use_sliding_window` false means none, whatever `sliding_window` and `layer_types` say."""
    window = None
    if fields.boolean("use_sliding_window", False) and (
        "sliding_window" not in fields.raw or fields.has("sliding_window")
    ):
        window = fields.integer("sliding_window", 4096)
    first = fields.raw.get("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.error("max_window_layers", f"is {first!r}, not a number of layers")
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(config.num_layers)]
    sees = windows(fields, window, kinds)
    return replace(config, layers=tuple(replace(layer, window=w) for layer, w in zip(config.layers, sees, strict=True)))
