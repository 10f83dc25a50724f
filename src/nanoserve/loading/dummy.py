"""DummyCheckpoint: seeded random weights for a config, so that a model's speed can be measured without its files."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.quant.weight import Weight


class DummyCheckpoint:
    def __init__(
        self, path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None = None, seed: int = 0
    ):
        self.path = path
        self.config = config
        self.generation_config = generation_config or {}
        self.seed = seed

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Weight:
        """Uniform with a standard deviation of columns^-0.5, so that activations keep their size; norms are 1."""
        import torch

        from nanoserve.quant.weight import Weight

        shape = self._shapes[name]
        if len(shape) == 1:
            return Weight(torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape), shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        bound = (3.0 / shape[1]) ** 0.5
        return Weight(torch.empty(shape).uniform_(-bound, bound, generator=generator), shape)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        from nanoserve.models.families import model_config
        from nanoserve.models.parameters import parameters

        wanted = parameters(model_config(self.config))
        return {part.name: part.shape for parameter in wanted for part in parameter.parts}
