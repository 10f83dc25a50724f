"""Generation: runs the requests of one call and yields what each choice gained. It knows ids and text, no JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

import msgspec

from nanoserve.core.errors import EngineDeadError, NanoserveError
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.request import FinishReason, Request
from nanoserve.engine.client import AsyncEngine
from nanoserve.engine.messages import Update
from nanoserve.server.errors import HttpError
from nanoserve.server.metrics import Metrics
from nanoserve.text.stream import TextStream
from nanoserve.text.tokenizer import Tokenizer


class Piece(msgspec.Struct):
    """What one choice gained. Text may lag behind tokens: half characters and half stop strings are held back."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    offsets: tuple[int, ...]  # for each token: characters that were whole before it
    finish: FinishReason | None = None
    stop: str | int | None = None  # the stop string, or the id of the end token, that ended it

    @classmethod
    def join(cls, pieces: Sequence[Piece]) -> Piece:
        """Pieces of one choice, in order."""
        last = pieces[-1]
        return cls(
            last.index,
            "".join(piece.text for piece in pieces),
            tuple(token for piece in pieces for token in piece.tokens),
            tuple(entry for piece in pieces for entry in piece.logprobs),
            tuple(offset for piece in pieces for offset in piece.offsets),
            last.finish,
            last.stop,
        )


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class _Choice:
    """One sequence of one request, on its way."""

    __slots__ = ("first", "generated", "last", "request", "sequence", "stream")

    def __init__(self, request: Request, sequence: int, tokenizer: Tokenizer):
        self.request = request
        self.sequence = sequence
        self.stream = TextStream(tokenizer, request.prompt, request.sampling)
        self.generated = 0
        self.first = self.last = 0.0  # times of the first and the last token


class Generation:
    """Choices are numbered through: prompt 0 has the first n, prompt 1 the next n, and so on."""

    def __init__(self, engine: AsyncEngine, tokenizer: Tokenizer, metrics: Metrics, requests: Sequence[Request]):
        self.requests = requests
        self._engine = engine
        self._metrics = metrics
        self._arrival = time.perf_counter()
        self._cached = [0] * len(requests)
        self._completion_tokens = 0
        self._n = requests[0].sampling.n
        self._open = {
            number * self._n + sequence: _Choice(request, sequence, tokenizer)
            for number, request in enumerate(requests)
            for sequence in range(self._n)
        }

    @property
    def usage(self) -> Usage:
        prompt = sum(len(request.prompt) for request in self.requests)
        return Usage(prompt, self._completion_tokens, sum(self._cached))

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """All that arrived since the last pull, one piece a choice. Raises what the engine raises. Closing it, or
        cancelling a pull, aborts what still runs."""
        news: list[tuple[int, Update]] = []
        wake = asyncio.Event()

        async def listen(number: int, request: Request) -> None:
            async with aclosing(cast("AsyncGenerator[Update, None]", self._engine.generate(request))) as updates:
                async for update in updates:
                    news.append((number, update))
                    wake.set()

        tasks = [asyncio.create_task(listen(number, request)) for number, request in enumerate(self.requests)]
        for task in tasks:
            task.add_done_callback(lambda _: wake.set())
        try:
            while self._open:
                await wake.wait()
                wake.clear()
                arrived = news.copy()
                news.clear()
                if pieces := self._take(arrived):
                    yield pieces
                for task in tasks:
                    if task.done() and (error := task.exception()):
                        raise error
                if self._open and not news and all(task.done() for task in tasks):
                    raise EngineDeadError("the engine ended a request without a reason")
        except NanoserveError:
            self._lose("error")
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._lose("abort")

    def _take(self, arrived: list[tuple[int, Update]]) -> list[Piece]:
        now = time.perf_counter()
        merged: dict[int, list[Update]] = {}
        for number, update in arrived:
            self._cached[number] = max(self._cached[number], update.cached_tokens)
            merged.setdefault(number * self._n + update.index, []).append(update)
        return [
            self._advance(index, choice, updates, now)
            for index, updates in merged.items()
            if (choice := self._open.get(index))  # else it hit a stop string before: the engine had not heard yet
        ]

    def _advance(self, index: int, choice: _Choice, updates: list[Update], now: float) -> Piece:
        last = updates[-1]
        if last.finish in _FAILURES:
            raise HttpError(*_FAILURES[last.finish])
        tokens, logprobs = last.tokens, last.logprobs
        if len(updates) > 1:
            tokens = tuple(token for update in updates for token in update.tokens)
            logprobs = tuple(entry for update in updates for entry in update.logprobs)
        delta = choice.stream.push(tokens, last.finish, last.stop_id)
        if delta.tokens:
            self._time(choice, updates[0], len(delta.tokens), now)
        if delta.finish is not None:
            del self._open[index]
            if last.finish is None:
                self._engine.abort(choice.request.id, choice.sequence)
            self._metrics.ended(delta.finish, now - self._arrival, now - choice.first, choice.generated)
        logprobs = logprobs[: len(delta.tokens)]
        return Piece(index, delta.text, delta.tokens, logprobs, delta.offsets, delta.finish, delta.stop)

    def _time(self, choice: _Choice, first: Update, count: int, now: float) -> None:
        if choice.generated:
            self._metrics.continued((now - choice.last) / count, count)
        else:
            choice.first = now
            if choice.sequence == 0:
                self._metrics.began(now - self._arrival, first.queued_seconds, len(choice.request.prompt))
        choice.last = now
        choice.generated += count
        self._completion_tokens += count

    def _lose(self, reason: str) -> None:
        for _ in range(len(self._open)):
            self._metrics.lost(reason)
        self._open.clear()


_FAILURES = {
    FinishReason.ERROR: (500, "The model gave no usable distribution for this request."),
    FinishReason.ABORT: (503, "The engine ended this request."),
}
