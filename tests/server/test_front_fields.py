"""Every field of every body is honoured, refused or a hint, and this table says which. A field that is in no table
fails here; so does one of OpenAI's that the bodies do not name."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from nanoserve.core.request import Request
from nanoserve.server.body import Body
from nanoserve.server.protocol import ChatBody, CompletionBody, DetokenizeBody, Message, StreamOptions, TokenizeBody
from server.fake_engine import END
from server.front_fixtures import Served, error_of, events, served

# field: (value, what of the engine's request it becomes)
SAMPLING: dict[str, Any] = {
    "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.25, "presence_penalty": 1.0,
    "frequency_penalty": -1.0, "repetition_penalty": 1.5, "seed": 42, "min_tokens": 3, "max_tokens": 9,
    "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
}  # fmt: skip
HONOURED = {
    "model", "stream", "stream_options", "logit_bias", "stop", "stop_token_ids", "truncate_prompt_tokens", "priority",
    "cache_salt", "request_id", "return_token_ids",
}  # fmt: skip
HONOURED_CHAT = {
    "messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "max_completion_tokens",
    "logprobs", "top_logprobs",
}  # fmt: skip
HONOURED_COMPLETION = {"prompt", "add_special_tokens", "logprobs", "best_of"}
HINTS: dict[str, Any] = {"user": "someone"}
HINTS_CHAT: dict[str, Any] = {
    "metadata": {"a": "b"}, "parallel_tool_calls": True, "prompt_cache_key": "k", "prompt_cache_retention": "24h",
    "prompt_cache_options": {"ttl": "30m"}, "safety_identifier": "someone",
}  # fmt: skip
# field: (a value that is refused, values that mean its absence)
TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED: dict[str, tuple[Any, list[Any]]] = {
    "prompt_logprobs": (0, []),
    "allowed_token_ids": ([1], []),
    "bad_words": (["a"], [[]]),
    "structured_outputs": ({"regex": "a"}, []),
    "response_format": ({"type": "json_object"}, [{"type": "text"}]),
}
REFUSED_CHAT: dict[str, tuple[Any, list[Any]]] = {
    "tools": ([TOOL], [[]]),
    "tool_choice": ("required", ["none", "auto"]),
    "functions": ([{"name": "f"}], [[]]),
    "function_call": ({"name": "f"}, ["none", "auto"]),
    "chat_template": ("{{ 1 }}", []),
    "audio": ({"voice": "x"}, []),
    "modalities": (["text", "audio"], [["text"]]),
    "moderation": ({"model": "m"}, []),
    "prediction": ({"type": "content", "content": "a"}, []),
    "reasoning_effort": ("high", []),
    "verbosity": ("low", ["medium"]),
    "web_search_options": ({}, []),
    "service_tier": ("priority", ["auto", "default"]),
    "store": (True, [False]),
}
REFUSED_COMPLETION: dict[str, tuple[Any, list[Any]]] = {"echo": (True, [False]), "suffix": ("a", [""])}


@pytest.fixture
def front() -> Served:
    return served()


@pytest.mark.parametrize(
    ("model", "tables"),
    [
        (ChatBody, (SAMPLING, HONOURED, HONOURED_CHAT, HINTS, HINTS_CHAT, REFUSED, REFUSED_CHAT)),
        (CompletionBody, (SAMPLING, HONOURED, HONOURED_COMPLETION, HINTS, REFUSED, REFUSED_COMPLETION)),
        (StreamOptions, ({"include_usage"}, {"include_obfuscation", "continuous_usage_stats"})),
        (
            Message,
            (
                {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"},
                {"refusal", "audio", "function_call", "annotations"},
            ),
        ),
        (
            TokenizeBody,
            (
                {"model", "prompt", "messages", "add_special_tokens", "return_token_strs"},
                {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"},
            ),
        ),
        (DetokenizeBody, ({"model", "tokens"},)),
    ],
)
def test_every_field_is_in_one_table(model: type[Body], tables: tuple[Any, ...]) -> None:
    named = [field for table in tables for field in table]
    assert sorted(named) == sorted(model.model_fields)


def test_every_field_of_openai_is_named() -> None:
    chat = chat_create_params.CompletionCreateParamsStreaming.__annotations__
    assert set(chat) <= set(ChatBody.model_fields)
    completion = completion_create_params.CompletionCreateParamsStreaming.__annotations__
    assert set(completion) <= set(CompletionBody.model_fields)


async def send(front: Served, path: str, **fields: Any) -> Any:
    return await (front.chat if path == "chat" else front.complete)(**fields)


def tables(path: str, common: dict[str, Any], chat: dict[str, Any], completion: dict[str, Any]) -> dict[str, Any]:
    return {**common, **(chat if path == "chat" else completion)}


@pytest.mark.parametrize("path", ["chat", "completion"])
async def test_refused_fields(front: Served, path: str) -> None:
    for field, (value, absent) in tables(path, REFUSED, REFUSED_CHAT, REFUSED_COMPLETION).items():
        error = error_of(await send(front, path, **{field: value}))
        assert error["param"] == field
        assert error["code"] == "unsupported_parameter"
        for known in (None, *absent):
            assert (await send(front, path, **{field: known})).status_code == 200, (field, known)
    for field in ("include_obfuscation", "continuous_usage_stats"):
        refused = await send(front, path, stream=True, stream_options={field: True})
        assert error_of(refused)["param"] == f"stream_options.{field}"
        assert events(await send(front, path, stream=True, stream_options={field: False}))


@pytest.mark.parametrize("path", ["chat", "completion"])
async def test_hints_change_nothing(front: Served, path: str) -> None:
    await send(front, path, temperature=0.5)
    for field, value in tables(path, HINTS, HINTS_CHAT, {}).items():
        await send(front, path, temperature=0.5, **{field: value})
        assert error_of(await send(front, path, **{field: 5}))["param"] == field
    first, *others = (request_without_id(request) for request in front.engine.requests)
    assert all(other == first for other in others)


def request_without_id(request: Request) -> Any:
    return request.prompt, request.sampling, request.max_tokens, request.stop_ids, request.priority, request.cache_salt


@pytest.mark.parametrize("path", ["chat", "completion"])
async def test_sampling_fields_reach_the_engine(front: Served, path: str) -> None:
    for field, value in SAMPLING.items():
        assert (await send(front, path, **{field: value})).status_code == 200, field
        assert getattr(front.engine.requests[-1].sampling, field) == value
        assert error_of(await send(front, path, **{field: "1"}))["param"] == field
    assert front.engine.requests[-1].stop_ids == {END}
    await send(front, path, ignore_eos=True, stop_token_ids=[5])
    assert front.engine.requests[-1].stop_ids == {5}
    await send(front, path, logit_bias={"5": -100}, stop=["a", "b"], stop_token_ids=[6], priority=-3, cache_salt="s")
    request = front.engine.requests[-1]
    assert request.sampling.logit_bias == {5: -100}
    assert request.sampling.stop == ("a", "b")
    assert request.stop_ids == {END, 6}
    assert (request.priority, request.cache_salt) == (-3, "s")
    await send(front, path, truncate_prompt_tokens=1)
    assert len(front.engine.requests[-1].prompt) == 1
    for field, value in (("cache_salt", ""), ("cache_salt", 5), ("truncate_prompt_tokens", 0), ("stop", [""])):
        assert error_of(await send(front, path, **{field: value}))["param"] == field


async def test_logprobs_reach_the_engine(front: Served) -> None:
    for fields, wanted in (({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)):
        await front.chat(**fields)
        assert front.engine.requests[-1].sampling.logprobs == wanted
    for fields, wanted in (({}, None), ({"logprobs": 0}, 0), ({"logprobs": 3}, 3)):
        await front.complete(**fields)
        assert front.engine.requests[-1].sampling.logprobs == wanted
    await front.chat(max_completion_tokens=5)
    assert front.engine.requests[-1].max_tokens == 5


async def test_chat_template_kwargs_reach_the_template() -> None:
    front = served(chat_template="{{ messages[0].content }}{{ mood }}")
    await front.chat("a", chat_template_kwargs={"mood": "b"})
    assert bytes(front.engine.requests[0].prompt) == b"ab"
    tokens = (await front.post("/tokenize", {"messages": [{"role": "user", "content": "a"}],
                                             "chat_template_kwargs": {"mood": "b"}})).json()  # fmt: skip
    assert bytes(tokens["tokens"]) == b"ab"
    assert error_of(await front.chat(chat_template_kwargs={"other": 1}))["param"] == "chat_template_kwargs.other"


async def test_message_fields() -> None:
    front = served(chat_template="{% for m in messages %}{{ m | tojson }}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    said = {"role": "assistant", "name": "n", "tool_calls": [call], "reasoning_content": "because"}
    await front.post(
        "/v1/chat/completions", {"messages": [said, {"role": "tool", "content": "c", "tool_call_id": "1"}]}
    )
    text = bytes(front.engine.requests[0].prompt).decode()
    for part in ('"n"', '"f"', "because", '"tool_call_id": "1"'):
        assert part in text
    for field in ("refusal", "audio", "function_call", "annotations"):
        message = {"role": "assistant", "content": "a", field: {"x": 1}}
        error = error_of(await front.post("/v1/chat/completions", {"messages": [message]}))
        assert (error["param"], error["code"]) == (f"messages[0].{field}", "unsupported_parameter")
    message = {"role": "user", "content": "a", "tool_calls": [call]}
    error = error_of(await front.post("/v1/chat/completions", {"messages": [message]}))
    assert error["param"] == "messages[0].tool_calls"
