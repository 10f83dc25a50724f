"""A real server process, from outside: the official client library, raw sockets, and signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest

from nanoserve.core.config import EngineConfig
from nanoserve.core.errors import CheckpointError
from nanoserve.engine.process import EngineProcess
from server.real_server import RealServer, make_scripted, until

LETTERS = {str(id): 100 for id in range(ord("a"), ord("z") + 1)}  # logit_bias: one token, one letter
TURNS: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <|im_end|> é"}]


class Fleet(NamedTuple):
    main: RealServer
    scripted: RealServer
    killed: RealServer
    drained: RealServer


@pytest.fixture(scope="module")
def fleet(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """They start side by side: most of a start is waiting for imports."""
    scripted = make_scripted(tmp_path_factory.mktemp("scripted"))
    pool = ("--max-model-len", "512", "--num-gpu-blocks-override", "64", "--served-model-name", "toy")

    def start(name: str, model: Path, *flags: str, key: str = "any") -> RealServer:
        return RealServer(tmp_path_factory.mktemp(name), model, *pool, *flags, key=key)

    servers = Fleet(
        main=start("main", toy, "--served-model-name", "alias", "--max-num-queued-reqs", "100"),
        scripted=start("scripted", scripted, "--api-key", "sesame", "--backend", "torch", key="sesame"),
        killed=start("killed", toy, "--backend", "torch"),
        drained=start("drained", toy, "--backend", "torch"),
    )
    yield servers
    for server in servers:
        server.process.terminate()
    for server in servers:
        server.process.wait()


@pytest.fixture(scope="module")
def server(fleet: Fleet) -> RealServer:
    assert fleet.main.url
    return fleet.main


@pytest.fixture(scope="module")
def scripted(fleet: Fleet) -> RealServer:
    assert fleet.scripted.url
    return fleet.scripted


@pytest.fixture
async def api(server: RealServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with server.aclient() as client:
        yield client


def extra(**fields: Any) -> dict[str, Any]:
    """Fields that the client library knows and those that it does not, told apart."""
    known = ("model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed",
             "stop", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "presence_penalty",
             "frequency_penalty", "echo", "best_of", "user")  # fmt: skip
    plain = {name: value for name, value in fields.items() if name in known}
    return {**plain, "extra_body": {name: value for name, value in fields.items() if name not in known}}


def complete(server: RealServer, prompt: Any, **fields: Any) -> Any:
    defaults = {"model": "toy", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    return server.client.completions.create(**extra(**defaults | fields, prompt=prompt))


def text_of(server: RealServer, prompt: Any, **fields: Any) -> str:
    return complete(server, prompt, **fields).choices[0].text


# ---- models, status


def test_models(server: RealServer) -> None:
    listed = server.client.models.list().data
    assert [model.id for model in listed] == ["toy", "alias"]
    assert server.client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")


def test_status_routes(server: RealServer) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/version").json()["version"]
    found = server.metrics()
    assert found["kv_cache_usage_perc"] == 0
    assert "time_to_first_token_seconds_count" in found


def test_the_start_says_what_a_person_wants_to_know(server: RealServer) -> None:
    for word in ("model", "start", "KV cache   64 blocks of 16 tokens: 1,024 tokens", "ready", "curl http://"):
        assert word in server.output


# ---- streams say what whole answers say


class Said(NamedTuple):
    """What one choice said, in whatever form it came."""

    text: str
    finish: str | None
    stop: Any
    ids: list[int]
    logprobs: Any


def joined(parts: list[Any]) -> Any:
    """Lists of logprobs end to end: chat's `content`, or the parallel lists of completions."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    return {
        key: [entry for part in found for entry in part[key]] for key, value in found[0].items() if value is not None
    }


def whole(answer: Any) -> dict[int, Said]:
    said = {}
    for choice in answer.choices:
        fields = choice.model_dump()
        text = fields["message"]["content"] if "message" in fields else fields["text"]
        said[choice.index] = Said(
            text, fields["finish_reason"], fields["stop_reason"], fields["token_ids"], joined([fields["logprobs"]])
        )
    return said


