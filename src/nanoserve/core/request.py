"""What was asked, and the host's state of answering it. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nanoserve.core.params import SamplingParams


class State(StrEnum):
    WAITING = "waiting"  # holds no row and no blocks
    RUNNING = "running"  # holds a row and the blocks its planned tokens need
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # the model gave no usable distribution for this sequence


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller asked for, in tokens. Never changes."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int  # sampling.max_tokens, or what the context has room for
    stop_ids: frozenset[int] = frozenset()  # ids that end a sequence: the model's EOS ids and stop_token_ids
    priority: int = 0  # smaller goes first
    cache_salt: str = ""  # the prefix cache is shared among equal salts alone


@dataclass(eq=False, kw_only=True, slots=True)
class Sequence:
    """One continuation of a request (there are `sampling.n`). Only the scheduler writes to it."""

    request: Request
    index: int  # which of the n continuations
    seed: int  # of its draws: with the position it decides each draw, whatever else is in the batch
    order: tuple[int, int]  # (priority, arrival): smaller goes first, larger is preempted first
    tokens: list[int]
    state: State = State.WAITING
    finish: FinishReason | None = None
    row: int | None = None
    blocks: list[int] = field(default_factory=list)
    planned: int = 0  # tokens whose KV is computed or on its way
    in_flight: int = 0  # samples on their way: tokens that exist on the device only
    keys: list[bytes] = field(default_factory=list)  # prefix keys, one a whole block of tokens
    published: int = 0  # leading blocks already offered to the prefix cache
    gates: set[str] = field(default_factory=set)  # reasons not to admit yet
    preemptions: int = 0
    cached: int = 0  # prompt tokens found in the prefix cache at the first admission

    @property
    def pending(self) -> int:
        """Tokens that exist, here or on the device, but are not planned yet."""
        return len(self.tokens) + self.in_flight - self.planned

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)
