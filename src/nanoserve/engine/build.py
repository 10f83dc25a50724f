"""build_engine: the composition root. Everything that is chosen is chosen here, once, with its reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nanoserve.attention.interface import KVPool
from nanoserve.backend import Backend, native_backend, torch_backend
from nanoserve.core.config import Decision, EngineConfig
from nanoserve.core.errors import CheckpointError, ConfigError
from nanoserve.engine.engine import Engine
from nanoserve.engine.messages import EngineInfo
from nanoserve.loading.checkpoint import Checkpoint
from nanoserve.loading.generation import eos_token_ids, sampling_defaults
from nanoserve.loading.known import KNOWN
from nanoserve.loading.loader import load_weights
from nanoserve.loading.open import open_checkpoint
from nanoserve.loading.pull import pull
from nanoserve.models.config import ModelConfig
from nanoserve.models.families import model_config
from nanoserve.models.parameters import parameters
from nanoserve.models.transformer import Transformer
from nanoserve.ops.native.library import NativeError
from nanoserve.runner.machine import available_bytes, available_cores
from nanoserve.runner.rows import RowTable
from nanoserve.runner.runner import Runner
from nanoserve.sampling.sampler import Sampler
from nanoserve.schedule.blocks import BlockPool
from nanoserve.schedule.scheduler import Scheduler, SchedulerConfig

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]

CPU_KV_SHARE = 0.25  # of free memory: the rest is the machine's other work
CPU_KV_SEQUENCES = 2  # sequences of full length that the default pool holds: a laptop's memory is not ours to fill
GIB = 1 << 30


@dataclass(slots=True)
class Choices:
    """What was decided, for the start report."""

    made: list[Decision] = field(default_factory=list)

    def note(self, name: str, value: object, reason: str) -> None:
        self.made.append(Decision(name, str(value), reason))


@dataclass(slots=True)
class Stopwatch:
    """Seconds that each part of the start took."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def build_engine(config: EngineConfig, on_progress: OnProgress = lambda what, done, total: None) -> Engine:
    """Raises ConfigError, CheckpointError or PullError, each written for a person."""
    choices, watch = Choices(), Stopwatch()
    path = pull(config.model, revision=config.revision, progress=on_progress)
    checkpoint = open_checkpoint(path, config.load_format, config.seed)
    try:
        facts = model_config(checkpoint.config)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    watch.lap("open")

    device = _device(config, choices)
    backend = _backend(config, device, _dtype(config, device, choices), choices)
    watch.lap("kernels")
    kv_dtype = backend.dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)
    weights = load_weights(
        checkpoint,
        parameters(facts),
        backend.place,
        lambda vector: vector.to(device, backend.dtype),
        lambda done, total: on_progress("weights", done, total),
    )
    watch.lap("weights")

    bytes_per_token = KVPool.bytes_per_token(facts.num_layers, facts.num_key_value_heads, facts.head_dim, kv_dtype)
    max_len, num_blocks = _pool_size(config, facts, device, bytes_per_token, choices)
    schedule = _schedule(config, device, max_len, choices)
    model = Transformer(facts, weights, backend.ops, backend.attention, max_len, device, backend.dtype)
    pool = KVPool(facts.num_layers, num_blocks, config.block_size, facts.num_key_value_heads, facts.head_dim,
                  kv_dtype, device)  # fmt: skip
    rows = RowTable(schedule.max_rows, max_len, config.block_size, device)
    runner = Runner(model, pool, rows, Sampler(facts.vocab_size, device))
    watch.lap("pool")

    info = EngineInfo(
        model=str(path),
        family=facts.family,
        vocab_size=facts.vocab_size,
        max_model_len=max_len,
        eos_token_ids=eos_token_ids(checkpoint),
        sampling_defaults=_sampling_defaults(config, checkpoint, choices),
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_parameters=sum(_count(weight.shape) for weight in weights.values()),
        weight_bytes=sum(weight.nbytes for weight in weights.values()),
        kv_bytes_per_token=bytes_per_token,
        decisions=tuple(choices.made),
        seconds=watch.seconds,
    )
    scheduler = Scheduler(schedule, BlockPool(num_blocks, config.block_size))
    return Engine(scheduler, runner, info, max_queued=config.max_num_queued_reqs, seed=config.seed)


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _sampling_defaults(config: EngineConfig, checkpoint: Checkpoint, choices: Choices) -> dict[str, int | float]:
    if config.generation_config == "none":
        return {}
    known = KNOWN.get(config.model)
    defaults = sampling_defaults(checkpoint) or (known.sampling if known else {})
    if defaults:
        text = ", ".join(f"{name} {value}" for name, value in defaults.items())
        choices.note("sampling", text, "where a request leaves it open, as the model's makers recommend")
    return defaults


def _device(config: EngineConfig, choices: Choices) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, and torch finds no CUDA device; use --device cpu")
    if config.device != "auto":
        return torch.device(config.device)
    if torch.cuda.is_available():
        choices.note("device", "cuda", "torch finds a CUDA device")
        return torch.device("cuda")
    choices.note("device", "cpu", "torch finds no CUDA device")
    return torch.device("cpu")


