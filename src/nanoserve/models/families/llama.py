"""Llama 2 and 3.x, and what shares their architecture under their name: SmolLM, SmolLM2, TinyLlama, Yi."""

from __future__ import annotations

from nanoserve.models.config import ModelConfig
from nanoserve.models.decoder import decoder_config
from nanoserve.models.fields import Fields


def llama(fields: Fields) -> ModelConfig:
    return decoder_config(
        fields,
        family="llama",
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )
