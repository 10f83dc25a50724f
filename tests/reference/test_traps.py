"""Is parity sensitive? Each of these mistakes about one fact of a config must break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from nanoserve.models.config import ModelConfig
from nanoserve.models.families import model_config
from nanoserve.models.transformer import Transformer
from reference.harness import Run, config_json, error, ours, prefill, random_model, reference_logits
from reference.variants import VARIANTS

IDS = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()
Mutation = Callable[[ModelConfig], ModelConfig]


@dataclass(frozen=True)
class Trap:
    variant: str
    mutate: Mutation


def fact(**changes: Any) -> Mutation:
    return lambda config: replace(config, **changes)


def rope(**changes: Any) -> Mutation:
    return lambda config: replace(
        config,
        layers=tuple(replace(layer, rope=layer.rope and replace(layer.rope, **changes)) for layer in config.layers),
    )


def scaling(**changes: Any) -> Mutation:
    """Other numbers in the scaling; None removes one."""

    def mutate(config: ModelConfig) -> ModelConfig:
        found = config.layers[0].rope
        assert found is not None
        numbers = {**dict(found.scaling), **changes}
        return rope(scaling=tuple((name, n) for name, n in sorted(numbers.items()) if n is not None))(config)

    return mutate


def layers(change: Callable[[int, ModelConfig], dict[str, Any]]) -> Mutation:
    return lambda config: replace(
        config, layers=tuple(replace(layer, **change(i, config)) for i, layer in enumerate(config.layers))
    )


def first_rope(config: ModelConfig) -> Any:
    return next(layer.rope for layer in config.layers if layer.rope is not None)


TRAPS = {
    "theta": Trap("llama", rope(theta=5e5)),
    "theta of another family": Trap("smollm3", rope(theta=1e4)),
    "epsilon": Trap("llama", fact(rms_norm_eps=1e-6)),
    "heads split otherwise": Trap(
        "llama", lambda c: rope(dim=6)(replace(c, num_attention_heads=8, num_key_value_heads=4, head_dim=6))
    ),
    "half of a head rotated": Trap("llama", rope(dim=6)),
    "no rotation": Trap("llama", layers(lambda i, c: {"rope": None})),
    "tied": Trap("llama", fact(tie_word_embeddings=True)),
    "no bias on q, k, v": Trap("qwen2", fact(qkv_bias=False)),
    "no bias on the output": Trap("llama-tied-biases", fact(out_bias=False)),
    "no bias in the feed-forward": Trap("llama-tied-biases", fact(mlp_bias=False)),
    "no norm on q and k": Trap("qwen3", fact(qk_norm=False)),
    "no window": Trap("mistral-window", layers(lambda i, c: {"window": None})),
    "window one longer": Trap("mistral-window", layers(lambda i, c: {"window": 8})),
    "window one shorter": Trap("mistral-window", layers(lambda i, c: {"window": 6})),
    "window everywhere": Trap("qwen2-window", layers(lambda i, c: {"window": 9})),
    "window in the other layers": Trap(
        "qwen3-window-bias", layers(lambda i, c: {"window": None if c.layers[i].window else 5})
    ),
    "positions everywhere": Trap("smollm3", layers(lambda i, c: {"rope": first_rope(c)})),
    "positions in the other layers": Trap(
        "smollm3-listed", layers(lambda i, c: {"rope": None if c.layers[i].rope else first_rope(c)})
    ),
    "linear taken for plain": Trap("llama-linear", rope(kind="default")),
    "llama3 taken for plain": Trap("llama-llama3", rope(kind="default")),
    "yarn taken for linear": Trap("llama-yarn", rope(kind="linear")),
    "longrope taken for plain": Trap("llama-longrope", rope(kind="default")),
    "linear factor": Trap("llama-linear", scaling(factor=3.0)),
    "llama3 low frequencies": Trap("llama-llama3", scaling(low_freq_factor=2.0)),
    "llama3 high frequencies": Trap("llama-llama3", scaling(high_freq_factor=3.0)),
    "llama3 original length": Trap("llama-llama3", scaling(original_max_position_embeddings=128)),
    "yarn original length": Trap("llama-yarn", scaling(original_max_position_embeddings=128)),
    "yarn without attention factor": Trap("llama-yarn", scaling(attention_factor=1.0)),
    "yarn attention factor dropped": Trap("llama-yarn-attention-factor", scaling(attention_factor=None)),
    "yarn mscale dropped": Trap("llama-yarn-all-fields", scaling(mscale=None)),
    "yarn truncated": Trap("llama-yarn-all-fields", scaling(truncate=True)),
    "yarn beta_fast": Trap("llama-yarn-all-fields", scaling(beta_fast=32.0)),
    "yarn beta_slow": Trap("llama-yarn-all-fields", scaling(beta_slow=1.0)),
    "longrope attention factor dropped": Trap("llama-longrope-attention-factor", scaling(attention_factor=None)),
    "longrope factor dropped": Trap("llama-longrope-short", scaling(factor=None)),
    "longrope short for long": Trap("llama-longrope", scaling(original_max_position_embeddings=128)),
    "dynamic not stretched": Trap("llama-dynamic-stretched", rope(kind="default")),
}


def rel(variant: str, change: Callable[[Transformer], None] = lambda model: None, mutate: Mutation = replace) -> float:
    stretched = variant == "llama-dynamic-stretched"
    config = VARIANTS["llama-dynamic" if stretched else variant]()
    if stretched:
        config.max_position_embeddings = 20
    theirs = random_model(config)
    model = ours(mutate(model_config(config_json(config))), theirs.state_dict(), len(IDS))
    change(model)
    return error(prefill(Run(model, len(IDS)), IDS, [16]), reference_logits(theirs, IDS))


@pytest.mark.parametrize("variant", sorted({trap.variant for trap in TRAPS.values()}))
def test_without_a_mistake_there_is_parity(variant: str) -> None:
    assert rel(variant) <= 1e-5


@pytest.mark.parametrize("name", TRAPS)
def test_a_mistake_breaks_parity(name: str) -> None:
    assert rel(TRAPS[name].variant, mutate=TRAPS[name].mutate) > 1e-3


def test_another_scale_breaks_parity() -> None:
    def unscaled(model: Transformer) -> None:
        model.layers = [replace(layer, spec=replace(layer.spec, scale=48**-0.5)) for layer in model.layers]

    assert rel("llama", change=unscaled) > 1e-3


def test_positions_off_by_one_break_parity() -> None:
    """Rotations tell distances alone, so an offset of all positions changes nothing: it must begin within a row."""
    config = VARIANTS["llama"]()
    theirs = random_model(config)
    model = ours(model_config(config_json(config)), theirs.state_dict(), 64)
    run = Run(model, 64)
    prefill(run, IDS[:20], [20])
    cos, sin = model.tables[0]
    model.tables = [(cos.roll(-1, 0), sin.roll(-1, 0))]
    assert error(prefill(run, IDS[20:], [20]), reference_logits(theirs, IDS)[20:]) > 1e-3
