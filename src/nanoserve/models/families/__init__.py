"""Families: each translates its config.json into ModelConfig, and knows nothing of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoserve.models.config import ModelConfig
from nanoserve.models.fields import Fields

KNOWN = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """`raw`: a config.json. Raises CheckpointError, which names the field at fault and what it holds."""
    fields = Fields(raw)
    match fields.word("model_type", KNOWN):
        case "llama":
            from nanoserve.models.families.llama import llama

            return llama(fields)
        case "mistral":
            from nanoserve.models.families.mistral import mistral

            return mistral(fields)
        case "smollm3":
            from nanoserve.models.families.smollm3 import smollm3

            return smollm3(fields)
        case "qwen2":
            from nanoserve.models.families.qwen import qwen2

            return qwen2(fields)
        case _:
            from nanoserve.models.families.qwen import qwen3

            return qwen3(fields)
