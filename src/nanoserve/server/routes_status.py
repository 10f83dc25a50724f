"""GET /health, /version and /metrics"""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import APIRouter, Response

from nanoserve.core.errors import EngineDeadError
from nanoserve.server.front import Front
from nanoserve.server.metrics import CONTENT_TYPE


def routes(front: Front) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """200 if the engine answers, else 503."""
        if front.engine.dead is None:
            try:
                async with asyncio.timeout(front.settings.health_timeout):
                    await front.engine.ping()
            except TimeoutError:
                raise EngineDeadError(f"the engine did not answer in {front.settings.health_timeout} s") from None
        if front.engine.dead is not None:
            raise EngineDeadError(front.engine.dead)
        return {"status": "ok"}

    @router.get("/version")
    async def nanoserve_version() -> dict[str, str]:
        return {"version": version("nanoserve")}

    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus. Wants an API key where the server has any."""
        return Response(front.metrics.render(), media_type=CONTENT_TYPE)

    return router
