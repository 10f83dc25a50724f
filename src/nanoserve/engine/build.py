"""build_engine: the composition root. What is to be chosen, `choices.py` chooses; here it is put together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from nanoserve.attention.interface import KVPool
from nanoserve.core.config import EngineConfig
from nanoserve.engine.choices import Choices
from nanoserve.engine.engine import Engine
from nanoserve.engine.messages import EngineInfo
from nanoserve.loading.generation import eos_token_ids
from nanoserve.loading.loader import load_weights, read_model_config
from nanoserve.loading.open import open_checkpoint
from nanoserve.loading.pull import pull
from nanoserve.models.parameters import parameters
from nanoserve.models.transformer import Transformer
from nanoserve.runner.rows import RowTable
from nanoserve.runner.runner import Runner
from nanoserve.sampling.sampler import Sampler
from nanoserve.schedule.blocks import BlockPool
from nanoserve.schedule.scheduler import Scheduler

OnProgress = Callable[[str, int, int], None]


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
    choices, watch = Choices(config), Stopwatch()
    path = pull(config.model, revision=config.revision, progress=on_progress)
    checkpoint = open_checkpoint(path, config.load_format, config.seed)
    facts = read_model_config(checkpoint)
    end_ids, sampling = eos_token_ids(checkpoint), choices.sampling_defaults(checkpoint)
    watch.lap("open")

    device = choices.device()
    dtype = choices.dtype(device)
    kv_dtype = choices.kv_dtype(dtype)
    kv_heads, head_dim = facts.num_key_value_heads, facts.head_dim
    bytes_per_token = KVPool.bytes_per_token(facts.num_layers, kv_heads, head_dim, kv_dtype)
    max_len, num_blocks = choices.pool_size(facts, device, dtype, bytes_per_token)
    schedule = choices.schedule(device, max_len, num_blocks)
    backend = choices.backend(device, dtype)
    watch.lap("kernels")

    weights = load_weights(
        checkpoint,
        parameters(facts),
        backend.place,
        lambda vector: vector.to(device, dtype),
        lambda done, total: on_progress("weights", done, total),
    )
    watch.lap("weights")

    model = Transformer(facts, weights, backend.ops, backend.attention, max_len, device, dtype)
    pool = KVPool(facts.num_layers, num_blocks, config.block_size, kv_heads, head_dim, kv_dtype, device)
    rows = RowTable(schedule.max_rows, max_len, config.block_size, device)
    runner = Runner(model, pool, rows, Sampler(facts.vocab_size, device))
    watch.lap("pool")

    info = EngineInfo(
        model=str(path),
        family=facts.family,
        vocab_size=facts.vocab_size,
        max_model_len=max_len,
        eos_token_ids=end_ids,
        sampling_defaults=sampling,
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
