"""The front on a socket: clients that hang up, engines that die, heads without end, metrics that stay small."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nanoserve.server.app import create_app
from nanoserve.server.serve import Server, serve
from nanoserve.server.settings import ServerSettings
from server.fake_engine import FakeEngine
from server.front_fixtures import byte_tokenizer, error_of, served


@asynccontextmanager
async def live(engine: FakeEngine, **settings: Any) -> AsyncIterator[int]:
    """A server on a free port; yields the port."""
    given = ServerSettings(port=0, served_model_name=("toy",), shutdown_timeout=5, **settings)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = Server(create_app(engine, byte_tokenizer(), given), given, ready.set_result)
    task = asyncio.create_task(server.serve())
    try:
        yield int((await ready).rpartition(":")[2].partition("/")[0])
    finally:
        server.should_exit = True
        await task


def post(path: str, **fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in five seconds")


async def hang_up(port: int, request: bytes, after: bytes | None, engine: FakeEngine) -> None:
    """Sends a request; closes once `after` was received, or once the engine runs it."""
    before = len(engine.requests)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    if after:
        await reader.readuntil(after)
    else:
        await until(lambda: len(engine.requests) > before)
    writer.close()


@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"stream": True}, {"stream": True, "n": 4}, {"prompt": ["a", "b"]}])
@pytest.mark.parametrize("stalls_after", [0, 2])
async def test_A33_a_client_that_hangs_up_ends_its_requests(fields: dict[str, Any], stalls_after: int) -> None:
    engine = FakeEngine()
    engine.stalls_after = stalls_after
    after = b'"text"' if fields.get("stream") and stalls_after else None
    async with live(engine) as port:
        for _ in range(10):
            await hang_up(port, post("/v1/completions", **{"prompt": "a", **fields}), after, engine)
        await until(lambda: not engine.running)
        assert {request for request, index in engine.aborted if index is None} == {
            request.id for request in engine.requests
        }
        engine.stalls_after = None
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/v1/completions", prompt="a"))
        assert b"200 OK" in await reader.readline()
        assert b"hello" in await reader.readuntil(b"hello")
        writer.close()


async def test_A33_a_client_that_goes_away_in_its_body() -> None:
    engine = FakeEngine()
    async with live(engine) as port:
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(post("/v1/completions", prompt="a" * 100)[:-20])
            await writer.drain()
            writer.close()
        await asyncio.sleep(0.05)
    assert not engine.requests


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_serve_after_what_runs(number: signal.Signals) -> None:
    engine = FakeEngine()
    settings = ServerSettings(port=0, served_model_name=("toy",))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(create_app(engine, byte_tokenizer(), settings), settings, ready.set_result))
    reader, writer = await asyncio.open_connection("127.0.0.1", int((await ready).rpartition(":")[2]))
    engine.script = [ord("a")]
    writer.write(post("/v1/completions", prompt="a", max_tokens=1000))
    await until(lambda: bool(engine.running))
    os.kill(os.getpid(), number)
    assert b"200 OK" in await reader.readline()
    writer.close()
    await serving


async def test_A49_a_dead_engine() -> None:
    front = served()
    front.engine.dies_after = 2
    front.engine.per_update = 1
    lines = (await front.complete("a", stream=True)).text.strip().split("\n\n")
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["type"] == "server_error"
    assert last["error"]["code"] == "engine_dead"
    assert len(lines) > 1
    assert error_of(await front.client.get("/health"), 503)
    for stream in (False, True):
        assert error_of(await front.chat(stream=stream), 503)["code"] == "engine_dead"
        assert error_of(await front.complete(["a", "b"], stream=stream), 503)
    assert (await front.client.get("/version")).status_code == 200
    assert (await front.client.get("/metrics")).status_code == 200


async def test_A49_death_before_the_first_token_is_a_status() -> None:
    front = served()
    front.engine.dies_after = 0
    assert error_of(await front.chat(stream=True), 503)


async def test_A49_an_engine_that_does_not_answer() -> None:
    front = served(health_timeout=0)
    front.engine.answers_pings = False
    assert error_of(await front.client.get("/health"), 503)


@pytest.mark.parametrize(
    "head",
    [b"GET /health HTTP/1.1\r\nx: " + b"a" * 10**6, b"GET /" + b"a" * 10**6,
     b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 10**5],
)  # fmt: skip
async def test_A52_heads_have_a_bound(head: bytes) -> None:
    async with live(FakeEngine()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        answer = await reader.readline()
        assert b"400" in answer
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 8000 + b"\r\n\r\n")
        assert b"200 OK" in await reader.readline()
        writer.close()


async def answered(port: int, *parts: bytes) -> bytes:
    """All that comes back until the server closes; nothing where it does so without a look at the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.writelines(parts)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_A52_trailers_have_a_bound() -> None:
    body = json.dumps({"prompt": "a"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n" % (len(body), body)
    async with live(FakeEngine()) as port:
        for endless in (b"a: b\r\n" * 50_000, b"a: " + b"b" * 300_000):
            assert b"200 OK" not in await answered(port, chunked, endless)
        assert b"200 OK" in await answered(port, chunked.replace(b"host", b"connection: close\r\nhost", 1), b"\r\n")


async def test_an_upgrade_that_is_offered_with_a_body_is_passed_over() -> None:
    """As curl --http2 and Java's client do."""
    offer = b"connection: close, upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\nhost"
    async with live(FakeEngine()) as port:
        answer = await answered(port, post("/v1/completions", prompt="a").replace(b"host", offer, 1))
    assert b"200 OK" in answer
    assert b"hello" in answer


async def test_a_stream_to_HTTP_1_0_has_no_chunks() -> None:
    async with live(FakeEngine()) as port:
        request = post("/v1/completions", prompt="a", stream=True).replace(b"HTTP/1.1", b"HTTP/1.0")
        head, _, body = (await answered(port, request)).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_a_root_path_may_be_stripped_or_not() -> None:
    front = served(root_path="/llm", api_key=("key",))
    for prefix in ("", "/llm"):
        assert (await front.client.get(prefix + "/health")).status_code == 200
        assert (await front.client.get(prefix + "/metrics")).status_code == 401
        models = await front.client.get(prefix + "/v1/models", headers={"authorization": "Bearer key"})
        assert models.status_code == 200
    assert (await front.client.get("/llm/llm/health")).status_code == 401
    async with live(FakeEngine(), root_path="/llm") as port:
        for prefix in (b"", b"/llm"):
            assert b"200 OK" in await answered(port, b"GET %s/health HTTP/1.0\r\n\r\n" % prefix)


async def test_A52_a_body_without_end() -> None:
    engine = FakeEngine()
    async with live(engine, max_body_bytes=10**5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                     b"transfer-encoding: chunked\r\n\r\n" + (b"1000\r\n" + b" " * 4096 + b"\r\n") * 100)  # fmt: skip
        assert b"413" in await reader.readline()
        writer.close()
        bomb = gzip.compress(b" " * 10**6)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                     b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(bomb) + bomb)  # fmt: skip
        assert b"415" in await reader.readline()
        writer.close()


async def test_several_requests_on_one_connection() -> None:
    async with live(FakeEngine(), max_header_bytes=1000) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(5):
            writer.write(post("/tokenize", prompt="a" * 3000))
            assert b"200 OK" in await reader.readline()
            await reader.readuntil(b'"count":3000')
            await reader.readuntil(b"]}")
        writer.close()


def series(text: str) -> set[str]:
    return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}