def _dtype(config: EngineConfig, device: torch.device, choices: Choices) -> torch.dtype:
    if device.type == "cpu":
        if config.dtype == "float16":
            raise ConfigError("--dtype float16 is not served on a CPU (its matmuls are 50 times slower); use float32")
        if config.dtype == "auto":
            choices.note("dtype", "float32", "the exact type; a CPU multiplies it at full speed")
            return torch.float32
    if config.dtype == "auto":
        # float16 is not taken over from the checkpoint: hidden states of some families overflow in it.
        choices.note("dtype", "bfloat16", "the GPU's fast type with float32's range")
        return torch.bfloat16
    return getattr(torch, config.dtype)  # type: ignore[no-any-return]


def _backend(config: EngineConfig, device: torch.device, dtype: torch.dtype, choices: Choices) -> Backend:
    threads = config.threads or available_cores()
    if config.threads is not None:
        torch.set_num_threads(threads)
    fits = device.type == "cpu" and dtype == torch.float32
    if config.backend == "torch" or (config.backend == "auto" and not fits):
        return torch_backend(device, dtype)
    if not fits:
        raise ConfigError("--backend native computes on a CPU in float32; use --backend torch, or --dtype float32")
    try:
        backend = native_backend(threads)
    except NativeError as error:
        if config.backend == "native":
            raise ConfigError(f"--backend native: {error}") from error
        reason = str(error).splitlines()[0]
        log.warning("the C++ kernels cannot be had, and plain torch is slower: %s", error)
        choices.note("backend", "torch", f"the C++ kernels cannot be had: {reason}")
        return torch_backend(device, dtype)
    # Ours compute now. Torch's own, for what is left to it, would spin beside them for the same cores.
    torch.set_num_threads(1)
    choices.note("backend", "native", f"C++ kernels compiled for this CPU, {threads} threads")
    return backend


def _pool_size(
    config: EngineConfig, facts: ModelConfig, device: torch.device, bytes_per_token: int, choices: Choices
) -> tuple[int, int]:
    """The longest sequence served, and the number of KV blocks."""
    longest = facts.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"--max-model-len is {config.max_model_len}, and the model's positions end at {longest}")
    max_len = config.max_model_len or longest
    block_bytes = config.block_size * bytes_per_token
    full = -(-max_len // config.block_size)
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        choices.note("num_blocks", num_blocks, "--num-gpu-blocks-override")
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
        choices.note("num_blocks", num_blocks, f"--kv-cache-memory-bytes over {block_bytes:,} bytes a block")
    else:
        free = available_bytes(device)
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            budget = free - int(total * (1 - config.gpu_memory_utilization))
            reason = f"--gpu-memory-utilization {config.gpu_memory_utilization} of {total / GIB:.1f} GiB"
            num_blocks = budget // block_bytes
        else:
            budget = int(free * CPU_KV_SHARE)
            num_blocks = min(budget // block_bytes, CPU_KV_SEQUENCES * full)
            reason = f"{CPU_KV_SEQUENCES} x {max_len:,} tokens, at most {CPU_KV_SHARE:.0%} of {free / GIB:.1f} GiB free"
        choices.note("num_blocks", num_blocks, f"{reason}; a block of {config.block_size} takes {block_bytes:,} bytes")
    room = num_blocks * config.block_size
    if room < 2:
        raise ConfigError(
            f"the KV cache has room for {max(num_blocks, 0)} blocks; one takes {block_bytes:,} bytes. "
            f"Give it more with --kv-cache-memory-bytes (one sequence of full length takes {full * block_bytes:,})"
        )
    if max_len > room:
        if config.max_model_len is not None:
            raise ConfigError(
                f"--max-model-len {max_len} needs {full} KV blocks ({full * block_bytes:,} bytes) and {num_blocks} are "
                f"there; lower it to {room} or raise --kv-cache-memory-bytes"
            )
        choices.note(
            "max_model_len", room, f"the model's {longest:,} tokens do not fit the KV cache; this is what does"
        )
        max_len = room
    elif config.max_model_len is None:
        choices.note("max_model_len", max_len, "the model's own")
    return max_len, num_blocks


def _schedule(config: EngineConfig, device: torch.device, max_len: int, choices: Choices) -> SchedulerConfig:
    on_gpu = device.type == "cuda"
    rows = config.max_num_seqs
    if rows is None:
        rows = 256 if on_gpu else 32
        if config.max_num_batched_tokens is not None:
            rows = min(rows, config.max_num_batched_tokens)
        choices.note("max_num_seqs", rows, "the default of a GPU" if on_gpu else "the default of a CPU")
    tokens = config.max_num_batched_tokens
    if tokens is None:
        tokens = max(8192 if on_gpu else 256, rows)
        choices.note("max_num_batched_tokens", tokens, "keeps one step short enough for running streams")
    if tokens < rows:
        raise ConfigError(f"--max-num-batched-tokens {tokens} must be at least --max-num-seqs {rows}")
    return SchedulerConfig(
        max_rows=rows, max_step_tokens=tokens, max_len=max_len, prefix_caching=config.enable_prefix_caching
    )
