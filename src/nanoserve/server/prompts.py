"""Prompts: from what a body says to token ids. Long texts are worked on in threads, so that streams keep flowing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from nanoserve.core.errors import ContextLengthError, RequestError
from nanoserve.server.logprobs import token_name
from nanoserve.server.protocol import ChatEnd, Message
from nanoserve.text.chat import RESERVED, ChatTemplate, encode_chat
from nanoserve.text.tokenizer import Tokenizer

INLINE_CHARS = 4096  # about a millisecond of work; a hop to a thread and back costs a tenth of that
MAX_CHARS_PER_TOKEN = 128  # the longest tokens that vocabularies have, such as runs of spaces

Result = TypeVar("Result")


class Prompts:
    """Texts that cannot fit into `max_model_len` tokens are refused before they are tokenized, which takes a hundred
    times their memory."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, max_model_len: int):
        self.tokenizer = tokenizer
        self.template = template
        self.max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")

    async def chat(self, messages: Sequence[Message], end: ChatEnd) -> list[int]:
        """Raises RequestError with the template's own words where it refuses the messages."""
        template = self.template
        if template is None:
            raise RequestError(
                "This model has no chat template; use /v1/completions, or start the server with --chat-template.",
                param="messages",
                code="no_chat_template",
            )
        kwargs = end.chat_template_kwargs or {}
        if reserved := RESERVED & kwargs.keys():
            name = min(reserved)
            raise RequestError(
                f"chat_template_kwargs may not hold {name!r}: the server sets it",
                param=f"chat_template_kwargs.{name}",
                code="invalid_value",
            )
        # What a template does with names of a caller's choice may take long, however short the messages are.
        is_long = bool(kwargs) or len(messages) > 64 or sum(message.size for message in messages) > INLINE_CHARS

        def encode() -> list[int]:
            self._check_length("messages", sum(message.size for message in messages))
            return encode_chat(
                self.tokenizer,
                template,
                # Most templates add contents up, and fail on one that is missing.
                [{"content": "", **message.model_dump(exclude_none=True)} for message in messages],
                add_generation_prompt=end.opens_answer,
                continue_final_message=bool(end.continue_final_message),
                **kwargs,
            )

        ids = await self._work(is_long, encode)
        if not ids:
            raise RequestError("messages make a prompt of no tokens", param="messages", code="invalid_value")
        return ids

    async def texts(self, texts: Sequence[str], add_special: bool | None) -> list[list[int]]:
        """Raw prompts: control tokens are read as such, since clients that render chats themselves write them."""
        add = add_special is not False
        for text in texts:
            self._check_length("prompt", len(text))
        return await self._work(
            sum(map(len, texts)) > INLINE_CHARS,
            lambda: [self.tokenizer.encode(text, add_special=add, parse_special=True) for text in texts],
        )

    async def decode(self, ids: list[int]) -> str:
        return await self._work(len(ids) > INLINE_CHARS, lambda: self.tokenizer.decode(ids, skip_special=False))

    def _check_length(self, param: str, chars: int) -> None:
        limit = self.max_model_len * MAX_CHARS_PER_TOKEN
        if chars > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, and {param} has {chars} "
                f"characters; more than {limit} never fit.",
                param=param,
            )

    async def names(self, ids: list[int]) -> list[str]:
        return await self._work(
            len(ids) > INLINE_CHARS, lambda: [token_name(self.tokenizer.token_bytes(token)) for token in ids]
        )

    async def _work(self, is_long: bool, job: Callable[[], Result]) -> Result:
        if not is_long:
            return job()
        return await asyncio.get_running_loop().run_in_executor(self._threads, job)
