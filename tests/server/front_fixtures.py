"""What the tests of the front share: a byte tokenizer, an app over a scripted engine, and a client."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import tokenizers

from nanoserve.server.app import create_app
from nanoserve.server.settings import ServerSettings
from nanoserve.text.tokenizer import Tokenizer
from server.fake_engine import FakeEngine

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 256, 257, 258; ids of bytes are the bytes
CHATML = (
    "{% for message in messages %}{% if message['role'] == 'system' and no_system is defined %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'][0]['function']['name'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHATML, prefix: tuple[int, ...] = ()) -> Tokenizer:
    """One byte is one token."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    names = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=names, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    special = {"eos_token": "<|im_end|>"}
    return Tokenizer(
        backend, prefix=prefix, bos_id=256, eos_id=258, special_tokens=special, chat_template=chat_template
    )


@dataclass
class Served:
    engine: FakeEngine
    app: Any
    client: httpx.AsyncClient

    async def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        if isinstance(body, (bytes, str)):
            more.setdefault("headers", {"content-type": "application/json"})
            return await self.client.post(path, content=body, **more)
        return await self.client.post(path, json=body, **more)

    async def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"model": "toy", "messages": [{"role": "user", "content": content}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": "toy", "prompt": prompt, **fields})


def served(engine: FakeEngine | None = None, tokenizer: Tokenizer | None = None, **settings: Any) -> Served:
    engine = engine or FakeEngine()
    app = create_app(
        engine, tokenizer or byte_tokenizer(), ServerSettings(served_model_name=("toy", "alias"), **settings)
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    return Served(engine, app, httpx.AsyncClient(transport=transport, base_url="http://test"))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream that ended as it should."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, (response.status_code, response.text[:300])
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]
