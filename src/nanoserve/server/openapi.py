"""The schema behind /docs. `read_body` reads bodies and msgspec writes answers, so it is told of both here."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from nanoserve.server.body import Body

REFERENCE = "#/components/schemas/"


def documented(body: type[Body], answer: type[msgspec.Struct]) -> dict[str, Any]:
    """Arguments for a route's decorator."""

    def json(model: type) -> dict[str, Any]:
        return {"application/json": {"schema": {"$ref": REFERENCE + model.__name__}}}

    return {
        "openapi_extra": {"requestBody": {"required": True, "content": json(body)}},
        "responses": {
            200: {"description": "The answer; with stream, server-sent events of its chunks.", "content": json(answer)},
            "4XX": {"description": "The request cannot be served; `error.param` names the field."},
            "5XX": {"description": "The server cannot serve anything."},
        },
    }


def install(app: FastAPI, bodies: tuple[type[Body], ...], answers: tuple[type[msgspec.Struct], ...]) -> None:
    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, asked = models_json_schema([(body, "validation") for body in bodies], ref_template=REFERENCE + "{model}")
            _, told = msgspec.json.schema_components(answers, ref_template=REFERENCE + "{name}")
            made.setdefault("components", {}).setdefault("schemas", {}).update({**told, **asked.get("$defs", {})})
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]
