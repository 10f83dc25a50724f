"""Rotary positions: RopeConfig from a checkpoint's config, and the tables of cos and sin that it means.

`dynamic` and `longrope` are defined by the length of the sequence at hand. Here that choice is made once, from the
longest sequence the engine serves, since what a request gets must not depend on its neighbours, its chunks, or on how
far it has come: keys already cached cannot be rotated again. Sources: RoPE arXiv:2104.09864, YaRN arXiv:2309.00071,
LongRoPE arXiv:2402.13753; `dynamic` is the NTK-aware stretch of theta, `llama3` that of Llama 3.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanoserve.models.config import RopeConfig
from nanoserve.models.fields import Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_config(config: Fields, dim: int, default_theta: float = 10000.0) -> RopeConfig:
    """`dim`: rotated channels of a head. Reads both spellings: `rope_parameters` with everything in it, and
    `rope_scaling` beside `rope_theta`."""
    name = "rope_scaling" if config.has("rope_scaling") else "rope_parameters"
    raw = config.raw.get(name) or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise config.error(name, "is not one flat set of numbers for all layers")
    nested = Fields(raw, inside=f"{name}.")
    kind = nested.word("rope_type" if nested.has("rope_type") else "type", KINDS, "default")
    theta = nested.number("rope_theta", config.number("rope_theta", default_theta))
    for fields in (config, nested):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("partial_rotary_factor", "is not 1: this family rotates whole heads")
    if dim % 2:
        raise config.error("head_dim", f"is {dim}: an odd number of channels cannot be rotated")
    if dim < 4 and kind == "dynamic":
        raise config.error("head_dim", f"is {dim}: too few channels for {kind} positions")
    if theta <= 1:
        raise nested.error("rope_theta", f"is {theta}, not over 1")

    longest = config.integer("max_position_embeddings")
    scaling: dict[str, float | tuple[float, ...] | bool] = {}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        scaling["factor"] = nested.number("factor")
    if kind in ("llama3", "yarn", "longrope"):
        outer = config if config.has("original_max_position_embeddings") else nested
        scaling["original_max_position_embeddings"] = outer.integer("original_max_position_embeddings", longest)
        if kind == "longrope" and scaling["original_max_position_embeddings"] == 1:
            raise outer.error("original_max_position_embeddings", "is 1, which has no logarithm to scale by")
    if kind == "llama3":
        low, high = nested.number("low_freq_factor"), nested.number("high_freq_factor")
        if high <= low:
            raise nested.error("high_freq_factor", f"is {high}, not over low_freq_factor, {low}")
        scaling["low_freq_factor"], scaling["high_freq_factor"] = low, high
    if kind == "yarn":
        scaling["truncate"] = nested.boolean("truncate", True)
        for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if nested.raw.get(key):  # 0 is "not given"
                scaling[key] = nested.number(key)
    if kind == "longrope":
        scaling["short_factor"] = nested.numbers("short_factor", dim // 2)
        scaling["long_factor"] = nested.numbers("long_factor", dim // 2)
        if nested.has("factor"):
            scaling["factor"] = nested.number("factor")
    if kind in ("yarn", "longrope") and nested.has("attention_factor"):
        scaling["attention_factor"] = nested.number("attention_factor")
    return RopeConfig(
        theta=theta, dim=dim, kind=kind, scaling=tuple(sorted(scaling.items())), max_position_embeddings=longest
    )


def longest_sequence(rope: RopeConfig) -> int:
    """Tokens that the positions reach. `dynamic` and `yarn` state the length before their stretch; the others state
    what they were trained for with it."""
    s, stated = _numbers(rope), rope.max_position_embeddings
    match rope.kind:
        case "dynamic":
            return max(stated, int(stated * s["factor"]))
        case "yarn":
            return max(stated, int(s["original_max_position_embeddings"] * s["factor"]))
    return stated


def rope_tables(rope: RopeConfig, max_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, dim/2], for sequences of at most `max_len` tokens."""
    inverse, scale = frequencies(rope, max_len)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse
    return (angles.cos() * scale).to(device), (angles.sin() * scale).to(device)


def frequencies(rope: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Radians a position of each channel pair, float32 [dim/2], and the factor on cos and sin."""
    s, dim, theta = _numbers(rope), rope.dim, rope.theta
    factor = s.get("factor", 1.0)
    original = s.get("original_max_position_embeddings", rope.max_position_embeddings)
    if rope.kind == "dynamic" and max_len > original:
        theta *= (factor * max_len / original - (factor - 1)) ** (dim / (dim - 2))
    wavelengths = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)  # over 2 pi
    plain = 1.0 / wavelengths
    match rope.kind:
        case "linear":
            return plain / factor, 1.0
        case "llama3":
            turns = original * plain / (2 * math.pi)  # within the original length
            keep = ((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])).clamp(0, 1)
            return plain * keep + plain / factor * (1 - keep), 1.0
        case "yarn":
            keep = _yarn_keep(s, dim, theta)
            return plain * keep + plain / factor * (1 - keep), _yarn_scale(s)
        case "longrope":
            divisors = dict(rope.scaling)["long_factor" if max_len > original else "short_factor"]
            return 1.0 / (torch.tensor(divisors) * wavelengths), _longrope_scale(s, rope.max_position_embeddings)
    return plain, 1.0


def _yarn_keep(s: dict[str, float], dim: int, theta: float) -> Tensor:
    """1 for channel pairs that turn often enough to keep their frequency, 0 for those to stretch; [dim/2]."""

    def channel(turns: float) -> float:  # the pair that makes so many turns within the original length
        return dim * math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(s.get("beta_fast", 32.0)), channel(s.get("beta_slow", 1.0))
    if s["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    return 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _yarn_scale(s: dict[str, float]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(s["factor"]) + 1.0 if s["factor"] > 1 else 1.0

    if "attention_factor" in s:
        return s["attention_factor"]
    if "mscale" in s and "mscale_all_dim" in s:
        return mscale(s["mscale"]) / mscale(s["mscale_all_dim"])
    return mscale(1.0)


def _longrope_scale(s: dict[str, float], stated: int) -> float:
    if "attention_factor" in s:
        return s["attention_factor"]
    original = s["original_max_position_embeddings"]
    factor = s.get("factor", stated / original)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _numbers(rope: RopeConfig) -> dict[str, float]:
    return {name: value for name, value in rope.scaling if not isinstance(value, tuple)}