async def streamed(stream: Any) -> tuple[dict[int, Said], Any]:
    """The choices, and the usage of the last chunk. Checks the form of a stream on the way."""
    parts: dict[int, list[dict[str, Any]]] = {}
    usage = None
    async for chunk in stream:
        assert usage is None, "a chunk after the usage"
        if not chunk.choices:
            usage = chunk.usage
            continue
        assert chunk.usage is None
        for choice in chunk.choices:
            before = parts.setdefault(choice.index, [])
            assert not before or before[-1]["finish_reason"] is None, "a chunk after the finish"
            before.append(choice.model_dump())
    said = {}
    for index, chunks in parts.items():
        texts = [chunk["delta"]["content"] if "delta" in chunk else chunk["text"] for chunk in chunks]
        assert all(texts[:-1]), "an empty chunk that ends nothing"
        if "delta" in chunks[0]:
            assert [chunk["delta"]["role"] for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
        said[index] = Said(
            "".join(text or "" for text in texts),
            chunks[-1]["finish_reason"],
            chunks[-1]["stop_reason"],
            [id for chunk in chunks for id in chunk["token_ids"]],
            joined([chunk["logprobs"] for chunk in chunks]),
        )
    return said, usage


COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 1},
    {"n": 3},
    {"stop": "LATE"},
    {"stop": ["never", "EARLY"], "n": 2},
    {"stop": ["LATE"], "include_stop_str_in_output": True, "min_tokens": 3},
    {"stop": ["EARLY"], "min_tokens": 24},
    {"logprobs": 0},
    {"logprobs": 3, "stop": ["LATE"]},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "seed": 6, "n": 3, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "top_k": 20, "min_p": 0.01},
    {"logit_bias": LETTERS, "frequency_penalty": 2, "presence_penalty": 1},
    {"repetition_penalty": 1.7},
    {"logit_bias": {"258": 100}, "ignore_eos": False},
    {"logit_bias": {"258": 100}, "ignore_eos": False, "min_tokens": 4, "logprobs": 1},
    {"logit_bias": {"258": 100}, "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 3},
    {"logit_bias": {"104": 100}, "stop_token_ids": [104], "include_stop_str_in_output": True},
    {"logit_bias": {"195": 100}, "max_tokens": 5},
]


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_A50_streams_say_what_whole_answers_say(server: RealServer, api: openai.AsyncOpenAI, kind: str) -> None:
    asked: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 24, "ignore_eos": True,
                             "return_token_ids": True}  # fmt: skip
    if kind == "chat":
        create, asked["messages"] = api.chat.completions.create, TURNS
    else:
        create, asked["prompt"] = api.completions.create, "hello é"
    plain = whole(await create(**extra(**asked)))[0].text
    marks = {"EARLY": plain[2:4], "LATE": plain[9:13]}

    async def compare(fields: dict[str, Any]) -> None:
        fields = asked | fields
        if "stop" in fields:
            given = [fields["stop"]] if isinstance(fields["stop"], str) else fields["stop"]
            fields["stop"] = [marks.get(stop, stop) for stop in given]
        if kind == "chat" and "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        answer = await create(**extra(**fields))
        stream = await create(**extra(**fields, stream=True, stream_options={"include_usage": True}))
        said, usage = await streamed(stream)
        expected = whole(answer)
        assert said == expected
        assert len(said) == fields.get("n", 1)
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [getattr(usage, name) for name in counts] == [getattr(answer.usage, name) for name in counts]
        assert answer.usage.completion_tokens == sum(len(one.ids) for one in said.values())
        assert 0 <= usage.prompt_tokens_details.cached_tokens <= usage.prompt_tokens

    await asyncio.gather(*map(compare, COMBINATIONS))


