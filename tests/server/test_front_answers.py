"""What the front answers, over a scripted engine: text, ends, usage, logprobs, in whole and in streams."""

from __future__ import annotations

import json

import pytest

from server.fake_engine import END, FakeEngine
from server.front_fixtures import Served, byte_tokenizer, error_of, events, served

GRIN = "😀".encode()  # four byte tokens


@pytest.fixture
def front() -> Served:
    return served()


async def texts(front: Served, **fields: object) -> list[tuple[str, str | None, object]]:
    """(text, finish_reason, stop_reason) by chat and completions, whole and streamed: four ways to one answer."""
    found = []
    for post in (front.chat, front.complete):
        choice = (await post("hi", **fields)).json()["choices"][0]
        found.append((choice.get("text", choice.get("message", {}).get("content")), choice["finish_reason"],
                      choice["stop_reason"]))  # fmt: skip
        parts = [chunk["choices"][0] for chunk in events(await post("hi", stream=True, **fields))]
        assert all(part["finish_reason"] is None for part in parts[:-1])
        text = "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)
        found.append((text, parts[-1]["finish_reason"], parts[-1]["stop_reason"]))
    return found


async def test_chat_whole(front: Served) -> None:
    answer = (await front.chat()).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [{
        "index": 0, "message": {"role": "assistant", "content": "hello"}, "logprobs": None, "finish_reason": "stop",
        "stop_reason": None,
    }]  # fmt: skip
    assert bytes(front.engine.requests[0].prompt[1:8]) == b"user\nhi"


async def test_completion_whole(front: Served) -> None:
    answer = (await front.complete("ab")).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"][0]["text"] == "hello"
    assert front.engine.requests[0].prompt == (97, 98)
    assert front.engine.requests[0].max_tokens == 16


async def test_the_official_client_reads_both(front: Served) -> None:
    import openai

    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=front.client, max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    whole = await client.chat.completions.create(model="toy", messages=messages, logprobs=True)
    assert whole.choices[0].message.content == "hello"
    assert [entry.token for entry in whole.choices[0].logprobs.content][:5] == list("hello")
    stream = await client.chat.completions.create(
        model="toy", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello"
    assert chunks[-1].usage.completion_tokens == 6
    assert [model.id async for model in client.models.list()] == ["toy", "alias"]
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=messages)


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_A01_a_cut_character_becomes_one_mark_at_the_end(front: Served, limit: int) -> None:
    front.engine.script = [*GRIN, END]
    assert set(await texts(front, max_tokens=limit)) == {("\ufffd", "length", None)}
    answer = (await front.chat(max_tokens=limit)).json()
    assert answer["usage"]["completion_tokens"] == limit


async def test_A01_no_chunk_carries_half_a_character(front: Served) -> None:
    front.engine.script = [*b"a", *GRIN, *"é".encode(), END]
    assert set(await texts(front)) == {("a😀é", "stop", None)}
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in events(await front.chat(stream=True))]
    assert not any("\ufffd" in content for content in contents if content)


@pytest.mark.parametrize("per_update", [1, 2, 3, 100])
@pytest.mark.parametrize(("include", "text"), [(False, "alpha bet"), (True, "alpha beta</s")])
async def test_A03_stop_string_across_tokens(front: Served, per_update: int, include: bool, text: str) -> None:
    front.engine.script = list(b"alpha beta</s>xyz")
    front.engine.per_update = per_update
    found = await texts(front, stop=["a</s"], include_stop_str_in_output=include)
    assert set(found) == {(text, "stop", "a</s")}
    usage = (await front.complete(stop="a</s")).json()["usage"]
    assert usage["completion_tokens"] == 13, "the tokens up to the one that completes the stop string"
    assert not front.engine.running


async def test_A03_stop_token_id_is_the_reason(front: Served) -> None:
    front.engine.script = [*b"ab", 256, *b"c"]
    assert set(await texts(front, stop_token_ids=[256])) == {("ab", "stop", 256)}


async def test_A03_a_stop_string_ends_only_its_own_choice(front: Served) -> None:
    front.engine.script = list(b"one two")
    response = await front.complete(n=2, stop="e", max_tokens=7)
    assert [choice["text"] for choice in response.json()["choices"]] == ["on", "on"]
    request = front.engine.requests[0]
    assert {(request.id, 0), (request.id, 1)} <= set(front.engine.aborted)


