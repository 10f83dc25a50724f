"""The first figures of a CPU machine: start, memory, one stream, sixteen clients, beside transformers in bf16.

    python bench/cpu_figures.py [--repeats 3] [--out docs/bench/cpu.json]

Starts `nanoserve serve` with the default model (already pulled) in a process of its own, and times it from outside
over HTTP. transformers runs in this process, in turns with the served stream, from the same GGUF file. Prints a
table and writes JSON; every figure is a median over `--repeats`, and the raw values are kept beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

PROMPT = "Explain in simple words why the sky is blue during the day and red in the evening."
OUTPUT = 128
CLIENTS = 16
WORKLOADS = {"128_in_64_out": (128, 64, 32), "16_in_128_out": (16, 128, 32)}  # tokens in, out; requests of 16 clients


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """`nanoserve serve` as a user starts it."""

    def __init__(self, extra: list[str]):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.started = time.perf_counter()
        command = [sys.executable, "-m", "nanoserve", "serve", "--port", str(self.port), *extra]
        self.log = open(os.devnull, "w")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def first_token(self) -> float:
        """Seconds from the start of the process to the first token of a chat completion."""
        while True:
            assert self.process.poll() is None, "the server ended"
            try:
                stream = stream_chat(self.url, "Hi", 1)
                next(stream)
                return time.perf_counter() - self.started
            except httpx.ConnectError:
                time.sleep(0.02)

    def memory(self) -> dict[str, float]:
        """MB of the process and its children: RSS counts shared pages in each, PSS counts them once."""
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        infos = [process.memory_full_info() for process in family]
        return {"rss_mb": sum(i.rss for i in infos) / 1e6, "pss_mb": sum(i.pss for i in infos) / 1e6}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def stream_chat(url: str, content: str, max_tokens: int) -> Any:
    body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": content}], "stream": True,
            "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):
                    yield time.perf_counter()


def one_stream(url: str, prompt: str) -> dict[str, float]:
    start = time.perf_counter()
    times = list(stream_chat(url, prompt, OUTPUT))
    return {"ttft_ms": (times[0] - start) * 1e3, "tok_s": (OUTPUT - 1) / (times[-1] - times[0])}


async def many_clients(url: str, clients: int, requests: int, tokens_in: int, tokens_out: int, seed: int) -> float:
    """Output tokens a second of a closed loop of `clients` over token-id prompts that share nothing."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000, 40000) for _ in range(tokens_in)] for _ in range(requests)]

    async def client(http: httpx.AsyncClient) -> int:
        tokens = 0
        while prompts:
            body = {"model": "smollm2-135m-instruct", "prompt": prompts.pop(), "max_tokens": tokens_out,
                    "temperature": 0, "ignore_eos": True, "stream": True,
                    "stream_options": {"include_usage": True}}  # fmt: skip
            async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                        tokens += usage["completion_tokens"]
        return tokens

    async with httpx.AsyncClient(timeout=600) as http:
        start = time.perf_counter()
        tokens = sum(await asyncio.gather(*(client(http) for _ in range(clients))))
        elapsed = time.perf_counter() - start
    assert tokens == requests * tokens_out, f"{tokens} tokens came instead of {requests * tokens_out}"
    return tokens / elapsed


def load_peer(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()

    def run(ids: list[int]) -> float:
        """Decode tokens a second: the time of OUTPUT tokens less the time of one."""
        with torch.inference_mode():
            seconds = []
            for tokens in (1, OUTPUT):
                start = time.perf_counter()
                model.generate(
                    torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
                )
                seconds.append(time.perf_counter() - start)
        return (OUTPUT - 1) / (seconds[1] - seconds[0])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("serve", nargs="*", help="further flags of `nanoserve serve`, after --")
    args = parser.parse_args()

    from nanoserve.loading.pull import pull

    path = pull("smollm2-135m-instruct")
    raw: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        raw.setdefault(name, []).append(value)
        print(f"  {name}: {value:.2f}", flush=True)

    for _ in range(args.repeats):
        server = Server(args.serve)
        try:
            note("start_to_first_token_s", server.first_token())
            note("rss_after_first_token_mb", server.memory()["rss_mb"])
            note("pss_after_first_token_mb", server.memory()["pss_mb"])
        finally:
            server.stop()
    server = Server(args.serve)
    try:
        server.first_token()
        peer = None if args.no_peer else load_peer(path)
        ids = httpx.post(f"{server.url}/tokenize", json={"messages": [{"role": "user", "content": PROMPT}]}).json()
        for number in range(args.repeats):
            figures = one_stream(server.url, f"{number}. {PROMPT}")  # numbered: no help from the prefix cache
            note("one_stream_tok_s", figures["tok_s"])
            note("one_stream_ttft_ms", figures["ttft_ms"])
            if peer is not None:
                note("transformers_bf16_tok_s", peer(ids["tokens"]))
        for number in range(args.repeats):
            for name, (tokens_in, tokens_out, requests) in WORKLOADS.items():
                for clients, count, seed in ((1, 3, 1000 + number), (CLIENTS, requests, number)):
                    run = many_clients(server.url, clients, count, tokens_in, tokens_out, seed)
                    note(f"{name}_{clients}_clients_tok_s", asyncio.run(run))
        note("rss_after_load_mb", server.memory()["rss_mb"])
        note("pss_after_load_mb", server.memory()["pss_mb"])
    finally:
        server.stop()

    medians = {name: statistics.median(values) for name, values in raw.items()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "command": " ".join(sys.argv), "commit": commit, "cpu": cpu_name(), "cores": os.cpu_count(),
        "python": platform.python_version(), "medians": medians, "raw": raw,
        "sixteen_over_one": {
            name: medians[f"{name}_{CLIENTS}_clients_tok_s"] / medians[f"{name}_1_clients_tok_s"] for name in WORKLOADS
        },
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "raw"}, indent=1))


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
