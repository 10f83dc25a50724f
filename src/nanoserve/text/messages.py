"""Messages: from what an API's caller sends to what chat templates expect. It knows no template's language."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from nanoserve.core.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")


class Arguments(dict[str, Any]):
    """A tool call's arguments, for templates that expect an object and for those that expect its JSON text."""

    def __init__(self, value: Mapping[str, Any], text: str):
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def plain_messages(messages: Sequence[Mapping[str, Any]], *, keeps_developer: bool) -> list[dict[str, Any]]:
    """Checked copies, in plain data. Content parts are joined with a newline; keys without a value are left out, so
    that a null and a missing content are the same; the developer is the system, for templates that know none.

    Raises RequestError, naming the message."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        _refuse("must be a list of at least one message")
    return [_plain(message, f"[{index}]", keeps_developer) for index, message in enumerate(messages)]


def _plain(message: Mapping[str, Any], where: str, keeps_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(f"{where} is not an object")
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if role not in ROLES:
        _refuse(f"{where}.role is {role!r:.40}; known are {', '.join(ROLES)}")
    if role == "developer" and not keeps_developer:
        plain["role"] = "system"
    if "content" in plain:
        plain["content"] = _text(plain["content"], where)
    elif role != "assistant" or not (plain.get("tool_calls") or any(name in plain for name in _REASONING)):
        _refuse(f"{where}.content is missing, which a message with the role {role} needs")
    if "tool_calls" in plain and not _are_calls(plain["tool_calls"]):
        _refuse(f"{where}.tool_calls must be a list of objects, each with a function that has a name")
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    if reasoning is not None:  # templates read it under the first or the second name
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not all(isinstance(part, Mapping) for part in content):
        _refuse(f"{where}.content must be a text or a list of parts")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            _refuse(f"{where}.content has a part of the type {part.get('type')!r:.40}; this model takes text alone")
    return "\n".join(part["text"] for part in content)


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, Sequence) and all(
        isinstance(call, Mapping)
        and isinstance(function := call.get("function", call), Mapping)
        and isinstance(function.get("name"), str)
        for call in calls
    )


def with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message, with the arguments of its tool calls as `Arguments`. Text that is no JSON object stays as it is."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function", call))
        function["arguments"] = _arguments(function.get("arguments", {}))
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _arguments(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Arguments(value, json.dumps(value, ensure_ascii=False))
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if isinstance(parsed, dict):
            return Arguments(parsed, value)
    return value


def _refuse(why: str) -> NoReturn:
    raise RequestError(f"messages{why if why.startswith('[') else ' ' + why}", param="messages", code="invalid_value")
