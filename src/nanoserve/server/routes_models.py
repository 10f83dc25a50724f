"""GET /v1/models and /v1/models/{name}"""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Response

from nanoserve.server.front import Front


class Model(msgspec.Struct):
    id: str
    created: int
    root: str  # the name of the model that all names mean
    max_model_len: int
    object: str = "model"
    owned_by: str = "nanoserve"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: str = "list"


def routes(front: Front) -> APIRouter:
    router = APIRouter()
    created = int(time.time())

    def model(name: str) -> Model:
        return Model(name, created, front.names[0], front.info.max_model_len)

    @router.get("/v1/models")
    async def models() -> Response:
        """The names that the model goes by."""
        answer = ModelList([model(name) for name in front.names])
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        answer = model(front.model_name(name))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
