"""Which tensors a model is made of, and the names a checkpoint has for them."""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Part:
    name: str  # in Hugging Face's spelling
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight of ours, fused from `parts` below each other. Two dimensions: a matrix; one: a vector."""

    name: str  # "embed", "layers.3.qkv", "layers.3.attn_norm", "norm", "head", ...
    parts: tuple[Part, ...]

    @property
    def is_matrix(self) -> bool:
        return len(self.parts[0].shape) == 2


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """All weights of a model, in the order of its forward pass. A tied head is not among them."""
    raise NotImplementedError  # being written