async def test_A09_no_usage_unless_asked(api: openai.AsyncOpenAI) -> None:
    stream = await api.chat.completions.create(model="toy", messages=TURNS, max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


async def test_A11_n_choices_are_interleaved(api: openai.AsyncOpenAI) -> None:
    stream = await api.completions.create(
        model="toy", prompt=["a", "b"], n=2, max_tokens=30, temperature=0, stream=True, logit_bias=LETTERS
    )
    order = [choice.index async for chunk in stream for choice in chunk.choices]
    assert set(order) == {0, 1, 2, 3}
    firsts = {index: order.index(index) for index in range(4)}
    lasts = {index: len(order) - order[::-1].index(index) for index in range(4)}
    assert max(firsts.values()) < min(lasts.values())


def test_usage_and_cached_tokens_on_a_repeat(server: RealServer) -> None:
    prompt = "a beginning of this test's own, long enough for some blocks of sixteen"
    cold, warm = (complete(server, prompt) for _ in range(2))
    assert cold.usage.prompt_tokens == warm.usage.prompt_tokens == len(prompt) == 70
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == 64
    assert cold.usage.total_tokens == 70 + 24
    assert cold.choices[0].text == warm.choices[0].text
    salted = complete(server, prompt, cache_salt="other")
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_A38_another_salt_finds_nothing(server: RealServer) -> None:
    prompt = "a long beginning that one tenant sends and another one would like to know of"

    def cached(**salt: Any) -> int:
        return complete(server, prompt, max_tokens=1, **salt).usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="a") == 0
    for other in ({"cache_salt": "b"}, {}, {"cache_salt": "A"}, {"cache_salt": "a "}):
        assert cached(**other) == 0
    assert cached(cache_salt="a") == cached() == len(prompt) // 16 * 16
    for bad in ("", 5, "x" * 257, ["a"]):
        with pytest.raises(openai.BadRequestError) as caught:
            cached(cache_salt=bad)
        assert caught.value.param == "cache_salt"


# ---- scripted pieces


def scripted_text(scripted: RealServer, prompt: Any, **fields: Any) -> Any:
    """The choice of a whole answer; the stream must say the same."""
    asked = {"model": "toy", "temperature": 0, "max_tokens": 16, **fields, "prompt": prompt}
    choice = scripted.client.completions.create(**extra(**asked)).choices[0]
    chunks = list(scripted.client.completions.create(**extra(**asked, stream=True)))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    return choice


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_A01_an_emoji_cut_by_the_limit(scripted: RealServer, limit: int) -> None:
    choice = scripted_text(scripted, "e", max_tokens=limit)
    assert (choice.text, choice.finish_reason) == ("\ufffd", "length")
    answer = scripted.client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "e"}], max_tokens=limit, temperature=0
    )
    assert answer.choices[0].message.content == "\ufffd"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == limit


def test_A01_an_emoji_of_four_tokens_is_whole(scripted: RealServer) -> None:
    assert scripted_text(scripted, "e", max_tokens=4).text == "🎉"
    stream = scripted.client.completions.create(model="toy", prompt="e", temperature=0, stream=True)
    assert [chunk.choices[0].text for chunk in stream] in (["🎉", ""], ["🎉"])


def test_A02_first_letters_and_spaces_are_neither_lost_nor_made_up(scripted: RealServer) -> None:
    assert scripted_text(scripted, "Hel").text == "lo world"
    assert scripted_text(scripted, "p").text == " world"
    assert scripted_text(scripted, "q").text == "A"
    assert scripted_text(scripted, "Hel").finish_reason == "stop"


def test_A03_stop_string_across_tokens(scripted: RealServer) -> None:
    for prompt, stop, without, included in [
        ("z", ["a</s"], "alpha bet", "alpha beta</s"),
        ("z", ["never", "pha b"], "al", "alpha b"),
        ("z", "x", "alpha beta</s>", "alpha beta</s>x"),
        ("Hel", ["o w", "wor"], "l", "lo w"),
    ]:
        choice = scripted_text(scripted, prompt, stop=stop)
        hit = stop if isinstance(stop, str) else next(one for one in stop if one in included)
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (without, "stop", hit)
        assert scripted_text(scripted, prompt, stop=stop, include_stop_str_in_output=True).text == included


def test_A03_a_stop_token_that_is_special(scripted: RealServer) -> None:
    choice = scripted_text(scripted, "z", stop_token_ids=[2], ignore_eos=True)
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("alpha beta</s>x", "stop", 2)
    assert scripted_text(scripted, "z").stop_reason is None


def test_A04_only_what_may_be_a_stop_is_held_back(scripted: RealServer) -> None:
    asked: dict[str, Any] = extra(model="toy", prompt="m", temperature=0, stream=True, return_token_ids=True)
    for stop in (["ZZZZZZZZZZ"], ["e time"], None):
        chunks = [chunk.choices[0] for chunk in scripted.client.completions.create(**asked, stop=stop)]
        assert "".join(chunk.text for chunk in chunks) == "one two three"
        assert all(chunk.text for chunk in chunks[:-1])
        if stop != ["e time"]:  # a chunk may hold several tokens, and then has the text of all of them
            pieces = iter(("one", " two", " three", ""))
            for chunk in chunks:
                assert chunk.text == "".join(next(pieces) for _ in chunk.token_ids)  # type: ignore[attr-defined]


