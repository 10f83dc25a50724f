"""A Python package index, as a client sees it: which one the user has set up, its simple API, and its files."""

from __future__ import annotations

import ast
import base64
import http.client
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

DEFAULT_INDEX = "https://pypi.org/simple"
SIMPLE_API = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
TIMEOUT = 30  # seconds without a byte
STALLS = 5  # connections in a row that bring nothing new
CHUNK = 1 << 18
MAX_PAGE = 64 << 20
# What says that packages come from more than one index, or that only pip can reach it.
BEYOND_AN_INDEX = ("extra-index-url", "find-links", "no-index", "cert", "client-cert", "proxy", "trusted-host")


class Unreachable(Exception):
    """This way to a file did not work; another may."""


class IndexFile(NamedTuple):
    url: str
    sha256: str | None


@dataclass(frozen=True)
class PipSettings:
    """What pip's files and variables say. Without pip: nothing."""

    present: bool = False
    values: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls) -> PipSettings:
        command = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        except (OSError, subprocess.TimeoutExpired):
            return cls()
        if result.returncode != 0:
            return cls()
        found = dict(re.findall(r"(?m)^([\w:-]+\.[\w-]+)=('.*'|\".*\")$", result.stdout))
        values = {}
        for section in ("global", "download", ":env:"):  # the later one wins
            for key, text in found.items():
                if key.startswith(section + "."):
                    values[key.removeprefix(section + ".")] = str(ast.literal_eval(text))
        return cls(True, values)

    @property
    def only_an_index(self) -> bool:
        return not any(key in self.values for key in BEYOND_AN_INDEX)

    def index_url(self) -> str:
        env = os.environ
        own = env.get("PIP_INDEX_URL") or self.values.get("index-url")
        return own or env.get("UV_DEFAULT_INDEX") or env.get("UV_INDEX_URL") or DEFAULT_INDEX


def find_file(index_url: str, package: str, filename: str) -> IndexFile:
    """By the simple API, in JSON (PEP 691) or HTML (PEP 503). `package`: its normalized name."""
    page = f"{index_url.rstrip('/')}/{package}/"
    try:
        with _open(page, {"Accept": SIMPLE_API}) as response:
            base, kind = response.geturl(), response.headers.get_content_type()
            body = response.read(MAX_PAGE)
        files = _from_json(body) if kind.endswith("json") else _from_html(body)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{_shown(page)}: {_reason(error)}") from error
    except (ValueError, TypeError, KeyError) as error:  # a log-in page, for one
        raise Unreachable(f"{_shown(page)} answered with something that is no package index") from error
    if filename not in files:
        raise Unreachable(f"{_shown(page)} has no {filename}")
    url, sha256 = files[filename]
    # The index's credentials are for its own host.
    return IndexFile(_with_login(urljoin(base, url), page), sha256)


def download(url: str, path: Path, size: int, progress: Callable[[int, int], None]) -> None:
    """Make `path` hold the file, of `size` bytes, going on from what it holds. An OSError of the file system passes."""
    stalls = most = 0
    with path.open("ab") as out:
        while out.tell() < size:
            reason = "the connection ended"
            try:
                _append(url, out, size, progress)
            except urllib.error.URLError as error:
                if isinstance(error, urllib.error.HTTPError) and error.code == 416:
                    _empty(out)
                    reason = f"it has not the {size:,} bytes that it should"
                else:
                    reason = _reason(error)
                raise Unreachable(f"{_shown(url)}: {reason}") from error
            except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
                reason = _reason(error)
            stalls = 0 if out.tell() > most else stalls + 1
            most = max(most, out.tell())
            if stalls > STALLS:
                raise Unreachable(f"{_shown(url)}: {reason} after {most:,} of {size:,} bytes")


def _append(url: str, out: Any, size: int, progress: Callable[[int, int], None]) -> None:
    """One connection's worth."""
    have = out.tell()
    with _open(url, {"Range": f"bytes={have}-"} if have else {}) as response:
        start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if have and not (response.status == 206 and start and int(start[1]) == have):
            _empty(out)  # the server sends all of it
        while out.tell() <= size and (chunk := response.read(CHUNK)):
            out.write(chunk)
            progress(min(out.tell(), size), size)


def _empty(out: Any) -> None:
    out.seek(0)
    out.truncate()


def _open(url: str, headers: dict[str, str]) -> Any:
    """An HTTP response. Proxies and certificates are those of the environment."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise urllib.error.URLError("is not an http address")
    bare, login = _split_login(url)
    request = urllib.request.Request(
        bare, headers={"Accept-Encoding": "identity", "User-Agent": "nanoserve", **headers}
    )
    if login:  # not sent along to where a redirect leads
        request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
    return urllib.request.urlopen(request, timeout=TIMEOUT)


def _split_login(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=host)), unquote(login)


def _with_login(url: str, page: str) -> str:
    login, _, host = urlsplit(page).netloc.rpartition("@")
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{login}@{host}")) if login and parts.netloc == host else url


def _shown(url: str) -> str:
    return _split_login(url)[0]


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _from_json(body: bytes) -> dict[str, IndexFile]:
    return {
        file["filename"]: IndexFile(file["url"], file.get("hashes", {}).get("sha256"))
        for file in json.loads(body)["files"]
    }


def _from_html(body: bytes) -> dict[str, IndexFile]:
    anchors = _Anchors()
    anchors.feed(body.decode("utf-8"))
    found = {}
    for link in anchors.links:
        url, fragment = urldefrag(link)
        hashed = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        found[unquote(urlsplit(url).path.rpartition("/")[2])] = IndexFile(url, hashed)
    return found


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]
