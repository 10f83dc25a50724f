"""What crosses the border between the front (HTTP, text) and the engine. Plain data, encoded with msgpack."""

from __future__ import annotations

import msgspec

from nanoserve.core.config import Decision
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.request import FinishReason, Request


class Add(msgspec.Struct, tag=True, frozen=True):
    request: Request


class Abort(msgspec.Struct, tag=True, frozen=True):
    request_id: str
    index: int | None = None  # one continuation; None: all


class Ping(msgspec.Struct, tag=True, frozen=True):
    number: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the engine process."""


Command = Add | Abort | Ping | Stop


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself once it can serve."""

    model: str  # path of the checkpoint
    family: str
    vocab_size: int  # ids at or over it do not exist for the model
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    sampling_defaults: dict[str, int | float]  # of SamplingParams, where a request leaves them open
    num_blocks: int
    block_size: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    decisions: tuple[Decision, ...]
    seconds: dict[str, float]  # how long each part of the start took


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges as of now, counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of blocks that are held, 0 to 1
    prefix_cache_queries: int = 0  # in tokens
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    step_tokens: int = 0  # tokens computed over all steps


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """News of one sequence."""

    request_id: str
    index: int = 0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token where asked for
    finish: FinishReason | None = None
    stop_id: int | None = None  # the end token, last of `tokens`, when finish is "stop"
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queued_seconds: float = 0.0  # from arrival to first admission; set with the first token


class Ready(msgspec.Struct, tag=True, frozen=True):
    info: EngineInfo


class Progress(msgspec.Struct, tag=True, frozen=True):
    """A part of the start: `done` of `total` (total 0: unknown)."""

    what: str
    done: int
    total: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A RequestError of the engine's, for the caller of one request."""

    request_id: str
    message: str
    param: str | None
    code: str | None
    status: int


class News(msgspec.Struct, tag=True, frozen=True):
    updates: list[Update]
    stats: EngineStats


class Pong(msgspec.Struct, tag=True, frozen=True):
    number: int
    stats: EngineStats


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine ends; `kind` is the error class's name."""

    kind: str
    message: str


Report = Ready | Progress | Refused | News | Pong | Failed