def test_A10_ends(scripted: RealServer) -> None:
    assert scripted_text(scripted, "m").finish_reason == "stop"
    cut = scripted_text(scripted, "m", max_tokens=2)
    assert (cut.text, cut.finish_reason) == ("one two", "length")
    answer = scripted.client.completions.create(model="toy", prompt="m", temperature=0)
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4  # the end token too


def test_A20_there_is_one_bos(scripted: RealServer) -> None:
    def ids(**fields: Any) -> list[int]:
        answer = scripted.http.post("/tokenize", json=fields)
        assert answer.status_code == 200
        return answer.json()["tokens"]

    chat = [{"role": "user", "content": "m"}]
    for tokens in (ids(messages=chat), ids(prompt="m"), ids(prompt="<s>m")):
        assert tokens[0] == 1
        assert tokens.count(1) == 1
    assert ids(prompt="m", add_special_tokens=False).count(1) == 0
    answer = scripted.client.chat.completions.create(model="toy", messages=chat, max_tokens=1, temperature=0)  # type: ignore[arg-type]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids(messages=chat))
    back = scripted.http.post("/detokenize", json={"tokens": ids(prompt="m one")}).json()
    assert back == {"prompt": "<s> m one"}


def test_A58_a_wrong_key_is_401(scripted: RealServer) -> None:
    client = openai.OpenAI(base_url=scripted.url + "/v1", api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.completions.create(model="toy", prompt="m")
    assert httpx.get(scripted.url + "/metrics").status_code == 401
    assert httpx.get(scripted.url + "/health").status_code == 200


# ---- fields


async def test_A12_a_seed_gives_the_same_text_in_any_company(api: openai.AsyncOpenAI) -> None:
    async def draw(prompt: str, seed: int | None, tokens: int = 16) -> str:
        answer = await api.completions.create(model="toy", prompt=prompt, seed=seed, max_tokens=tokens, temperature=1)
        return answer.choices[0].text

    alone = await draw("seeded", 42)
    for company in (1, 7):
        for place in (0, company):
            others = [draw(f"other {i}", None, 12 + i) for i in range(company)]
            together = await asyncio.gather(*others[:place], draw("seeded", 42), draw("seeded", 42), *others[place:])
            assert together[place : place + 2] == [alone, alone]
    assert len(set(await asyncio.gather(*[draw("seeded", None) for _ in range(4)]))) == 4
    assert await draw("seeded", 43) != alone


def test_A16_every_field_changes_what_is_said(server: RealServer) -> None:
    plain = text_of(server, "hello")
    wild = {"temperature": 2.0, "seed": 3}
    assert text_of(server, "hello", **wild) != plain
    assert text_of(server, "hello", **wild) == text_of(server, "hello", **wild)
    assert text_of(server, "hello", **wild, top_k=1) == plain
    assert text_of(server, "hello", **wild, top_p=1e-9) == plain
    assert text_of(server, "hello", **wild, min_p=1.0) == plain
    letters = text_of(server, "hello", logit_bias=LETTERS)
    assert letters.isascii()
    assert letters.islower()
    banned = text_of(server, "hello", logit_bias={**LETTERS, str(ord(letters[0])): -100})
    assert letters[0] not in banned
    once = {str(ord(letter)): 100 for letter in "ab"}
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 3.0}):
        for bias in (LETTERS, once):
            changed = text_of(server, "hello", logit_bias=bias, max_tokens=60, **penalty)
            if changed != text_of(server, "hello", logit_bias=bias, max_tokens=60):
                break
        else:
            raise AssertionError(f"{penalty} changed nothing")
    end = {"logit_bias": {"258": 100}, "ignore_eos": False}
    assert complete(server, "hello", **end).usage.completion_tokens == 1
    assert complete(server, "hello", **end, min_tokens=5).usage.completion_tokens == 6
    assert complete(server, "hello", **{**end, "ignore_eos": True}).usage.completion_tokens == 24
    special = text_of(server, "hello", **{**end, "ignore_eos": True}, skip_special_tokens=False, max_tokens=2)
    assert special == "<|im_end|>" * 2
    assert complete(server, "x" * 50, truncate_prompt_tokens=8).usage.prompt_tokens == 8


