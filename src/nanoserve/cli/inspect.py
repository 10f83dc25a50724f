"""nanoserve inspect: a model's size from its headers, what fits beside it here, and how fast memory lets it be."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.cli.flags import engine_config
from nanoserve.cli.progress import Progress
from nanoserve.core.config import EngineConfig
from nanoserve.core.errors import ConfigError
from nanoserve.loading.pull import pull

if TYPE_CHECKING:
    import torch

    from nanoserve.loading.checkpoint import Checkpoint
    from nanoserve.models.config import ModelConfig

PROBE_BYTES = 1 << 28  # larger than any cache, so that reading it is reading memory
PROBES = 5


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Sizes in bytes, times in milliseconds. A floor is the time to read once what a token of one sequence needs."""

    path: str
    family: str
    layers: int
    parameters: int
    active_parameters: int  # that one token is computed with; all, since every family here is dense
    weight_bytes: int  # as the files have them
    weight_types: dict[str, int]  # bytes by type
    kv_dtype: str
    kv_bytes_per_token: int
    device: str
    memory_bytes: int  # for the KV cache
    block_size: int
    blocks: int
    tokens: int
    max_model_len: int
    default_blocks: int  # what `serve` would take
    sequences: int  # of that length, at the same time
    bandwidth: float  # GB/s
    bandwidth_measured: bool
    floor_ms: float  # at the start of a sequence
    floor_full_ms: float  # at its end


def inspect(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    if arguments.bandwidth is not None and not 0 < arguments.bandwidth < float("inf"):
        raise ConfigError(f"--bandwidth must be over 0, not {arguments.bandwidth}")
    with Progress() as progress:
        path = pull(config.model, revision=config.revision, progress=progress)
    facts = gather(config, path, arguments.bandwidth)
    print(json.dumps(vars(facts), indent=2) if arguments.json else table(facts))
    return 0


def gather(config: EngineConfig, path: Path, bandwidth: float | None) -> Facts:
    """`bandwidth` in GB/s; None: measured. Raises CheckpointError or ConfigError."""
    from nanoserve.attention.interface import KVPool
    from nanoserve.engine.choices import Choices
    from nanoserve.loading.loader import check_weights, read_model_config
    from nanoserve.loading.open import open_checkpoint
    from nanoserve.models.parameters import num_parameters, parameters

    checkpoint = open_checkpoint(path, config.load_format, config.seed)
    model = read_model_config(checkpoint)
    check_weights(checkpoint, parameters(model))
    choices = Choices(config)  # as `serve` makes them
    device = choices.device()
    dtype = choices.kv_dtype(choices.dtype(device))
    by_type = _weight_types(checkpoint)
    weight_bytes = sum(by_type.values())
    per_token = KVPool.bytes_per_token(model.num_layers, model.num_key_value_heads, model.head_dim, dtype)
    length, default_blocks = choices.pool_size(model, device, dtype, per_token)
    memory, blocks = _room(config, device, weight_bytes, config.block_size * per_token)
    speed = bandwidth or measured_bandwidth(device)
    read = weight_bytes - _unread_bytes(checkpoint, model)
    return Facts(
        path=str(checkpoint.path),
        family=model.family,
        layers=model.num_layers,
        parameters=num_parameters(model),
        active_parameters=num_parameters(model),
        weight_bytes=weight_bytes,
        weight_types=by_type,
        kv_dtype=str(dtype).removeprefix("torch."),
        kv_bytes_per_token=per_token,
        device=str(device),
        memory_bytes=memory,
        block_size=config.block_size,
        blocks=blocks,
        tokens=blocks * config.block_size,
        max_model_len=length,
        default_blocks=default_blocks,
        sequences=blocks // -(-length // config.block_size),
        bandwidth=speed,
        bandwidth_measured=bandwidth is None,
        floor_ms=read / speed / 1e6,
        floor_full_ms=(read + length * per_token) / speed / 1e6,
    )


def table(facts: Facts) -> str:
    types = ", ".join(f"{name} {size / 1e6:,.1f}" for name, size in facts.weight_types.items())
    bits = 8 * facts.weight_bytes / facts.parameters
    rows = [
        ("model", f"{facts.path} ({facts.family}, {facts.layers} layers)"),
        ("parameters", f"{facts.parameters:,} total, {facts.active_parameters:,} active"),
        ("weights", f"{facts.weight_bytes / 1e6:,.1f} MB ({types}), {bits:.2f} bits a parameter"),
        ("KV cache", f"{facts.kv_bytes_per_token:,} bytes a token ({facts.kv_dtype})"),
        ("fits here", f"{facts.blocks:,} blocks of {facts.block_size}, {facts.tokens:,} tokens, "
                      f"in {facts.memory_bytes / 1e9:,.1f} GB of {facts.device} memory"),
        ("serve takes", f"{facts.default_blocks:,} of these blocks, unless --kv-cache-memory-bytes says otherwise"),
        ("sequences", f"{facts.sequences:,} of {facts.max_model_len:,} tokens at the same time"),
        ("bandwidth", f"{facts.bandwidth:,.1f} GB/s ({'measured' if facts.bandwidth_measured else 'given'})"),
        ("floor", f"{facts.floor_ms:.3f} ms a token at the start of one sequence, {facts.floor_full_ms:.3f} ms "
                  f"after {facts.max_model_len:,} tokens"),
    ]  # fmt: skip
    return "\n".join(f"{name:<12}{text}" for name, text in rows)


def measured_bandwidth(device: torch.device) -> float:
    """GB/s of reading, the best of a few."""
    import torch

    data = torch.ones(PROBE_BYTES // 4, device=device)
    best = float("inf")
    for _ in range(PROBES):
        began = time.perf_counter()
        float(data.sum())  # waits for the device
        best = min(best, time.perf_counter() - began)
    return PROBE_BYTES / best / 1e9


def _weight_types(checkpoint: Checkpoint) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in checkpoint:
        weight = checkpoint.read(name)
        kind = weight.format.name if weight.format else str(weight.data.dtype).removeprefix("torch.")
        found[kind] = found.get(kind, 0) + weight.data.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _unread_bytes(checkpoint: Checkpoint, model: ModelConfig) -> int:
    """The embedding beside an untied head: a token reads one row of it."""
    name = "model.embed_tokens.weight"
    return 0 if model.tie_word_embeddings else checkpoint.read(name).data.nbytes


def _room(config: EngineConfig, device: torch.device, weight_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Bytes for the KV cache beside the weights, and the blocks that they make."""
    import torch

    from nanoserve.runner.machine import available_bytes

    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override * block_bytes, config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, config.kv_cache_memory_bytes // block_bytes
    free = available_bytes(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        free -= int(total * (1 - config.gpu_memory_utilization))
    room = max(free - weight_bytes, 0)
    return room, room // block_bytes
