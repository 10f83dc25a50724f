"""POST /v1/completions"""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from nanoserve.core.errors import RequestError
from nanoserve.server.answers import Completion, CompletionAnswer
from nanoserve.server.body import read_body
from nanoserve.server.front import Front
from nanoserve.server.openapi import documented
from nanoserve.server.protocol import CompletionBody
from nanoserve.server.respond import respond

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def routes(front: Front) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", **documented(CompletionBody, Completion))
    async def completions(http: Request) -> Response:
        """Continue texts, or lists of token ids."""
        with front.metrics.rejections():
            return await answer(http)

    async def answer(http: Request) -> Response:
        body = await read_body(http, CompletionBody, front.settings)
        model = front.model_name(body.model)
        sampling = body.sampling(front.info.sampling_defaults)
        choices = len(body.prompt) * sampling.n
        if choices > front.settings.max_choices:
            raise RequestError(
                f"{len(body.prompt)} prompts times n = {sampling.n} are {choices} choices; "
                f"at most {front.settings.max_choices} are taken in one call",
                param="prompt",
                code="invalid_value",
            )
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        encoded = iter(await front.prompts.texts(texts, body.add_special_tokens))
        prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in body.prompt]
        requests = [front.request(body, sampling, ids, DEFAULT_MAX_TOKENS) for ids in prompts]
        head = (front.answer_id(http, "cmpl-", body), int(time.time()), model)
        return await respond(http, front, body, requests, CompletionAnswer(head, body, requests, front.tokenizer))

    return router