@pytest.mark.parametrize(
    "field", [{"bad_words": ["a"]}, {"allowed_token_ids": [1]}, {"prompt_logprobs": 1}, {"nonsense": 1}]
)
def test_A16_what_is_not_built_is_refused_by_name(server: RealServer, field: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, "hello", **field)
    assert caught.value.param == next(iter(field))


def test_A06_logprobs(server: RealServer) -> None:
    chat = server.client.chat.completions.create(
        model="toy", messages=TURNS, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert chat.usage is not None
    assert len(content) == chat.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert entry.token == entry.top_logprobs[0].token
    spelled = bytes(byte for entry in content for byte in entry.bytes or ())
    assert spelled.decode(errors="replace") == chat.choices[0].message.content
    entries = complete(server, "hello", logprobs=0, max_tokens=4).choices[0].logprobs
    assert len(entries.tokens) == len(entries.token_logprobs) == len(entries.text_offset) == 4


# ---- refusals


def test_A08_echo_is_refused(server: RealServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, "A B C", echo=True, logprobs=1, max_tokens=1)
    assert caught.value.param == "echo"


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], None, [None], [[1], []]])
def test_A19_prompts_without_tokens(server: RealServer, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        complete(server, prompt)
    assert server.at_rest()


def test_A19_several_prompts_in_order(server: RealServer) -> None:
    both = complete(server, ["a", [98]])
    assert [choice.index for choice in both.choices] == [0, 1]
    assert [choice.text for choice in both.choices] == [text_of(server, "a"), text_of(server, "b")]
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(model="toy", messages=[])
    assert caught.value.param == "messages"


REFUSALS: list[tuple[dict[str, Any], type[openai.APIStatusError], str | None, str | None]] = [
    ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
    ({"temperature": -1}, openai.BadRequestError, "temperature", "invalid_value"),
    ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**12}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
    ({"prompt": "x" * 600}, openai.BadRequestError, "prompt", "context_length_exceeded"),
    ({"n": 10**9}, openai.BadRequestError, "n", "invalid_value"),
    ({"logit_bias": {"259": 1}}, openai.BadRequestError, "logit_bias", "invalid_value"),
    ({"prompt": [0, 259]}, openai.BadRequestError, "prompt", "invalid_value"),
    ({"best_of": 3}, openai.BadRequestError, "best_of", "unsupported_parameter"),
    ({"n": 101}, openai.RateLimitError, None, "queue_full"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own(server: RealServer, stream: bool) -> None:
    for fields, kind, param, code in REFUSALS:
        with pytest.raises(kind) as caught:
            complete(server, **{"prompt": "hello", **fields}, stream=stream)
        error = caught.value
        assert (error.param, error.code) == (param, code), fields
        assert error.type == ("rate_limit_error" if kind is openai.RateLimitError else "invalid_request_error")
        assert error.body["message"]  # type: ignore[index]
    assert server.at_rest()


HARMFUL: list[dict[str, Any]] = [
    {"logit_bias": {"259": 5}}, {"logit_bias": {"99999999": -100}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"a": 1}},
    {"logit_bias": {"5": 1000}}, {"prompt": [0, 259]}, {"prompt": ""}, {"prompt": [[]]}, {"stop_token_ids": [259]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"pattern": "*["}}}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}},
    {"structured_outputs": {"regex": "((("}}, {"structured_outputs": {"regex": "((a+)+)+b"}}, {"n": 10**9},
    {"logprobs": 10**6}, {"stop": ["x"] * 10**5}, {"prompt": ["a"] * 10**5}, {"min_tokens": 10**9},
    {"temperature": 1e999}, {"max_tokens": -1}, {"prompt": "x" * 10**6},
]  # fmt: skip


def test_A14_A29_A32_A51_what_harms_others_is_refused_beside_a_stream(server: RealServer) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 400, "logit_bias": LETTERS}
    stream = iter(server.client.completions.create(model="toy", prompt="healthy", stream=True, **asked))
    text = next(stream).choices[0].text
    for fields in HARMFUL:
        body = json.dumps({"prompt": "a", "max_tokens": 1, **fields}).replace("Infinity", "1e999")
        answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (fields, answer.text)
        assert answer.json()["error"]["param"].startswith(next(iter(fields)))
    for chunk in stream:
        text += chunk.choices[0].text
    assert text == text_of(server, "healthy", **asked)
    assert server.at_rest()


