"""SmolLM3: Llama with layers that have no positions (NoPE), every fourth by default."""

from __future__ import annotations

from dataclasses import replace

from nanoserve.models.config import ModelConfig
from nanoserve.models.decoder import decoder_config, windows
from nanoserve.models.fields import Fields


def smollm3(fields: Fields) -> ModelConfig:
    config = decoder_config(
        fields,
        family="smollm3",
        theta=2e6,
        tied=True,
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )
    layers = config.num_layers
    interval = fields.integer("no_rope_layer_interval", 4)
    # The field's 1 means "has RoPE", whatever its name says.
    default = [int((i + 1) % interval != 0) for i in range(layers)]
    rotated = fields.sequence("no_rope_layers", layers, (0, 1), default)

    window = None
    if fields.boolean("use_sliding_window", False) and fields.has("sliding_window"):
        window = fields.integer("sliding_window")
    kinds = ["full_attention" if has_rope or window is None else "sliding_attention" for has_rope in rotated]
    sees = windows(fields, window, kinds)
    return replace(
        config,
        layers=tuple(
            replace(layer, rope=layer.rope if rotated[i] else None, window=sees[i])
            for i, layer in enumerate(config.layers)
        ),
    )
