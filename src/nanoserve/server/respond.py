"""respond: runs requests and gives their Answer, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response

from nanoserve.core.errors import NanoserveError
from nanoserve.core.request import Request
from nanoserve.server.answers import Answer, Usage
from nanoserve.server.errors import describe
from nanoserve.server.front import Front
from nanoserve.server.generation import Generation, Piece
from nanoserve.server.protocol import GenerationBody
from nanoserve.server.sse import DONE, EventStream, event, unless_gone


async def respond(
    http: HttpRequest, front: Front, body: GenerationBody, requests: Sequence[Request], answer: Answer
) -> Response:
    """Headers of a stream are sent after its first token, so that what is refused has a status of its own."""
    generation = Generation(front.engine, front.tokenizer, front.metrics, requests)
    pieces = generation.pieces()
    if body.stream:
        first = await unless_gone(http.receive, _next(pieces))
        return EventStream(_events(generation, pieces, first, answer, body.wants_usage), pieces)
    choices = await unless_gone(http.receive, _collect(pieces))
    whole = answer.whole(choices, Usage.of(generation.usage))
    return Response(msgspec.json.encode(whole), media_type="application/json")


Pieces = AsyncGenerator[list[Piece], None]


async def _next(pieces: Pieces) -> list[Piece] | None:
    return await anext(pieces, None)


async def _collect(pieces: Pieces) -> list[Piece]:
    parts: dict[int, list[Piece]] = {}
    async for batch in pieces:
        for piece in batch:
            parts.setdefault(piece.index, []).append(piece)
    return [Piece.join(parts[index]) for index in sorted(parts)]


async def _events(
    generation: Generation, pieces: Pieces, batch: list[Piece] | None, answer: Answer, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    held: dict[int, Piece] = {}
    try:
        while batch is not None:
            if data := b"".join(event(answer.chunk(piece)) for piece in _speaking(batch, held)):
                yield data
            batch = await anext(pieces, None)
    except NanoserveError as error:
        yield event(describe(error))
        return
    if wants_usage:
        yield event(answer.last_chunk(Usage.of(generation.usage)))
    yield DONE


def _speaking(batch: list[Piece], held: dict[int, Piece]) -> Iterator[Piece]:
    """Pieces with text or an end; the tokens of others are held until there is some."""
    for piece in batch:
        if (before := held.pop(piece.index, None)) is not None:
            piece = Piece.join([before, piece])
        if piece.text or piece.finish is not None:
            yield piece
        else:
            held[piece.index] = piece
