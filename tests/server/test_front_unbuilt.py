"""What is not built yet answers with a refusal that names the field, at once, and never with a plain answer: tools,
constrained output, reasoning apart from the answer, adapters. The inputs are those that broke other engines."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from server.fake_engine import END
from server.front_fixtures import Served, error_of, events, served


@pytest.fixture
def front() -> Served:
    return served()


async def refused(front: Served, field: str, value: Any, code: str = "unsupported_parameter") -> None:
    """On every route that generates, whole and streamed; the engine hears of none."""
    for ask in (front.chat, front.complete):
        for stream in (False, True):
            error = error_of(await ask(**{field: value}, stream=stream))
            assert error["param"] == field
            assert error["code"] in (code, "unknown_parameter")
    assert not front.engine.requests


# ---- tools


def tool(name: Any = "f", parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {"type": "object"}}}


@pytest.mark.parametrize("choice", ["auto", "required", "none", {"type": "function", "function": {"name": "f"}}])
async def test_A25_tools_are_refused(front: Served, choice: Any) -> None:
    """So no stream can number calls wrongly."""
    for stream in (False, True):
        both = {"tools": [tool("f"), tool("g")], "tool_choice": choice, "parallel_tool_calls": True}
        assert error_of(await front.chat(**both, stream=stream))["param"] in ("tools", "tool_choice")
    await refused(front, "tools", [tool("f"), tool("g")])


async def test_A25_what_looks_like_a_call_is_text(front: Served) -> None:
    said = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>' * 2
    for per_update in (1, 3, 1000):
        front.engine.script = [*said.encode(), END]
        front.engine.per_update = per_update
        message = (await front.chat()).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": said}
        deltas = [chunk["choices"][0]["delta"] for chunk in events(await front.chat(stream=True))]
        assert "".join(delta.get("content", "") for delta in deltas) == said
        assert not any("tool_calls" in delta for delta in deltas)


def one_property(schema: Any) -> dict[str, Any]:
    return tool(parameters={"type": "object", "properties": {"a": schema}})


@pytest.mark.parametrize(
    "tools",
    [
        [one_property({"type": "string", "pattern": "*["})],
        [tool(parameters={"type": "something"})],
        [tool(parameters={"type": []})],
        [tool(parameters=5)],
        [tool("")],
        [tool(None)],
        [tool(f"f{number}") for number in range(300)],
        "tools", 5, {}, [5], [None],
    ],
)  # fmt: skip
async def test_A26_odd_tools_are_refused(front: Served, tools: Any) -> None:
    await refused(front, "tools", tools)
    assert (await front.chat()).status_code == 200


async def test_A26_a_choice_of_a_tool_that_is_absent(front: Served) -> None:
    await refused(front, "tool_choice", {"type": "function", "function": {"name": "absent"}})


# ---- reasoning


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reasoning_effort", "high"), ("reasoning", {"effort": "low"}), ("include_reasoning", True),
        ("separate_reasoning", True), ("enable_thinking", False), ("thinking", {"type": "enabled"}),
        ("thinking_token_budget", 100),
    ],
)  # fmt: skip
async def test_A27_reasoning_apart_from_the_answer_is_refused(front: Served, field: str, value: Any) -> None:
    await refused(front, field, value)


@pytest.mark.parametrize("said", ["<think>step</think>Answer", "step</think>Answer", "<think>step, and no end"])
async def test_A27_what_a_model_thinks_is_part_of_its_text(front: Served, said: str) -> None:
    for per_update in range(1, len(said) + 2):
        front.engine.script = [*said.encode(), END]
        front.engine.per_update = per_update
        answer = (await front.chat()).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": said}
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(said) + 1
        deltas = [chunk["choices"][0]["delta"] for chunk in events(await front.chat(stream=True))]
        assert "".join(delta.get("content", "") for delta in deltas) == said
        assert not any(delta.keys() - {"role", "content"} for delta in deltas)


# ---- constrained output


def schema(value: Any, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": value}}


async def no_constraint(front: Served, value: Any) -> None:
    """However it is asked for."""
    await refused(front, "response_format", schema(value))
    await refused(front, "structured_outputs", {"json": value})
    await refused(front, "guided_json", value)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "pattern": r"^a\!$"}, {"type": "string", "pattern": "(?=a)b"}, {"unevaluatedItems": False},
        {"$ref": "#/$defs/nowhere"}, {"type": "integer", "minimum": 5, "maximum": 4}, {"enum": []},
    ],
)  # fmt: skip
async def test_A28_a_schema_is_never_dropped(front: Served, value: Any) -> None:
    await no_constraint(front, value)


@pytest.mark.parametrize("kind", [{"type": "json_object"}, {"type": "json_schema"}, {"type": "banana"}, {}, "json", 5])
async def test_A28_a_response_format_is_never_dropped(front: Served, kind: Any) -> None:
    await refused(front, "response_format", kind)
    assert (await front.chat(response_format={"type": "text"})).status_code == 200


@pytest.mark.parametrize("value", [{"type": "objec"}, {"properties": {"a": 5}}, "{not json", 5, [], None])
async def test_A29_an_invalid_schema_harms_nobody(front: Served, value: Any) -> None:
    await refused(front, "response_format", schema(value))
    assert (await front.complete()).json()["choices"][0]["text"] == "hello"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "((("), ("grammar", "root ::= "), ("choice", []), ("structural_tag", "<"), ("json_object", True),
        ("whitespace_pattern", "*"),
    ],
)  # fmt: skip
async def test_A29_other_constraints_are_refused(front: Served, kind: str, value: Any) -> None:
    await refused(front, "structured_outputs", {kind: value})
    await refused(front, f"guided_{kind}", value)
    await refused(front, kind, value)
    assert (await front.complete()).json()["choices"][0]["text"] == "hello"


async def test_A30_an_object_is_refused_before_whitespace_can_run_away(front: Served) -> None:
    front.engine.script = list(b" \n" * 100)
    await no_constraint(front, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.mark.parametrize("ascii", [True, False])
async def test_A31_other_scripts_are_refused_in_every_encoding(front: Served, ascii: bool) -> None:
    for value in (
        {"enum": ["在线", "离线", "😀"]}, {"const": "Sjöfart"}, {"type": "object", "properties": {"größe": {}}},
        {"type": "string", "pattern": "^[٠-٩]+$"},
    ):  # fmt: skip
        for field, wanted in (("response_format", schema(value)), ("structured_outputs", {"json": value})):
            body = json.dumps({"prompt": "a", field: wanted}, ensure_ascii=ascii).encode()
            assert error_of(await front.post("/v1/completions", body))["param"] == field
    assert not front.engine.requests


def nested(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


@pytest.mark.parametrize("regex", ["((a+)+)+b", "(a|a)*{50}", "a{1,100000}", "(a?){30}a{30}", "a" * 100_000])
async def test_A32_a_costly_regex_is_refused_uncompiled(front: Served, regex: str) -> None:
    await refused(front, "structured_outputs", {"regex": regex})
    await refused(front, "response_format", schema({"type": "string", "pattern": regex}))
    await refused(front, "response_format", schema({"$ref": "#"}))
    await refused(front, "structured_outputs", {"grammar": "root ::= root root | root"})


async def test_A32_a_schema_of_any_depth_is_refused(front: Served) -> None:
    await refused(front, "response_format", schema(nested(50)))
    error = error_of(await front.chat(response_format=schema(nested(400))))
    assert error["code"] == "invalid_json", "deeper than the parser goes"


async def test_A62_schemas_that_differ_leave_nothing_behind(front: Served) -> None:
    async def ask(numbers: range) -> None:
        for number in numbers:
            wanted = schema({"enum": [f"value {number} " * 200]})
            assert error_of(await front.chat(response_format=wanted, max_tokens=1))["param"] == "response_format"

    await ask(range(20))
    tracemalloc.start()
    try:
        await ask(range(20, 60))
        before = tracemalloc.get_traced_memory()[0]
        await ask(range(60, 160))
        assert tracemalloc.get_traced_memory()[0] - before < 100_000, "100 schemas of 3,000 bytes"
    finally:
        tracemalloc.stop()
    assert not front.engine.requests


# ---- adapters


async def test_A36_adapters_are_refused(front: Served) -> None:
    for field, value in (("lora_request", {"name": "a"}), ("lora_path", "a"), ("adapter", "a"), ("adapter_id", 1)):
        await refused(front, field, value)
    for name in ("toy:adapter", "adapter"):
        assert error_of(await front.chat(model=name), 404)["param"] == "model"
    assert error_of(await front.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}), 404)


# ---- drafts


async def test_A50_drafts_are_refused(front: Served) -> None:
    for field, value in (("speculative_config", {"method": "ngram"}), ("num_speculative_tokens", 4)):
        await refused(front, field, value)
    prediction = {"type": "content", "content": "hello hello hello"}
    assert error_of(await front.chat(prediction=prediction))["param"] == "prediction"
    assert not front.engine.requests
