"""POST /v1/chat/completions"""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from nanoserve.core.errors import RequestError
from nanoserve.server.answers import ChatAnswer, ChatCompletion
from nanoserve.server.body import read_body
from nanoserve.server.front import Front
from nanoserve.server.openapi import documented
from nanoserve.server.protocol import ChatBody
from nanoserve.server.respond import respond


def routes(front: Front) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", **documented(ChatBody, ChatCompletion))
    async def chat_completions(http: Request) -> Response:
        """Continue a conversation."""
        with front.metrics.rejections():
            return await answer(http)

    async def answer(http: Request) -> Response:
        body = await read_body(http, ChatBody, front.settings)
        model = front.model_name(body.model)
        sampling = body.sampling(front.info.sampling_defaults)
        ids = await front.prompts.chat(body.messages, body)
        try:
            request = front.request(body, sampling, ids, default_max_tokens=None)
        except RequestError as error:
            error.param = "messages" if error.param == "prompt" else error.param
            raise
        head = (front.answer_id(http, "chatcmpl-", body), int(time.time()), model)
        return await respond(http, front, body, [request], ChatAnswer(head, body, request, front.tokenizer))

    return router
