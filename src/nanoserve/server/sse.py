"""Server-sent events, and the race that every answer runs against its client hanging up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(message: object) -> bytes:
    """JSON has no bare line break, so one data line holds it."""
    return b"data: %b\n\n" % _encode(message)


class EventStream(Response):
    """Sends what `events` yields. When the client hangs up, `events` and the `source` it draws from are closed at
    once, wherever they are."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[Any, None]):
        # Proxies that buffer would hold tokens back.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.status_code = 200
        self.background = None
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_all() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_gone(receive, send_all())
        except (ClientDisconnect, OSError):
            pass  # nobody listens any more
        finally:
            await self._events.aclose()
            await self._source.aclose()  # `events` does not, if it was not begun


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client hangs up: ClientDisconnect. The request's body must
    have been read."""

    async def hang_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, listening = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, listening):
            task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)
