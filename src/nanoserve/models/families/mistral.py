"""Mistral: Llama without biases, with a sliding window in all layers where the file has not switched it off."""

from __future__ import annotations

from dataclasses import replace

from nanoserve.models.config import ModelConfig
from nanoserve.models.decoder import decoder_config
from nanoserve.models.fields import Fields

WINDOW = 4096  # where the file does not mention one; null means none


def mistral(fields: Fields) -> ModelConfig:
    config = decoder_config(fields, family="mistral")
    if "sliding_window" in fields.raw and not fields.has("sliding_window"):
        return config
    window = fields.integer("sliding_window", WINDOW)
    return replace(config, layers=tuple(replace(layer, window=window) for layer in config.layers))
