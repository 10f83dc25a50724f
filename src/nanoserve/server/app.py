"""create_app: the routes, bound to one engine and one tokenizer. Imports no torch."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from nanoserve.engine.client import AsyncEngine
from nanoserve.server import (
    errors,
    openapi,
    routes_chat,
    routes_completions,
    routes_models,
    routes_status,
    routes_tokens,
)
from nanoserve.server.answers import ChatCompletion, ChatCompletionChunk, Completion
from nanoserve.server.auth import ApiKeys
from nanoserve.server.front import Front
from nanoserve.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from nanoserve.server.request_id import RequestIds
from nanoserve.server.routes_tokens import Detokenized, Tokens
from nanoserve.server.settings import ServerSettings
from nanoserve.text.tokenizer import Tokenizer


def create_app(engine: AsyncEngine, tokenizer: Tokenizer, settings: ServerSettings) -> FastAPI:
    """Raises ConfigError for a setting, and CheckpointError for a chat template, that cannot be used. The app does
    not close the engine."""
    front = Front.of(engine, tokenizer, settings)
    middleware = [Middleware(RequestIds)]
    if settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    if settings.api_key:
        middleware.append(Middleware(ApiKeys, settings.api_key))
    app = FastAPI(
        title="nanoserve",
        version=version("nanoserve"),
        description=f"Serves {front.names[0]} over the OpenAI API.",
        middleware=middleware,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.root_path = settings.root_path  # stripped where a request has it, so that proxies may strip it or not
    app.state.front = front
    errors.install(app)
    for part in (routes_chat, routes_completions, routes_models, routes_tokens, routes_status):
        app.include_router(part.routes(front))
    openapi.install(
        app,
        bodies=(ChatBody, CompletionBody, TokenizeBody, DetokenizeBody),
        answers=(ChatCompletion, ChatCompletionChunk, Completion, Tokens, Detokenized),
    )
    return app