async def test_A04_a_stop_string_holds_back_only_what_may_begin_it(front: Served) -> None:
    front.engine.script = [*b"one two three", END]
    plain = [chunk["choices"][0]["text"] for chunk in events(await front.complete(stream=True))]
    held = [chunk["choices"][0]["text"] for chunk in events(await front.complete(stream=True, stop=["Z" * 10]))]
    assert held == plain
    assert all(held[:-1]), "only the last chunk, which says why it ended, may be without text"


async def test_tokens_that_come_together_make_one_chunk(front: Served) -> None:
    front.engine.per_update = 3
    chunks = events(await front.complete(stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hel", "lo"]


@pytest.mark.parametrize(("top", "count"), [({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 2}, 2)])
async def test_A06_chat_logprobs(front: Served, top: dict[str, int], count: int) -> None:
    front.engine.script = [*b"a", *GRIN, END]
    entries = (await front.chat(logprobs=True, **top)).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 6
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "a😀"
    assert entries[1]["token"] == "bytes:\\xf0"
    assert entries[5] == {**entries[5], "token": "<|im_end|>", "bytes": [], "logprob": -0.5}
    assert all(len(entry["top_logprobs"]) == count for entry in entries)
    if count:
        assert entries[0]["top_logprobs"][1] == {"token": "b", "logprob": -1.5, "bytes": [98]}
    streamed = [
        entry
        for chunk in events(await front.chat(logprobs=True, stream=True, **top))
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


async def test_A06_top_logprobs_without_logprobs(front: Served) -> None:
    assert error_of(await front.chat(top_logprobs=2))["param"] == "top_logprobs"


@pytest.mark.parametrize("count", [0, 1, 2])
async def test_A06_completion_logprobs(front: Served, count: int) -> None:
    front.engine.script = [*b"a", *GRIN, *b"b", END]
    shape = (await front.complete(logprobs=count)).json()["choices"][0]["logprobs"]
    assert shape["tokens"] == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "b", "<|im_end|>"]
    assert shape["token_logprobs"] == [-0.5] * 7
    assert shape["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert shape["top_logprobs"][0] == ({"a": -0.5, "b": -1.5} if count == 2 else {"a": -0.5})
    joined: dict[str, list[object]] = {name: [] for name in shape}
    for chunk in events(await front.complete(logprobs=count, stream=True)):
        for name, values in chunk["choices"][0]["logprobs"].items():
            joined[name] += values
    assert joined == shape


async def test_A09_usage_in_a_stream(front: Served) -> None:
    front.engine.cached_tokens = 16
    whole = (await front.chat(n=2, max_tokens=3)).json()["usage"]
    assert whole["completion_tokens"] == 6
    assert whole["prompt_tokens"] == 21
    assert whole["total_tokens"] == 27
    assert whole["prompt_tokens_details"] == {"cached_tokens": 16}
    chunks = events(await front.chat(n=2, max_tokens=3, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert not any("usage" in chunk for chunk in events(await front.chat(stream=True, **options)))


async def test_A09_cached_tokens_are_never_more_than_the_prompt(front: Served) -> None:
    front.engine.cached_tokens = 16
    usage = (await front.complete("hi")).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


async def test_A10_finish_reasons_and_objects(front: Served) -> None:
    assert set(await texts(front)) == {("hello", "stop", None)}
    assert set(await texts(front, max_tokens=3)) == {("hel", "length", None)}
    assert set(await texts(front, stop="l")) == {("he", "stop", "l")}
    assert {chunk["object"] for chunk in events(await front.chat(stream=True))} == {"chat.completion.chunk"}
    assert {chunk["object"] for chunk in events(await front.complete(stream=True))} == {"text_completion"}
    chunks = events(await front.chat(stream=True))
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])


async def test_A11_n_choices(front: Served) -> None:
    assert [choice["index"] for choice in (await front.complete(n=3)).json()["choices"]] == [0, 1, 2]
    assert len((await front.complete(n=2, best_of=2)).json()["choices"]) == 2
    for bad in ({"n": 1, "best_of": 3}, {"n": 3, "best_of": 2}, {"best_of": 10**9}):
        assert error_of(await front.complete(**bad))["param"] == "best_of"
    for n in (0, -1, 1.5, True, "2"):
        assert error_of(await front.complete(n=n))["param"] == "n"
    ends: dict[int, list[str]] = {0: [], 1: []}
    said = {0: "", 1: ""}
    for chunk in events(await front.chat(n=2, stream=True)):
        for choice in chunk["choices"]:
            assert not ends[choice["index"]], "nothing follows a choice's end"
            said[choice["index"]] += choice["delta"].get("content", "")
            ends[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert said == {0: "hello", 1: "hello"}
    assert ends == {0: ["stop"], 1: ["stop"]}


async def test_several_prompts_are_numbered_through(front: Served) -> None:
    answer = (await front.complete(["ab", [99], "d"], n=2, max_tokens=1, return_token_ids=True)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [[97, 98], [97, 98], [99], [99], [100], [100]]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 6
    streamed = events(await front.complete(["ab", [99], "d"], n=2, max_tokens=1, stream=True, return_token_ids=True))
    assert sorted(chunk["choices"][0]["index"] for chunk in streamed) == [0, 1, 2, 3, 4, 5]
    assert all("prompt_token_ids" in chunk["choices"][0] for chunk in streamed)


async def test_return_token_ids(front: Served) -> None:
    answer = (await front.chat(return_token_ids=True)).json()
    assert answer["choices"][0]["token_ids"] == [*b"hello", END]
    assert tuple(answer["prompt_token_ids"]) == front.engine.requests[0].prompt
    front.engine.script = [*b"a", *GRIN, END]
    chunks = events(await front.chat(return_token_ids=True, stream=True))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == front.engine.script
    assert "prompt_token_ids" in chunks[0]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])


async def test_request_ids(front: Served) -> None:
    answer = await front.chat(request_id="mine-1")
    assert answer.json()["id"] == "chatcmpl-mine-1"
    answer = await front.post("/v1/completions", {"prompt": "a"}, headers={"x-request-id": "from-header"})
    assert answer.json()["id"] == "cmpl-from-header"
    assert answer.headers["x-request-id"] == "from-header"
    answer = await front.client.get("/nope", headers={"x-request-id": "bad one\x7f"})
    assert len(answer.headers["x-request-id"]) == 32
    assert error_of(await front.chat(request_id="a\nb"))["param"] == "request_id"
    assert len({request.id for request in front.engine.requests}) == 2, "the engine gets ids of the front's own"


async def test_models(front: Served) -> None:
    listed = (await front.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["toy", "alias"]
    assert listed["data"][0]["max_model_len"] == 2048
    assert (await front.client.get("/v1/models/alias")).json()["id"] == "alias"
    assert (await front.chat(model="alias")).json()["model"] == "alias"
    assert (await front.chat(model=None)).json()["model"] == "toy"
    for response in (await front.client.get("/v1/models/a/b"), await front.chat(model="gpt-4")):
        error = error_of(response, 404)
        assert "'toy'" in error["message"]
        assert error["code"] == "model_not_found"


async def test_tokenize_and_detokenize(front: Served) -> None:
    answer = (await front.post("/tokenize", {"prompt": "é<|im_end|>", "return_token_strs": True})).json()
    assert answer == {
        "count": 3, "max_model_len": 2048, "tokens": [195, 169, 258],
        "token_strs": ["bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"],
    }  # fmt: skip
    assert (await front.post("/detokenize", {"tokens": answer["tokens"]})).json() == {"prompt": "é<|im_end|>"}
    assert (await front.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}
    chat = (await front.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})).json()
    await front.chat("hi")
    assert tuple(chat["tokens"]) == front.engine.requests[0].prompt
    for bad in ({"tokens": [10**30]}, {"tokens": [-1]}, {"tokens": ["a"]}, {"tokens": 5}, {}):
        assert error_of(await front.post("/detokenize", bad))["param"].startswith("tokens")
    for body in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}):
        assert error_of(await front.post("/tokenize", body))["param"] == "prompt"


async def test_A20_one_begin_token() -> None:
    front = served(tokenizer=byte_tokenizer(prefix=(256,)))
    await front.complete("a")
    await front.complete("<|endoftext|>a")
    await front.complete("a", add_special_tokens=False)
    assert [request.prompt for request in front.engine.requests] == [(256, 97), (256, 97), (97,)]


async def test_status_routes(front: Served) -> None:
    assert (await front.client.get("/health")).json() == {"status": "ok"}
    assert set((await front.client.get("/version")).json()) == {"version"}
    schema = (await front.client.get("/openapi.json")).json()
    json.dumps(schema)
    for name in ("ChatBody", "CompletionBody", "TokenizeBody", "DetokenizeBody", "Message"):
        for field, told in schema["components"]["schemas"][name]["properties"].items():
            assert told.get("description") or name == "Message", f"{name}.{field} has no description"


async def test_a_long_prompt_is_tokenized_in_a_thread() -> None:
    front = served(FakeEngine(max_model_len=100_000))
    assert (await front.complete("x" * 50_000)).json()["usage"]["prompt_tokens"] == 50_000
