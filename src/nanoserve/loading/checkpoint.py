"""Checkpoint: a model's files behind one interface, whatever their kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nanoserve.quant.weight import Weight


class Checkpoint(Protocol):
    """Opening one reads and checks its headers, not its weights."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...  # in the vocabulary of a Hugging Face config.json
    @property
    def generation_config(self) -> dict[str, Any]: ...  # eos_token_id and the like; empty where there is none
    @property
    def names(self) -> frozenset[str]: ...  # tensor names, in Hugging Face's spelling

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Weight:
        """One tensor; CheckpointError names the file and what is wrong with it."""
        ...

    def __iter__(self) -> Iterator[str]: ...
