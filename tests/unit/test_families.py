"""config.json read with suspicion: what is missing or makes no sense is named, what is unknown is listed."""

from __future__ import annotations

from typing import Any

import pytest

from nanoserve.core.errors import CheckpointError
from nanoserve.models.families import KNOWN, model_config

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("family", KNOWN)
def test_the_plain_config_of_each_family(family: str) -> None:
    config = model_config({**GOOD, "model_type": family})
    assert config.family == family
    assert config.num_layers == 2
    assert config.head_dim == (128 if family == "qwen3" else 16)


@pytest.mark.parametrize("raw", [{}, {"model_type": None}])
def test_a_missing_architecture(raw: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="model_type is missing"):
        model_config(raw)


@pytest.mark.parametrize("name", ["gpt2", "", 7, ["llama"]])
def test_an_unknown_architecture_lists_the_known(name: Any) -> None:
    with pytest.raises(CheckpointError, match="llama, mistral, qwen2, qwen3, smollm3"):
        model_config({"model_type": name})


@pytest.mark.parametrize("field", [field for field in GOOD if field not in ("model_type", "num_key_value_heads")])
@pytest.mark.parametrize("value", [None, "64", 0, -4, True, 64.0, 1 << 62, [64]])
def test_nonsense_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"config: {field}"):
        model_config({**GOOD, field: value})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_attention_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"mlp_bias": "false"}, "mlp_bias"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"model_type": "qwen3", "use_sliding_window": 1}, "use_sliding_window"),
        ({"model_type": "qwen3", "max_window_layers": -1}, "max_window_layers"),
    ],
)
def test_facts_that_do_not_fit(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError, match=f"config: {field}"):
        model_config({**GOOD, **changes})


def test_head_dim_is_the_files_own() -> None:
    assert model_config({**GOOD, "head_dim": 20}).head_dim == 20
    assert model_config({**GOOD, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20}).head_dim == 20


def test_null_fields_are_absent_fields() -> None:
    config = model_config({**GOOD, "head_dim": None, "num_key_value_heads": None, "rope_scaling": None})
    assert config.head_dim == 16
    assert config.num_key_value_heads == 4


def test_mistral_without_a_window_says_null() -> None:
    mistral = {**GOOD, "model_type": "mistral"}
    assert [layer.window for layer in model_config(mistral).layers] == [4096, 4096]
    assert [layer.window for layer in model_config({**mistral, "sliding_window": None}).layers] == [None, None]
