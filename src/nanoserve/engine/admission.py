"""make_request: from prompt ids and SamplingParams to a Request, with every check that needs the model's limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nanoserve.core.errors import ContextLengthError, RequestError
from nanoserve.core.params import BAN, SamplingParams
from nanoserve.core.request import Request
from nanoserve.engine.messages import EngineInfo


def make_request(
    info: EngineInfo,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    id: str,
    default_max_tokens: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
    max_tokens_param: str = "max_tokens",
) -> Request:
    """Raises RequestError naming the field. `default_max_tokens` holds where `sampling.max_tokens` is None;
    None means as many as the context has room for."""
    if not prompt:
        raise RequestError("the prompt has no tokens", param="prompt", code="invalid_value")
    limit, length = info.max_model_len, len(prompt)
    room = limit - length
    if room < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens, and the prompt alone has {length}; "
            "at least one token must be left to generate.",
            param="prompt",
        )
    _check_ids(info, "prompt", prompt)
    _check_ids(info, "logit_bias", sampling.logit_bias)
    _check_ids(info, "stop_token_ids", sampling.stop_token_ids)
    wanted = sampling.max_tokens
    if wanted is None:
        wanted = room if default_max_tokens is None else min(default_max_tokens, room)
        if sampling.min_tokens > wanted:
            raise RequestError(
                f"min_tokens {sampling.min_tokens} is more than the {wanted} tokens that may be generated",
                param="min_tokens",
                code="invalid_value",
            )
    if wanted > room:
        raise ContextLengthError(
            f"This model's maximum context length is {limit} tokens. The prompt has {length} tokens and "
            f"{wanted} were requested with {max_tokens_param}: {length + wanted} in all.",
            param=max_tokens_param,
        )
    ends = () if sampling.ignore_eos else info.eos_token_ids
    stop_ids = frozenset((*ends, *sampling.stop_token_ids))
    banned = {token for token, bias in sampling.logit_bias.items() if bias <= BAN}
    banned |= stop_ids if sampling.min_tokens else set()
    if sum(token < info.vocab_size for token in banned) == info.vocab_size:
        raise RequestError(
            f"logit_bias and min_tokens leave none of the model's {info.vocab_size} tokens to choose from",
            param="logit_bias",
            code="invalid_value",
        )
    return Request(
        id=id,
        prompt=tuple(prompt),
        sampling=sampling,
        max_tokens=wanted,
        stop_ids=stop_ids,
        priority=priority,
        cache_salt=cache_salt,
    )


def _check_ids(info: EngineInfo, param: str, ids: Iterable[int]) -> None:
    for token in ids:
        if not 0 <= token < info.vocab_size:
            raise RequestError(
                f"{param} holds token id {token!r:.40}; this model knows 0 to {info.vocab_size - 1}",
                param=param,
                code="invalid_value",
            )
