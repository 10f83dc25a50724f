"""The loader: streams a checkpoint into a model's weights, and proves that none is missing and none left over."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.checkpoint import Checkpoint
from nanoserve.models.config import ModelConfig
from nanoserve.models.families import model_config
from nanoserve.models.parameters import Parameter

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.quant.weight import Matrix, Weight

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SHOWN = 10  # names in an error


def read_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """Raises CheckpointError, which names the checkpoint and the field at fault."""
    try:
        return model_config(checkpoint.config)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error


def load_weights(
    checkpoint: Checkpoint,
    wanted: Sequence[Parameter],
    place_matrix: Callable[[Sequence[Weight]], Matrix],
    place_vector: Callable[[Tensor], Tensor],
    progress: Callable[[int, int], None],
) -> dict[str, Matrix | Tensor]:
    """The weights by our name. One parameter is read at a time, so that at most one is in memory twice.

    The headers are checked first: what does not fit fails before the first byte of a weight is read. `progress` gets
    the parameters placed and their number.
    """
    import torch

    check_weights(checkpoint, wanted)
    weights: dict[str, Matrix | Tensor] = {}
    for done, parameter in enumerate(wanted):
        progress(done, len(wanted))
        parts = [checkpoint.read(part.name) for part in parameter.parts]
        if parameter.is_matrix:
            weights[parameter.name] = place_matrix(parts)
        else:
            weights[parameter.name] = place_vector(torch.cat([part.dense() for part in parts]))
    progress(len(wanted), len(wanted))
    return weights


def check_weights(checkpoint: Checkpoint, wanted: Sequence[Parameter]) -> None:
    """By the headers: raises CheckpointError where a weight is missing, has another shape, or is left over."""
    parts = [part for parameter in wanted for part in parameter.parts]
    expected = {part.name for part in parts}
    if missing := [part.name for part in parts if part.name not in checkpoint.names]:
        hint = "; the config does not tie the head to the embedding" if HEAD in missing else ""
        raise CheckpointError(f"{checkpoint.path} has no {_listed(missing)}{hint}")
    for part in parts:
        if checkpoint.shape(part.name) != part.shape:
            raise CheckpointError(
                f"{checkpoint.path}: {part.name} has the shape {list(checkpoint.shape(part.name))}; the config asks "
                f"for {list(part.shape)}"
            )
    if left := [name for name in checkpoint if name not in expected and not _tolerated(name, expected)]:
        raise CheckpointError(f"{checkpoint.path} has tensors that the model has no place for: {_listed(left)}")
    if HEAD in checkpoint.names and HEAD not in expected and not _equal(checkpoint, HEAD, EMBEDDING):
        warnings.warn(
            f"{checkpoint.path}: {HEAD} differs from {EMBEDDING}, and the config ties them: the embedding is used",
            stacklevel=2,
        )


def _tolerated(name: str, expected: set[str]) -> bool:
    """A copy of the embedding beside a tied head, and the rotary tables that old exports hold: both follow from the
    rest."""
    return (name == HEAD and EMBEDDING in expected) or name.endswith(".rotary_emb.inv_freq")


def _equal(checkpoint: Checkpoint, name: str, other: str) -> bool:
    import torch

    if checkpoint.shape(name) != checkpoint.shape(other):
        return False
    a, b = checkpoint.read(name), checkpoint.read(other)
    return a.format == b.format and a.data.dtype == b.data.dtype and torch.equal(a.data, b.data)


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
