"""Front: what the routes share."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec
from fastapi import Request as HttpRequest

from nanoserve.core.params import SamplingParams
from nanoserve.core.request import Request
from nanoserve.engine.admission import make_request
from nanoserve.engine.client import AsyncEngine
from nanoserve.engine.messages import EngineInfo
from nanoserve.server.errors import HttpError
from nanoserve.server.metrics import Metrics
from nanoserve.server.prompts import Prompts
from nanoserve.server.protocol import GenerationBody
from nanoserve.server.settings import ServerSettings
from nanoserve.text.chat import ChatTemplate
from nanoserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Front:
    engine: AsyncEngine
    tokenizer: Tokenizer
    settings: ServerSettings
    metrics: Metrics
    prompts: Prompts
    info: EngineInfo  # its vocab_size without the rows that no token has
    names: tuple[str, ...]

    @classmethod
    def of(cls, engine: AsyncEngine, tokenizer: Tokenizer, settings: ServerSettings) -> Front:
        source = settings.template_source() or tokenizer.chat_template
        template = None if source is None else ChatTemplate(source, tokenizer.special_tokens)
        return cls(
            engine,
            tokenizer,
            settings,
            Metrics(engine),
            Prompts(tokenizer, template, engine.info.max_model_len),
            msgspec.structs.replace(engine.info, vocab_size=min(engine.info.vocab_size, tokenizer.vocab_size)),
            settings.served_model_name or (Path(engine.info.model).stem,),
        )

    def model_name(self, asked: str | None) -> str:
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            known = " or ".join(repr(name) for name in self.names)
            message = f"The model {asked[:128]!r} does not exist here; this server has {known}."
            raise HttpError(404, message, param="model", code="model_not_found")
        return asked

    def answer_id(self, http: HttpRequest, prefix: str, body: GenerationBody) -> str:
        return prefix + (body.request_id or http.state.request_id)

    def request(
        self, body: GenerationBody, sampling: SamplingParams, ids: list[int], default_max_tokens: int | None
    ) -> Request:
        """Raises RequestError where the model cannot serve it. Its id is the front's own: what a client calls its
        request may be in use already."""
        if body.truncate_prompt_tokens is not None:
            ids = ids[-body.truncate_prompt_tokens :]
        return make_request(
            self.info,
            ids,
            sampling,
            id=uuid.uuid4().hex,
            default_max_tokens=default_max_tokens,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            max_tokens_param=body.limit()[0],
        )