async def test_A61_series_do_not_grow() -> None:
    front = served()
    before = series((await front.client.get("/metrics")).text)
    for number in range(50):
        await front.chat(f"secret{number}", user=f"user{number}", request_id=f"id{number}")
        await front.chat(model=f"model{number}")
        await front.client.get(f"/path{number}")
        await front.complete(logit_bias={str(1000 + number): 1})
    text = (await front.client.get("/metrics")).text
    assert series(text) == before
    for word in ("secret", "user", "model1", "path", "id1"):
        assert word not in text


async def test_metrics_say_what_happened() -> None:
    front = served()
    await front.complete(["ab", "c"], n=2)
    await front.chat(max_tokens=2)
    await front.chat(foo=1)
    await front.complete("a" * 3000)
    await front.client.get("/v1/models/other")
    front.engine.dies_after = 0
    await front.chat()
    await front.client.get("/health")
    found = {}
    for line in (await front.client.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.removeprefix("nanoserve:")] = float(value)
    assert found['request_success_total{finished_reason="stop"}'] == 4
    assert found['request_success_total{finished_reason="length"}'] == 1
    assert found['request_success_total{finished_reason="error"}'] == 1
    assert found['admission_rejections_total{reason="invalid"}'] == 1
    assert found['admission_rejections_total{reason="context_length"}'] == 1
    assert found['admission_rejections_total{reason="unavailable"}'] == 1
    assert found["time_to_first_token_seconds_count"] == 3
    assert found["request_queue_time_seconds_sum"] == 0.75
    assert found["request_prompt_tokens_sum"] == 3 + 21
    assert found["request_generation_tokens_sum"] == 4 * 6 + 2
    assert found["e2e_request_latency_seconds_count"] == 5
    assert found["inter_token_latency_seconds_count"] > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
                 "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total",
                 "generation_tokens_total"):  # fmt: skip
        assert name in found


def test_the_front_reaches_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, nanoserve.server.app, nanoserve.server.serve; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
