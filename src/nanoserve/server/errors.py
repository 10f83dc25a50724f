"""The one shape of every error that leaves the server: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from nanoserve.core.errors import EngineDeadError, NanoserveError, RequestError


class HttpError(RequestError):
    """A RequestError that is not 400: its status is the instance's own."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message, param=param, code=code)
        self.status = status


def error_status(error: NanoserveError) -> int:
    match error:
        case RequestError():
            return error.status
        case EngineDeadError():
            return 503
    return 500


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """`type` follows from the status, as clients expect it."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: NanoserveError) -> dict[str, object]:
    code = getattr(error, "code", None) or ("engine_dead" if isinstance(error, EngineDeadError) else None)
    return error_body(error_status(error), str(error), getattr(error, "param", None), code)


def error_response(status: int, body: object, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Whatever goes wrong in a route is answered in the one shape."""

    @app.exception_handler(NanoserveError)
    async def refused(http: Request, error: NanoserveError) -> Response:
        status = error_status(error)
        return error_response(status, describe(error), {"retry-after": "1"} if status == 429 else None)

    @app.exception_handler(HTTPException)
    async def unrouted(http: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code == 404:
            message = "There is no such route; GET /docs lists those that exist."
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"This route takes {allowed}, not {http.method:.20}."
        return error_response(error.status_code, error_body(error.status_code, message), error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(http: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(http: Request, error: Exception) -> Response:
        # The traceback goes to the log: starlette raises the error again once this is sent.
        return error_response(500, error_body(500, "The server failed on this request; its log says where."))
