"""ApiKeys: lets in who brings a key. Open without one: /health and /version, which say nothing of anybody's use.

Everything else wants a key, /metrics and /docs too; a route that does not exist answers 401 as those that do.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from nanoserve.server.errors import error_body, error_response

OPEN_ROUTES = frozenset({"/health", "/version"})


class ApiKeys:
    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in OPEN_ROUTES or self._admits(scope["headers"]):
            return await self._app(scope, receive, send)
        body = error_body(401, "A valid API key is missing: 'Authorization: Bearer KEY'.", code="invalid_api_key")
        return await error_response(401, body, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _admits(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """One Authorization header, with a key of ours. Digests are compared in constant time, each with each."""
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        digest = _digest(key.strip(b" "))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
