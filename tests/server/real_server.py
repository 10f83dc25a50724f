"""`nanoserve serve` as a real process, and a checkpoint whose model says given pieces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import httpx
import openai
import psutil
from safetensors.torch import load_file, save_file

from nanoserve.bench.toy import make_toy
from toy_tokenizers import id_of, sentencepiece


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not happen in {seconds} seconds"
        time.sleep(0.02)


class RealServer:
    """Starts at once; whoever asks for its `url` waits until it can serve."""

    def __init__(self, folder: Path, model: Path, *flags: str, key: str = "any"):
        self._key = key
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nanoserve", "serve", str(model), "--port", "0", *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @cached_property
    def url(self) -> str:
        while True:
            ended = self.process.poll()
            for line in self.output.splitlines():
                if line.startswith("ready "):
                    return line.split()[1]
            assert ended is None, f"the server ended with {ended}: {self.errors}"
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @cached_property
    def engine(self) -> psutil.Process:
        assert self.url
        (child,) = psutil.Process(self.process.pid).children()
        assert "nanoserve.engine.child" in child.cmdline()
        return child

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self._key}"}, timeout=60)

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=self._key, max_retries=0)

    def aclient(self) -> openai.AsyncOpenAI:
        """A new one: it belongs to the loop that uses it first."""
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=self._key, max_retries=0)

    def metrics(self) -> dict[str, float]:
        assert self.http.get("/health").status_code == 200  # so that the front hears the engine's latest
        pairs = [line.split() for line in self.http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("nanoserve:"): float(value) for name, value in pairs}

    def at_rest(self) -> bool:
        found = self.metrics()
        return found["num_requests_running"] == found["num_requests_waiting"] == found["kv_cache_usage_perc"] == 0

    def stop(self) -> int:
        """Its exit status."""
        self.process.terminate()
        return self.process.wait()


# What follows what in the scripted checkpoint. A piece in <> is one byte, or a special token.
SCRIPT = {
    "<0x6C>": "lo", "lo": "▁wor", "▁wor": "ld", "ld": "</s>",  # l: "lo world"
    "<0x70>": "▁wor",  # p: a first piece with a space
    "<0x71>": "<0x41>", "<0x41>": "</s>",  # q: a first piece that is a byte
    "<0x7A>": "al", "al": "pha▁be", "pha▁be": "ta</", "ta</": "s>x", "s>x": "</s>",  # z: "alpha beta</s>x"
    "<0x6D>": "one", "one": "▁two", "▁two": "▁three", "▁three": "</s>",  # m: "one two three"
    "<0x65>": "<0xF0>", "<0xF0>": "<0x9F>", "<0x9F>": "<0x8E>", "<0x8E>": "<0x89>", "<0x89>": "</s>",  # e: an emoji
}  # fmt: skip
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def make_scripted(folder: Path, script: Mapping[str, str] = SCRIPT) -> Path:
    """A toy with a SentencePiece-like tokenizer that adds BOS and has byte fallback, and a model that follows the
    script: each scripted token has an axis of the hidden state, on which it drowns out all else, and on which the head
    sees what follows it."""
    pieces = [piece for piece in dict.fromkeys((*script, *script.values())) if not piece.startswith("<")]
    tokenizer = sentencepiece(("▁", *pieces))
    make_toy(folder, vocab_size=tokenizer.vocab_size, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    facts = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": True, **recommended}))
    weights = load_file(folder / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    head[:, : len(script)] = 0
    head[[id_of(tokenizer, piece) for piece in script.values()]] = 0
    for axis, (piece, following) in enumerate(script.items()):
        embedding[id_of(tokenizer, piece)] = 0
        embedding[id_of(tokenizer, piece), axis] = 400
        head[id_of(tokenizer, following), axis] = 3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
