"""AsyncEngine: an engine as the front sees it, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from nanoserve.core.request import Request
from nanoserve.engine.messages import EngineInfo, EngineStats, Update


class AsyncEngine(Protocol):
    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> EngineStats: ...  # the latest that was heard
    @property
    def dead(self) -> str | None: ...  # why the engine stopped; None while it lives

    def generate(self, request: Request) -> AsyncIterator[Update]:
        """Updates of all of the request's `sampling.n` sequences, interleaved, until each had one with
        `finish` set. Raises RequestError where the engine refuses it (on the first pull) and EngineDeadError
        where the engine stops. Closing the iterator early aborts what still runs."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences: a last update with finish "abort" follows."""
        ...

    async def ping(self) -> None:
        """Returns when the engine answered; EngineDeadError where it is gone."""
        ...

    async def close(self) -> None: ...
