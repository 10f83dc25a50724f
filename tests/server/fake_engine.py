"""A scripted AsyncEngine: says given tokens to every request; refuses, dies or stalls where it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from nanoserve.core.errors import EngineDeadError, RequestError
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.request import FinishReason, Request
from nanoserve.engine.messages import EngineInfo, EngineStats, Update

END = 258  # <|im_end|> of the byte tokenizer


class FakeEngine:
    def __init__(self, *, max_model_len: int = 2048, vocab_size: int = 320):
        self.info = EngineInfo(
            model="/models/toy.gguf", family="llama", vocab_size=vocab_size, max_model_len=max_model_len,
            sampling_defaults={},
            eos_token_ids=(END,), num_blocks=64, block_size=16, num_parameters=1, weight_bytes=1,
            kv_bytes_per_token=1, decisions=(), seconds={},
        )  # fmt: skip
        self.stats = EngineStats()
        self.dead: str | None = None
        self.script: list[int] = [*b"hello", END]
        self.per_update = 1  # tokens in an update
        self.refusal: RequestError | None = None
        self.dies_after: int | None = None  # tokens
        self.stalls_after: int | None = None
        self.fails = False  # the model gives no usable distribution
        self.cached_tokens = 0
        self.requests: list[Request] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.running: set[str] = set()
        self.answers_pings = True

    async def generate(self, request: Request) -> AsyncIterator[Update]:
        if self.dead:
            raise EngineDeadError(self.dead)
        if self.refusal:
            raise self.refusal
        self.requests.append(request)
        self.running.add(request.id)
        live = set(range(request.sampling.n))
        try:
            done = 0
            while live:
                if self.dies_after is not None and done >= self.dies_after:
                    self.dead = "scripted"
                    raise EngineDeadError(self.dead)
                if self.stalls_after is not None and done >= self.stalls_after:
                    await asyncio.Event().wait()
                for index in sorted(live):
                    if (request.id, index) in self.aborted:
                        update = Update(request_id=request.id, index=index, finish=FinishReason.ABORT)
                    else:
                        update = self._say(request, index, done)
                    if update.finish is not None:
                        live.discard(index)
                    yield update
                done += self.per_update
                await asyncio.sleep(0)
        finally:
            self.running.discard(request.id)
            if live:
                self.abort(request.id)

    def _say(self, request: Request, index: int, done: int) -> Update:
        if self.fails:
            return Update(request_id=request.id, index=index, finish=FinishReason.ERROR)
        tokens: list[int] = []
        finish = stop_id = None
        while len(tokens) < self.per_update and finish is None:
            place = done + len(tokens)
            tokens.append(self.script[place] if place < len(self.script) else ord("."))
            if tokens[-1] in request.stop_ids and place + 1 > request.sampling.min_tokens:
                finish, stop_id = FinishReason.STOP, tokens[-1]
            elif place + 1 == request.max_tokens:
                finish = FinishReason.LENGTH
        top = request.sampling.logprobs
        logprobs = () if top is None else tuple(_logprobs(token, top) for token in tokens)
        return Update(
            request_id=request.id, index=index, tokens=tuple(tokens), logprobs=logprobs, finish=finish,
            stop_id=stop_id, cached_tokens=self.cached_tokens, queued_seconds=0.0 if done else 0.25,
        )  # fmt: skip

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))

    async def ping(self) -> None:
        if self.dead:
            raise EngineDeadError(self.dead)
        if not self.answers_pings:
            await asyncio.Event().wait()

    async def close(self) -> None:
        self.dead = "closed"


def _logprobs(token: int, top: int) -> TokenLogprobs:
    ids = tuple((token + step) % 256 if step else token for step in range(top))
    return TokenLogprobs(-0.5, ids, tuple(-0.5 - step for step in range(top)))