def test_A48_what_can_never_fit_is_refused_and_the_queue_goes_on(server: RealServer) -> None:
    for prompt, limit in [("x" * 512, 1), ("x" * 500, 13)]:
        with pytest.raises(openai.BadRequestError, match="512") as caught:
            complete(server, prompt, max_tokens=limit)
        assert caught.value.code == "context_length_exceeded"
    assert len(complete(server, "x" * 500, max_tokens=12, return_token_ids=True).choices[0].token_ids) == 12


async def test_A34_more_than_fits_at_once_is_right_all_the_same(server: RealServer, api: openai.AsyncOpenAI) -> None:
    """The pool holds 1,024 tokens; these want 2,400. The last to come are preempted; some of them are streams."""
    ways: list[dict[str, Any]] = [{}, {"temperature": 1, "seed": 5}, {"frequency_penalty": 0.1, "logprobs": 0}]

    async def ask(i: int) -> Said:
        stream = await api.completions.create(**extra(
            model="toy", prompt=f"{i}" * 100, max_tokens=300, temperature=0, logit_bias=LETTERS, stream=True,
            return_token_ids=True) | ways[i % 3])  # fmt: skip
        (said,) = (await streamed(stream))[0].values()
        return said

    alone = [await ask(i) for i in range(6)]
    before = server.metrics()["num_preemptions_total"]
    together = await asyncio.gather(*map(ask, range(6)))
    assert server.metrics()["num_preemptions_total"] > before
    assert [(said.text, said.ids, said.finish) for said in together] == [
        (said.text, said.ids, "length") for said in alone
    ]
    assert {len(said.ids) for said in together} == {300}
    for i in (2, 5):
        for name, values in alone[i].logprobs.items():
            assert len(together[i].logprobs[name]) == len(values) == 300
    assert server.at_rest()


# ---- hang-ups


def post(path: str, **fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def hang_up(port: int, number: int) -> None:
    """A request of one of several kinds, left at one of several moments, politely or not."""
    fields: dict[str, Any] = {"prompt": f"{number} " * 40, "max_tokens": 300, "ignore_eos": True}
    if number % 3:
        fields["stream"] = True
    if number % 4 == 0:
        fields["n"] = 4
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post("/v1/completions", **fields))
    if number % 3 == 1:
        await reader.readuntil(b'"text"')
    else:
        await asyncio.sleep(number % 5 * 0.004)
    if number % 2:
        writer.transport.abort()  # type: ignore[attr-defined]
    writer.close()


async def test_A33_clients_that_hang_up_leave_nothing_behind(server: RealServer) -> None:
    expected = text_of(server, "after all of them")

    def resident() -> int:
        return sum(process.memory_info().rss for process in (psutil.Process(server.process.pid), server.engine))

    half = 0
    for start in range(0, 200, 10):
        await asyncio.gather(*[hang_up(server.port, number) for number in range(start, start + 10)])
        half = half or (start >= 100 and resident())
    until(server.at_rest)
    assert resident() - half < 16 << 20
    assert text_of(server, "after all of them") == expected


async def test_A33_connections_without_a_request(server: RealServer) -> None:
    for data in (b"", b"GET /hea", post("/v1/completions", prompt="x" * 200)[:-50]):
        for _ in range(20):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            await writer.drain()
            writer.close()
    assert server.at_rest()


def test_A55_the_engines_process_has_no_address(server: RealServer) -> None:
    """Its socket is one of a pair, made before it: nobody else can reach it. The front listens where it was told."""
    assert not server.engine.net_connections("inet")
    listening = [c for c in psutil.Process(server.process.pid).net_connections("inet") if c.status == "LISTEN"]
    assert [connection.laddr for connection in listening] == [("127.0.0.1", server.port)]


def test_A61_nothing_of_a_request_is_in_logs_or_metrics(scripted: RealServer) -> None:
    names: list[dict[str, Any]] = [{}, {"model": "secret-model"}, {"temperature": "secret-type"}, {"secret_field": 1}]
    for number in range(40):
        fields = {"prompt": f"secret{number}", "user": f"secret{number}", "request_id": f"secret{number}",
                  "max_tokens": 1, **names[number % 4]}  # fmt: skip
        scripted.http.post("/v1/completions", json=fields)
        scripted.http.get(f"/secret{number}?key=secret")
    httpx.get(scripted.url + "/v1/models", headers={"authorization": "Bearer secret-guess"})
    for text in (scripted.http.get("/metrics").text, scripted.output, scripted.errors):
        assert "secret" not in text
        assert "sesame" not in text


