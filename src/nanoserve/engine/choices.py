"""Choices: everything that is decided at start, each with the reason that the start report prints."""

from __future__ import annotations

import logging

import torch

from nanoserve.backend import Backend, native_backend, torch_backend
from nanoserve.core.config import Decision, EngineConfig, flag
from nanoserve.core.errors import ConfigError
from nanoserve.loading.checkpoint import Checkpoint
from nanoserve.loading.generation import sampling_defaults
from nanoserve.loading.known import KNOWN
from nanoserve.models.config import ModelConfig
from nanoserve.models.parameters import num_parameters
from nanoserve.ops.native.library import NativeError
from nanoserve.runner.machine import available_bytes, available_cores
from nanoserve.schedule.scheduler import SchedulerConfig

log = logging.getLogger(__name__)

CPU_KV_SHARE = 0.25  # of free memory: the rest is the machine's other work
CPU_KV_SEQUENCES = 1  # sequences of full length that the default pool holds: a laptop's memory is not ours to fill
GIB = 1 << 30


class Choices:
    """One start's. Every method raises ConfigError where a setting cannot be honoured."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.made: list[Decision] = []

    def _note(self, name: str, value: object, reason: str) -> None:
        self.made.append(Decision(name, str(value), reason))

    def sampling_defaults(self, checkpoint: Checkpoint) -> dict[str, int | float]:
        if self.config.generation_config == "none":
            return {}
        known = next((file for file in KNOWN.values() if file.filename == checkpoint.path.name), None)
        defaults = sampling_defaults(checkpoint) or (known.sampling if known else {})
        if defaults:
            text = ", ".join(f"{name} {value}" for name, value in defaults.items())
            self._note(
                "sampling",
                text,
                "the model's own, where a request leaves it open; --generation-config none for OpenAI's",
            )
        return defaults

    def device(self) -> torch.device:
        if self.config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device is cuda, and torch finds no CUDA device; use --device cpu")
        if self.config.device != "auto":
            return torch.device(self.config.device)
        if torch.cuda.is_available():
            self._note("device", "cuda", "torch finds a CUDA device")
            return torch.device("cuda")
        self._note("device", "cpu", "torch finds no CUDA device")
        return torch.device("cpu")

    def dtype(self, device: torch.device) -> torch.dtype:
        """Of weights and activations."""
        if device.type == "cpu":
            if self.config.dtype == "float16":
                raise ConfigError(
                    "--dtype float16 is not served on a CPU (its matmuls are 50 times slower); use float32"
                )
            if self.config.dtype == "auto":
                self._note("dtype", "float32", "the exact type; a CPU multiplies it at full speed")
                return torch.float32
        if self.config.dtype == "auto":
            # float16 is not taken over from the checkpoint: hidden states of some families overflow in it.
            self._note("dtype", "bfloat16", "the GPU's fast type with float32's range")
            return torch.bfloat16
        return getattr(torch, self.config.dtype)  # type: ignore[no-any-return]

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the KV cache; `dtype` is the activations'."""
        return dtype if self.config.kv_cache_dtype == "auto" else getattr(torch, self.config.kv_cache_dtype)

    def backend(self, device: torch.device, dtype: torch.dtype) -> Backend:
        threads = self.config.threads or available_cores()
        if self.config.threads is not None:
            torch.set_num_threads(threads)
        fits = device.type == "cpu" and dtype == torch.float32
        if self.config.backend == "torch" or (self.config.backend == "auto" and not fits):
            return torch_backend(device, dtype)
        if not fits:
            raise ConfigError("--backend native computes on a CPU in float32; use --backend torch, or --dtype float32")
        try:
            backend = native_backend(threads)
        except NativeError as error:
            if self.config.backend == "native":
                raise ConfigError(f"--backend native: {error}") from error
            reason = str(error).splitlines()[0]
            log.warning("the C++ kernels cannot be had, and plain torch is slower: %s", error)
            self._note("backend", "torch", f"the C++ kernels cannot be had: {reason}")
            return torch_backend(device, dtype)
        # Ours compute now. Torch's own, for what is left to it, would spin beside them for the same cores.
        torch.set_num_threads(1)
        self._note("backend", "native", f"C++ kernels compiled for this CPU, {threads} threads")
        return backend

    def pool_size(
        self, facts: ModelConfig, device: torch.device, dtype: torch.dtype, bytes_per_token: int
    ) -> tuple[int, int]:
        """The longest sequence served, and the number of KV blocks. Decided before anything is loaded, so that what
        cannot work is told at once."""
        asked, longest, size = self.config.max_model_len, facts.max_position_embeddings, self.config.block_size
        if asked is not None and asked > longest:
            raise ConfigError(f"--max-model-len is {asked}, and the model's positions end at {longest}")
        max_len = asked or longest
        block_bytes = size * bytes_per_token
        num_blocks, reason = self._num_blocks(num_parameters(facts) * dtype.itemsize, device, block_bytes, max_len)
        self._note("num_blocks", num_blocks, f"{reason}; a block of {size} takes {block_bytes:,} bytes")
        room, full = num_blocks * size, -(-max_len // size)
        if room < 2:
            raise ConfigError(
                f"the KV cache has room for {max(num_blocks, 0)} blocks; one takes {block_bytes:,} bytes. "
                f"Give it more with --kv-cache-memory-bytes (one sequence of full length takes {full * block_bytes:,})"
            )
        if asked is not None and asked > room:
            raise ConfigError(
                f"--max-model-len {asked} needs {full} KV blocks ({full * block_bytes:,} bytes) and {num_blocks} are "
                f"there; lower it to {room} or raise --kv-cache-memory-bytes"
            )
        if asked is None:
            fits = max_len <= room
            why = "the model's own" if fits else f"the model's {longest:,} do not fit the KV cache; this is what does"
            self._note("max_model_len", min(max_len, room), why)
        return min(max_len, room), num_blocks

    def _num_blocks(self, weights: int, device: torch.device, block_bytes: int, max_len: int) -> tuple[int, str]:
        """`weights`: their bytes, at most; kernels that take them as the file has them need less."""
        config = self.config
        free = available_bytes(device)
        asked, name = config.num_gpu_blocks_override, "num_gpu_blocks_override"
        if asked is None and config.kv_cache_memory_bytes is not None:
            asked, name = config.kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
        if asked is not None:
            if asked * block_bytes > free:
                raise ConfigError(
                    f"{flag(name)} {getattr(config, name)} makes a KV cache of {asked * block_bytes:,} bytes, and "
                    f"{free:,} are free"
                )
            return asked, flag(name)
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            left = free - weights - int(total * (1 - config.gpu_memory_utilization))
            return (
                left // block_bytes,
                f"--gpu-memory-utilization {config.gpu_memory_utilization} of {total / GIB:.1f} GiB",
            )
        left = int((free - weights) * CPU_KV_SHARE)
        wanted = CPU_KV_SEQUENCES * -(-max_len // config.block_size)
        reason = f"{CPU_KV_SEQUENCES} x {max_len:,} tokens, at most {CPU_KV_SHARE:.0%} of {free / GIB:.1f} GiB free"
        return min(left // block_bytes, wanted), reason

    def schedule(self, device: torch.device, max_len: int, num_blocks: int) -> SchedulerConfig:
        on_gpu = device.type == "cuda"
        rows = self.config.max_num_seqs
        if rows is None:
            rows = 256 if on_gpu else 32
            if self.config.max_num_batched_tokens is not None:
                rows = min(rows, self.config.max_num_batched_tokens)
            self._note("max_num_seqs", rows, "the default of a GPU" if on_gpu else "the default of a CPU")
        tokens = self.config.max_num_batched_tokens
        if tokens is None:
            tokens = max(8192 if on_gpu else 256, rows)
            self._note("max_num_batched_tokens", tokens, "keeps one step short enough for running streams")
        if tokens < rows:
            raise ConfigError(f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {rows}")
        return SchedulerConfig(
            max_rows=min(rows, num_blocks),  # each that runs has a block at least
            max_step_tokens=tokens,
            max_len=max_len,
            prefix_caching=self.config.enable_prefix_caching,
        )
