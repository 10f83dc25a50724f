"""open_checkpoint: which kind of checkpoint lies at a path. Imports no torch: the HTTP front calls it too."""

from __future__ import annotations

from pathlib import Path

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.checkpoint import Checkpoint
from nanoserve.loading.files import read_json, read_optional_json
from nanoserve.loading.gguf import MAGIC


def open_checkpoint(path: Path, load_format: str = "auto", seed: int = 0) -> Checkpoint:
    """`path`: a folder or a .gguf file; `load_format`: one of core.config.LOAD_FORMATS; `seed`: of dummy weights.

    Raises CheckpointError where there is nothing of that kind.
    """
    if not path.is_file() and not path.is_dir():
        raise CheckpointError(f"{path} does not exist, or is neither a file nor a folder")
    try:
        match load_format:
            case "auto":
                gguf = find_gguf(path)
                return _open_folder(path) if gguf is None else _open_gguf(gguf)
            case "gguf":
                return _open_gguf(path)
            case "safetensors":
                return _open_folder(path)
            case "dummy":
                return _open_dummy(path, seed)
    except OSError as error:  # not allowed to read it, for one
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    raise CheckpointError(f"{path}: the load format {load_format!r} is unknown")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, by its first bytes or its name, or that it holds beside no safetensors. Raises
    CheckpointError where it holds several, and OSError."""
    if path.is_dir():
        return _only_gguf(path) if _files(path, ".gguf") and not _files(path, ".safetensors") else None
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return path if file.read(len(MAGIC)) == MAGIC or path.suffix == ".gguf" else None


def _files(folder: Path, suffix: str) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix == suffix)


def _only_gguf(folder: Path) -> Path:
    files = _files(folder, ".gguf")
    if len(files) != 1:
        found = ", ".join(file.name for file in files[:10]) or "none"
        raise CheckpointError(f"{folder} should hold one .gguf file, or be one; found: {found}")
    return files[0]


def _open_gguf(path: Path) -> Checkpoint:
    from nanoserve.loading.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(_only_gguf(path) if path.is_dir() else path)


def _open_folder(path: Path) -> Checkpoint:
    from nanoserve.loading.safetensors_checkpoint import PICKLES, SafetensorsCheckpoint

    if path.is_file():
        if path.suffix in PICKLES:
            raise CheckpointError(
                f"{path} is a pickle, which is not loaded: it can run code; convert it to safetensors"
            )
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path} has weights alone; give the folder that also has its config.json")
        raise CheckpointError(f"{path} is neither a GGUF file nor a folder with config.json and safetensors files")
    if not any(path.iterdir()):
        raise CheckpointError(f"{path} is an empty folder")
    return SafetensorsCheckpoint(path)


def _open_dummy(path: Path, seed: int) -> Checkpoint:
    from nanoserve.loading.dummy import DummyCheckpoint

    if gguf := find_gguf(path):
        real = _open_gguf(gguf)
        return DummyCheckpoint(real.path, real.config, real.generation_config, seed)
    generation_config = read_optional_json(path / "generation_config.json")
    return DummyCheckpoint(path, read_json(path / "config.json"), generation_config, seed)
