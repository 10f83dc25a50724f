"""What a checkpoint says about generating from it: the tokens that end an answer, and how to sample by default."""

from __future__ import annotations

from typing import Any

from nanoserve.core.errors import CheckpointError, RequestError
from nanoserve.core.params import SamplingParams
from nanoserve.loading.checkpoint import Checkpoint

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """The generation config's sampling, under the names of SamplingParams. Raises CheckpointError for values that
    no request could have."""
    found = {name: checkpoint.generation_config.get(name) for name in SAMPLING}
    defaults = {name: value for name, value in found.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise CheckpointError(f"{checkpoint.path}: generation config: {error}") from error
    return defaults


def eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Ids that end an answer: the generation config's and the config's, which do not always agree."""
    vocab_size = checkpoint.config.get("vocab_size")
    found: dict[int, None] = {}
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            valid = isinstance(token, int) and not isinstance(token, bool) and token >= 0
            if not valid or (isinstance(vocab_size, int) and token >= vocab_size):
                raise CheckpointError(f"{checkpoint.path}: eos_token_id {token!r:.60} is not a token of {vocab_size}")
            found[token] = None
    return tuple(found)
