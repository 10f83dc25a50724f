"""Tables of positions against transformers, for every kind and both spellings of a config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanoserve.core.errors import CheckpointError
from nanoserve.models.families import model_config
from nanoserve.models.rope import rope_tables
from reference.variants import ROPES, SIZES

CPU = torch.device("cpu")
FIELDS = {**SIZES, "model_type": "llama", "head_dim": 12}


def nested(rope: dict[str, Any]) -> dict[str, Any]:
    return {**FIELDS, "rope_parameters": dict(rope)}


def nested_old_word(rope: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in rope.items() if key != "rope_type"}
    return {**FIELDS, "rope_parameters": {**numbers, "type": rope["rope_type"]}}


def beside(rope: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {**FIELDS, "rope_theta": rope["rope_theta"], "rope_scaling": numbers, "rope_parameters": None}


def beside_old_word(rope: dict[str, Any]) -> dict[str, Any]:
    raw = beside(rope)
    raw["rope_scaling"]["type"] = raw["rope_scaling"].pop("rope_type")
    return raw


def original_outside(rope: dict[str, Any]) -> dict[str, Any]:
    raw = beside(rope)
    if "original_max_position_embeddings" in rope:
        raw["original_max_position_embeddings"] = raw["rope_scaling"].pop("original_max_position_embeddings")
    return raw


SPELLINGS = [nested, nested_old_word, beside, beside_old_word, original_outside]
DEFAULT = {"rope_type": "default", "rope_theta": 5e4}


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.__name__)
@pytest.mark.parametrize("kind", ["default", *ROPES])
@pytest.mark.parametrize("max_len", [120, 512])
def test_A41_cos_and_sin_equal_the_reference(kind: str, spelling: Any, max_len: int) -> None:
    """At every position, 0 and 100 and those beyond the original length among them."""
    rope = {**ROPES, "default": DEFAULT}[kind]
    theirs = LlamaRotaryEmbedding(hf.LlamaConfig(**SIZES, head_dim=12, rope_parameters=dict(rope)))
    cos, sin = theirs(torch.zeros(1), torch.arange(max_len)[None])
    found = model_config(spelling(rope)).layers[0].rope
    assert found is not None
    for actual, expected in zip(rope_tables(found, max_len, CPU), (cos[0, :, :6], sin[0, :, :6]), strict=True):
        assert actual.dtype == torch.float32
        assert actual.shape == (max_len, 6)
        # Half a ulp of an angle of 512 radians is 3e-5.
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 if max_len > 128 else 2e-5)


@pytest.mark.parametrize(
    ("kind", "length"),
    [("linear", 128), ("dynamic", 512), ("llama3", 128), ("yarn", 256), ("yarn-all-fields", 192), ("longrope", 128)],
)
def test_A41_the_longest_sequence(kind: str, length: int) -> None:
    assert model_config(nested(ROPES[kind])).max_position_embeddings == length


def test_A41_yarn_stretches_what_the_file_states() -> None:
    """As Qwen2.5's card has it: 32768 positions, times 4."""
    raw = {**FIELDS, "max_position_embeddings": 32768, "rope_theta": 1e6,
           "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}  # fmt: skip
    assert model_config(raw).max_position_embeddings == 131072


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_A41_a_missing_factor_is_an_error(kind: str) -> None:
    rope = {key: value for key, value in ROPES[kind].items() if key != "factor"}
    with pytest.raises(CheckpointError, match=r"rope_parameters\.factor is missing"):
        model_config(nested(rope))


@pytest.mark.parametrize("word", ["type", "rope_type"])
def test_A41_an_unknown_kind_is_an_error_that_lists_the_known(word: str) -> None:
    with pytest.raises(CheckpointError, match=rf"rope_scaling\.{word} is 'ntk-by-parts'; known: .*yarn"):
        model_config({**FIELDS, "rope_scaling": {word: "ntk-by-parts", "factor": 2.0}})


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({**ROPES["longrope"], "long_factor": [1.0] * 5}, "long_factor"),
        ({**ROPES["longrope"], "short_factor": "abc"}, "short_factor"),
        ({**ROPES["longrope"], "original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ({**ROPES["llama3"], "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**ROPES["yarn"], "factor": "4"}, "factor"),
        ({**ROPES["yarn"], "factor": float("inf")}, "factor"),
        ({**ROPES["yarn"], "truncate": 1}, "truncate"),
        ({**ROPES["yarn"], "attention_factor": -1.0}, "attention_factor"),
        ({**ROPES["linear"], "factor": True}, "factor"),
        ({"rope_type": "default", "rope_theta": 1.0}, "rope_theta"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": DEFAULT, "sliding_attention": DEFAULT}, "rope_parameters"),
    ],
)
def test_A41_nonsense_is_named(rope: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError, match=field):
        model_config(nested(rope))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tables_of_one_engine_do_not_depend_on_a_sequence(kind: str) -> None:
    """One choice for all positions, made by the longest sequence served."""
    rope = model_config(nested(ROPES[kind])).layers[0].rope
    assert rope is not None
    long, short = rope_tables(rope, 256, CPU)[0], rope_tables(rope, 12, CPU)[0]
    assert not torch.allclose(long[:12], short)
