"""Refusals that must not hang on an assert. Run as a script, under `python -O`; prints how many held.

    python -O tests/refusals.py FOLDER

FOLDER: an empty one, for hostile checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanoserve.bench.toy import make_toy
from nanoserve.core.config import EngineConfig
from nanoserve.core.errors import CheckpointError, ConfigError, NanoserveError, RequestError
from nanoserve.core.params import SamplingParams
from nanoserve.engine.admission import make_request
from nanoserve.engine.build import build_engine
from nanoserve.loading.gguf import read_gguf
from nanoserve.loading.open import open_checkpoint
from nanoserve.text.chat import ChatTemplate
from nanoserve.text.load import load_tokenizer
from server.front_fixtures import served

USER = {"role": "user", "content": "a"}


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def expect(kind: type[NanoserveError], function: Callable[[], Any]) -> None:
    try:
        function()
    except kind:
        return
    raise SystemExit(f"line {function.__code__.co_firstlineno}: not refused")


def with_code(folder: Path, marker: Path) -> Path:
    """A checkpoint that asks for its own code to be run."""
    make_toy(folder)
    for name in ("modeling_x", "configuration_x", "tokenization_x"):
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')")
    classes = {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        facts = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps({**facts, "auto_map": {**classes, "AutoTokenizer": ["tokenization_x.T"]}})
        )
    return folder


def sharded(folder: Path, name: str) -> Path:
    make_toy(folder, shards=2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    return folder


async def asked(path: str, body: Any, key: str | None = None, **settings: Any) -> int:
    front = served(**settings)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    status = (await front.post(path, body, headers=headers)).status_code
    if front.engine.requests:
        raise SystemExit(f"{path} {body}: reached the engine")
    return status


def main(folder: Path) -> None:
    assert not __debug__, "this is for python -O"
    marker = folder / "marker"
    checkpoint = with_code(folder / "code", marker)
    load_tokenizer(checkpoint)
    engine = build_engine(EngineConfig(model=str(checkpoint), backend="torch", max_model_len=64))

    held = 0
    pickled, truncated = folder / "pickled.bin", folder / "x.gguf"
    pickled.write_bytes(pickle.dumps(Payload(marker)))
    truncated.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (2**63).to_bytes(8, "little") * 2)
    wide = make_toy(folder / "wide")
    save_file({"model.embed_tokens.weight": torch.zeros(3, 3)}, wide / "model.safetensors")
    for kind, function in [
        (CheckpointError, lambda: open_checkpoint(pickled)),
        (CheckpointError, lambda: read_gguf(truncated)),
        (CheckpointError, lambda: open_checkpoint(sharded(folder / "outside", "../x.safetensors"))),
        (CheckpointError, lambda: open_checkpoint(sharded(folder / "missing", "x.safetensors"))),
        (CheckpointError, lambda: build_engine(EngineConfig(model=str(wide), backend="torch"))),
        (ConfigError, lambda: EngineConfig(dtype="int3")),
        (ConfigError, lambda: build_engine(EngineConfig(model=str(checkpoint), kv_cache_memory_bytes=1))),
        (RequestError, lambda: SamplingParams(n=10**9)),
        (RequestError, lambda: SamplingParams(temperature=float("nan"))),
        (RequestError, lambda: make_request(engine.info, [10**6], SamplingParams(), id="a")),
        (RequestError, lambda: make_request(engine.info, [1] * 64, SamplingParams(), id="a")),
        (RequestError, lambda: ChatTemplate("{{ ''.__class__.__mro__ }}", {}).render([USER])),
        (RequestError, lambda: ChatTemplate("{{ x }}", {}).render([USER], messages2="x")),
    ]:
        expect(kind, function)
        held += 1
    picture = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    for status, path, body, key in [
        (401, "/v1/completions", {"prompt": "a"}, "guess"),
        (401, "/v1/completions", {"prompt": "a"}, None),
        (400, "/v1/completions", {"prompt": []}, "key"),
        (400, "/v1/completions", {"prompt": "a", "echo": True}, "key"),
        (400, "/v1/chat/completions", {"messages": [USER], "tools": [{}]}, "key"),
        (400, "/v1/chat/completions", {"messages": [{"role": "user", "content": picture}]}, "key"),
        (413, "/v1/completions", {"prompt": "a" * 2000}, "key"),
    ]:
        found = asyncio.run(asked(path, body, key, api_key=("key",), max_body_bytes=1000))
        if found != status:
            raise SystemExit(f"{path} {str(body)[:100]}: {found} in place of {status}")
        held += 1
    if marker.exists():
        raise SystemExit("code of a checkpoint was run")
    print(held)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
