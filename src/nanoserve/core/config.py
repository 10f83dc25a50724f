"""EngineConfig: every setting of an engine. `None` means "decide for me"; engine/build.py decides, with reasons."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, get_type_hints

from nanoserve.core.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
KINDS = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
MAX_THREADS = 1024
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def setting(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field that the command line shows as a flag of the same name."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    model: str = setting("smollm2-135m-instruct", "a known name, a Hugging Face id, a folder, or a .gguf file")
    tokenizer: str | None = setting(None, "folder or file to take the tokenizer from, where it is not the model's")
    revision: str | None = setting(None, "branch, tag or commit of a Hugging Face model")
    dtype: str = setting("auto", "type of weights and activations", DTYPES)
    generation_config: str = setting(
        "auto",
        "sampling where a request leaves it open: the model's own, by its generation config (auto), or OpenAI's (none)",
        ("auto", "none"),
    )
    load_format: str = setting("auto", "what kind of files the weights are in", LOAD_FORMATS)
    max_model_len: int | None = setting(
        None,
        "longest prompt plus output, in tokens; default: the model's own, or less where KV memory is short",
    )
    seed: int = setting(0, "of dummy weights and of requests that bring no seed")
    device: str = setting("auto", "where the model runs", ("auto", "cpu", "cuda"))
    backend: str = setting(
        "auto", "which kernels compute: our own C++ ones on a CPU (native), or plain torch", ("auto", "native", "torch")
    )
    threads: int | None = setting(None, "CPU threads that compute; default: the cores that the process may use")
    gpu_memory_utilization: float = setting(0.92, "share of the GPU's memory to use")
    kv_cache_memory_bytes: int | None = setting(None, "memory for the KV cache; default: from what is free")
    num_gpu_blocks_override: int | None = setting(None, "number of KV blocks, instead of sizing by memory")
    block_size: int = setting(16, "tokens in a KV block")
    kv_cache_dtype: str = setting("auto", "type of the KV cache", DTYPES)
    enable_prefix_caching: bool = setting(True, "reuse the KV of prompts that begin alike")
    max_num_seqs: int | None = setting(
        None, "most sequences that run at the same time; default: 32 on a CPU, 256 on a GPU"
    )
    max_num_batched_tokens: int | None = setting(
        None, "most tokens computed in one step; default: 256 on a CPU, 8192 on a GPU"
    )
    max_num_queued_reqs: int = setting(1024, "most requests that wait; beyond it they are refused with 429")

    def __post_init__(self) -> None:
        for f in fields(self):
            choices = f.metadata.get("choices")
            value = getattr(self, f.name)
            if choices and value not in choices:
                raise ConfigError(f"{flag(f.name)} is {value!r}; known: {', '.join(choices)}")
        for name in ("max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size",
                     "max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs", "threads"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{flag(name)} must be a whole number of at least 1, not {value!r}")
        hints = get_type_hints(type(self))
        for f in fields(self):
            value, kind = getattr(self, f.name), hints[f.name]
            fits = isinstance(value, (int, float) if kind is float else kind)
            if not fits or (isinstance(value, bool) and kind is not bool):
                raise ConfigError(f"{flag(f.name)} must be {KINDS[str(f.type).split()[0]]}, not {value!r:.60}")
        if self.threads is not None and self.threads > MAX_THREADS:
            raise ConfigError(f"--threads must be at most {MAX_THREADS}, not {self.threads}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be over 0 and at most 1, not {self.gpu_memory_utilization}"
            )


class Decision(NamedTuple):
    """One setting that was decided at start, and why."""

    name: str
    value: str
    reason: str


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
