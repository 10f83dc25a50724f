"""SamplingParams: how the tokens of one request are chosen. Checked when made, never changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from nanoserve.core.errors import RequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 4096
MAX_LOGIT_BIAS = 1024
BAN = -100.0  # a logit_bias this low is no number to add: the token is never sampled
MAX_INT32 = 2**31 - 1  # of token ids and top_k, which tensors hold
MAX_INT64 = 2**63 - 1  # of counts that the context length bounds further


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Field names and meanings follow the OpenAI API and its common extensions.

    A row is processed in this order: repetition, presence and frequency penalties; logit_bias; min_tokens
    (end tokens masked); temperature; top_k; top_p; min_p; draw. Temperature 0 takes the largest logit after
    the penalties. `logprobs` are the natural log of the model's own distribution, before all of these.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output; the two above over the output alone
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None  # None: as many as the context has room for
    min_tokens: int = 0  # no end token, and no stop string, before this many
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # how many alternatives beside the chosen token; 0: the chosen one alone

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = () if getattr(self, name) is None else getattr(self, name)
            if not isinstance(value, (tuple, list, set, frozenset)):
                _refuse(name, f"must be a list, not {_shown(value)}")
            object.__setattr__(self, name, tuple(value))
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            _refuse("logit_bias", f"must map token ids to numbers, not be {_shown(bias)}")
        object.__setattr__(self, "logit_bias", dict(bias))
        self._check()

    def _check(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, MAX_INT32)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are taken")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, MAX_INT32)
            _number("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_INT64)
        _integer("min_tokens", self.min_tokens, 0, MAX_INT64)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if len(self.stop) > MAX_STOP_STRINGS:
            _refuse("stop", f"has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are taken")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                _refuse("stop", "must hold strings that are not empty")
            if len(text) > MAX_STOP_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
                _refuse("stop", f"holds a string over {MAX_STOP_BYTES} bytes")
            if any("\ud800" <= character <= "\udfff" for character in text):
                _refuse("stop", "holds half of a character (a lone surrogate), which no text contains")
        if len(self.stop_token_ids) > MAX_LOGIT_BIAS:
            _refuse("stop_token_ids", f"has more than {MAX_LOGIT_BIAS} ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, MAX_INT32)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, f"must be true or false, not {_shown(getattr(self, name))}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _refuse(name: str, why: str) -> NoReturn:
    raise RequestError(f"{name} {why}", param=name, code="invalid_value")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(name, f"must be an integer, not {_shown(value)}")
    _within(name, value, low, high, open_low=False)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _refuse(name, f"must be a number, not {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(name, f"must be a finite number, not {value}")
    _within(name, value, low, high, open_low=open_low)


def _within(name: str, value: float, low: float, high: float, *, open_low: bool) -> None:
    if value < low or (open_low and value == low):
        _refuse(name, f"must be {'over' if open_low else 'at least'} {low}, not {_shown(value)}")
    if value > high:
        _refuse(name, f"must be at most {high}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """Short, whatever it is: Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and abs(value) > MAX_INT64:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.40}" if isinstance(value, (str, int, float)) or value is None else f"a {type(value).__name__}"