# ---- the engine dies


def test_A49_a_killed_engine(fleet: Fleet) -> None:
    server, engine = fleet.killed, fleet.killed.engine
    asked: dict[str, Any] = extra(model="toy", prompt="hello", n=8, max_tokens=500, ignore_eos=True)
    streams = [server.client.completions.create(**asked, stream=True) for _ in range(2)]
    for stream in streams:
        next(iter(stream))
    engine.kill()
    for stream in streams:
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "engine_dead"
    assert server.http.get("/health").status_code == 503
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as refused:
            server.client.completions.create(**asked, stream=stream)
        assert refused.value.status_code == 503
        assert refused.value.code == "engine_dead"
    assert server.http.get("/metrics").status_code == 200
    assert server.process.poll() is None
    assert server.stop() == 0


# ---- the end


def test_SIGTERM_lets_a_stream_end(fleet: Fleet) -> None:
    server = fleet.drained
    engine, port = server.engine, server.port
    asked: dict[str, Any] = {"model": "toy", "prompt": "hello", "max_tokens": 500, "temperature": 0}
    stream = iter(server.client.completions.create(**asked, stream=True, logit_bias=LETTERS))
    text = next(stream).choices[0].text
    server.process.send_signal(signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGINT):  # a service manager signals every process
        engine.send_signal(number)
    until(lambda: not listening(port))
    for chunk in stream:
        text += chunk.choices[0].text
        finish = chunk.choices[0].finish_reason
    assert (len(text), finish) == (500, "length")
    assert server.process.wait() == 0
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    assert not server.errors.count("Traceback")


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# ---- starts that fail


def test_a_start_that_cannot_be_says_why_in_one_line(toy: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases: list[tuple[list[str], list[str]]] = [
            ([str(toy), "--port", port], [port, "in use"]),
            ([str(tmp_path / "nowhere"), "--port", "0"], ["nowhere", "no such file"]),
            ([str(toy), "--port", "0", "--max-model-length", "5"], ["--max-model-length", "--max-model-len?"]),
            ([str(toy), "--port", "0", "--backend", "torch", "--num-gpu-blocks-override", "4",
              "--max-model-len", "128"], ["--max-model-len 128", "lower it to 64"]),
        ]  # fmt: skip
        started = [
            subprocess.Popen([sys.executable, "-m", "nanoserve", "serve", *arguments], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            for arguments, _ in cases
        ]  # fmt: skip
        for (arguments, words), process in zip(cases, started, strict=True):
            out, err = process.communicate()
            assert process.returncode == 2, (arguments, err)
            assert not out
            assert "Traceback" not in err
            lines = err.strip().splitlines()
            assert [line for line in lines if line.startswith("nanoserve serve: ")] == lines[-1:]
            for word in words:
                assert word in lines[-1], (arguments, err)


def test_ctrl_c_while_it_starts(toy: Path, tmp_path: Path) -> None:
    server = RealServer(tmp_path, toy)
    until(lambda: bool(psutil.Process(server.process.pid).children()))
    (engine,) = psutil.Process(server.process.pid).children()
    assert os.getpgid(engine.pid) != os.getpgid(server.process.pid), "a terminal's Ctrl-C would reach it"
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait() == 130
    assert not engine.is_running()
    assert not server.output
    assert "Traceback" not in server.errors


async def test_an_engine_that_does_not_start_is_no_endless_wait(toy: Path, tmp_path: Path) -> None:
    def shown(what: str, done: int, total: int) -> None:
        raise ZeroDivisionError

    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    failures = await asyncio.gather(
        EngineProcess.start(EngineConfig(model=str(toy), backend="torch"), shown),
        EngineProcess.start(EngineConfig(model=str(tmp_path), backend="torch")),
        return_exceptions=True,
    )
    assert isinstance(failures[0], ZeroDivisionError)
    assert isinstance(failures[1], CheckpointError)
    assert str(tmp_path) in str(failures[1])
    assert not [child for child in psutil.Process().children() if str(child.cmdline()).count("engine.child")]
