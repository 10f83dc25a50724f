"""Flags of SamplingParams."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from nanoserve.cli.flags import add_flag, given
from nanoserve.core.params import SamplingParams

HELP = {
    "n": "how many continuations",
    "temperature": "0 takes the likeliest token, higher is more varied",
    "top_p": "draw from the likeliest tokens that have this share together",
    "top_k": "draw from this many of the likeliest tokens; 0: no limit",
    "min_p": "draw from tokens with at least this share of the likeliest one's probability",
    "presence_penalty": "taken off tokens that the output has",
    "frequency_penalty": "taken off tokens for each time that the output has them",
    "repetition_penalty": "divides tokens that prompt or output have; 1: none",
    "logit_bias": "added to a token's logit",
    "max_tokens": "most tokens to generate; without a default: what the context has room for",
    "min_tokens": "no end before this many tokens",
    "stop": "text that ends the output",
    "stop_token_ids": "token that ends the output",
    "include_stop_str_in_output": "keep the text that ended the output",
    "ignore_eos": "go on past the model's end token",
    "skip_special_tokens": "leave control tokens out of the text",
}
NO_FLAG = ("seed", "logprobs")  # --seed is the engine's, and seeds what has no own; logprobs have no place in a text


def add_sampling(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = (), **defaults: Any) -> None:
    """`defaults`: where this command's differ from SamplingParams'."""
    title = "sampling (without a flag: the model's own, or else the default)"
    group, hints = parser.add_argument_group(title), get_type_hints(SamplingParams)
    for f in fields(SamplingParams):
        if f.name not in (*NO_FLAG, *skip):
            add_flag(group, f, hints[f.name], HELP[f.name], defaults.get(f.name, f.default))
    parser.set_defaults(sampling_defaults=defaults)


def sampling_params(arguments: argparse.Namespace, recommended: Mapping[str, Any] | None = None) -> SamplingParams:
    """`recommended`: the model's own defaults. Raises RequestError for values that make no sense."""
    asked = given(arguments, SamplingParams)
    asked.pop("seed", None)  # the engine's flag
    if "logit_bias" in asked:
        asked["logit_bias"] = dict(asked["logit_bias"])
    return SamplingParams(**{**(recommended or {}), **arguments.sampling_defaults, **asked})
