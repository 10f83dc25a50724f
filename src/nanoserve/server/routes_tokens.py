"""POST /tokenize and /detokenize"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from nanoserve.core.errors import RequestError
from nanoserve.server.body import read_body
from nanoserve.server.front import Front
from nanoserve.server.openapi import documented
from nanoserve.server.protocol import DetokenizeBody, TokenizeBody


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct):
    prompt: str


def routes(front: Front) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", **documented(TokenizeBody, Tokens))
    async def tokenize(http: Request) -> Response:
        """The token ids that a completion or a chat would begin with."""
        body = await read_body(http, TokenizeBody, front.settings)
        front.model_name(body.model)
        if body.messages is not None:
            ids = await front.prompts.chat(body.messages, body)
        else:
            ids = (await front.prompts.texts([body.prompt or ""], body.add_special_tokens))[0]
        answer = Tokens(len(ids), front.info.max_model_len, ids)
        if body.return_token_strs:
            answer.token_strs = await front.prompts.names(ids)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    @router.post("/detokenize", **documented(DetokenizeBody, Detokenized))
    async def detokenize(http: Request) -> Response:
        """The text of token ids."""
        body = await read_body(http, DetokenizeBody, front.settings)
        front.model_name(body.model)
        vocab_size = front.tokenizer.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"tokens holds {token!r:.40}; ids go from 0 to {vocab_size - 1}",
                    param="tokens",
                    code="invalid_value",
                )
        answer = Detokenized(await front.prompts.decode(body.tokens))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
