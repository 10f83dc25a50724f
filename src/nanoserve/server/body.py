"""Body: strict request bodies. What is read is JSON of the standard, whole, bounded, and free of unknown fields."""

from __future__ import annotations

import asyncio
import difflib
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema, from_json

from nanoserve.core.errors import RequestError
from nanoserve.server.errors import HttpError
from nanoserve.server.settings import ServerSettings

INLINE_BYTES = 2**15  # some milliseconds of work at most; longer bodies are read in threads, so that streams flow on


class Body(BaseModel):
    """No conversions ("1" is no number), no unknown fields, no infinities."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any) -> Any:
        # pydantic would collect one error a field, without bound.
        unknown = value.keys() - cls.model_fields.keys() if isinstance(value, dict) else ()
        if unknown:
            name = min(unknown)[:64]
            near = difflib.get_close_matches(name, cls.model_fields, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(f"unknown field {name!r}{hint}", param=name, code="unknown_parameter")
        return value


@dataclass(frozen=True)
class Refused:
    """Annotates a field that is known and not built: only null and the values that mean its absence are taken."""

    absent: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if value is None or any(type(value) is type(known) and value == known for known in self.absent):
            return value
        taken = " or ".join(repr(known) for known in (*self.absent, None)).replace("None", "null")
        raise RequestError(f"this server does not support it yet; only {taken} is taken", code="unsupported_parameter")


@dataclass(frozen=True)
class Bounded:
    """Annotates a list or object: longer ones are refused before a look at what they hold, and of a list's bad
    entries the first is reported alone."""

    size: int = 2**16

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        if schema["type"] == "list":
            schema = {**schema, "fail_fast": True}
        return core_schema.no_info_before_validator_function(self._check, schema)

    def _check(self, value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > self.size:
            raise RequestError(f"has {len(value)} entries; at most {self.size} are taken", code="invalid_value")
        return value


AnyBody = TypeVar("AnyBody", bound=Body)


async def read_body(http: Request, model: type[AnyBody], settings: ServerSettings) -> AnyBody:
    """Raises RequestError (400, 408, 413, 415) for whatever a client may send in place of a `model`."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a foreign web page may send without asking is never JSON
        raise HttpError(415, "The header 'Content-Type: application/json' is missing.", code="unsupported_media_type")
    if http.headers.get("content-encoding", "identity") != "identity":
        raise HttpError(415, "A compressed body is not taken.", code="unsupported_media_type")
    data = await _bytes(http, settings)
    if len(data) > INLINE_BYTES:
        return await asyncio.to_thread(_read, model, data)
    return _read(model, data)


def _read(model: type[AnyBody], data: bytes) -> AnyBody:
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON in UTF-8: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.", code="invalid_json")
    return parse(model, value)


async def _bytes(http: Request, settings: ServerSettings) -> bytes:
    limit = settings.max_body_bytes
    too_long = HttpError(413, f"The body is longer than {limit} bytes.", code="body_too_large")
    length = http.headers.get("content-length", "0")
    if len(length) > 18 or int(length) > limit:  # the HTTP parser let digits alone through
        raise too_long
    data = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for chunk in http.stream():
                data += chunk
                if len(data) > limit:
                    raise too_long
    except TimeoutError:
        raise HttpError(408, f"The body did not come within {settings.body_timeout} s.", code="timeout") from None
    return bytes(data)


def parse(model: type[AnyBody], value: dict[str, Any]) -> AnyBody:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        # Of the branches of a union, the one that got furthest is what was meant.
        first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    missing = first["type"] == "missing"
    path = _path(first["loc"], value, missing)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        raise _at(path, cause)
    code = "missing_required_parameter" if missing else "invalid_type"
    raise RequestError(f"{path}: {first['msg']}", param=path, code=code)


def _at(path: str, cause: RequestError) -> RequestError:
    """A validator's refusal, whose `param` is relative to the model it checks, or a field's, which has none."""
    if cause.param is None:
        return RequestError(f"{path}: {cause.message}", param=path, code=cause.code)
    return RequestError(cause.message, param=f"{path}.{cause.param}" if path else cause.param, code=cause.code)


def _path(location: tuple[int | str, ...], value: Any, missing: bool) -> str:
    """As in "messages[0].content": pydantic's location without the names of its own validators."""
    path = ""
    for step in location:
        match value, step:
            case list(), int() if step < len(value):
                path, value = f"{path}[{step}]", value[step]
            case dict(), str() if step in value or missing:
                path, value = f"{path}.{step}" if path else step, value.get(step)
    return path
