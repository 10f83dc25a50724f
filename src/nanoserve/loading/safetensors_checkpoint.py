"""SafetensorsCheckpoint: a folder with config.json and safetensors files, in one piece or in shards.

Nothing in the folder is ever run: `auto_map` and the like are ignored, pickles are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.files import is_there, read_json, read_optional_json, require_file

if TYPE_CHECKING:
    from nanoserve.quant.weight import Weight

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = ("F32", "F16", "BF16")


class SafetensorsCheckpoint:
    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self.generation_config = read_optional_json(path / "generation_config.json")
        _refuse_quantized(path, self.config)
        shards, listed = _shards(path)
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for shard in shards:
            self._read_header(shard, listed)
        if absent := sorted(listed.keys() - self._where.keys()):
            raise CheckpointError(f"{path / INDEX} names tensors that are not in their files: {', '.join(absent[:10])}")
        self._open: tuple[Path, Any] | None = None  # the file that was read last

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Weight:
        """Mapped from the file."""
        from nanoserve.quant.weight import Weight

        shard = self._where[name]
        if self._dtypes[name] not in DTYPES:
            raise CheckpointError(
                f"{shard}: tensor {name!r} is of type {self._dtypes[name]}; known: {', '.join(DTYPES)}"
            )
        if self._open is None or self._open[0] != shard:
            self._open = shard, _open(shard, "pt")
        return Weight(self._open[1].get_tensor(name), self._shapes[name])

    def _read_header(self, shard: Path, listed: dict[str, Path]) -> None:
        file = _open(shard, "np")  # torch is not needed for the headers
        for name in file.keys():  # noqa: SIM118 (the file itself cannot be iterated)
            if listed.get(name, shard) == shard:
                header = file.get_slice(name)
                self._where[name] = shard
                self._shapes[name] = tuple(header.get_shape())
                self._dtypes[name] = header.get_dtype()


def _open(shard: Path, framework: str) -> Any:
    require_file(shard)
    try:
        return safe_open(shard, framework=framework)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{shard} is damaged, truncated or cannot be read: {error}") from error


def _shards(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files with weights, and which tensor the index, if there is one, has in which of them."""
    if is_there(path / SINGLE):
        return [path / SINGLE], {}
    if not is_there(path / INDEX):
        if pickles := sorted(file.name for file in path.iterdir() if file.suffix in PICKLES):
            raise CheckpointError(
                f"{path} has its weights as pickles ({', '.join(pickles[:3])}), which are not loaded: they can run "
                "code; convert them to safetensors"
            )
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}")
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map")
    if odd := [name for name in weight_map.values() if not isinstance(name, str) or "\0" in name]:
        raise CheckpointError(f"{path / INDEX} names {odd[0]!r:.60}, which is not the name of a file")
    files = {name: _shard(path, name) for name in dict.fromkeys(weight_map.values())}
    if missing := [str(file) for file in files.values() if not file.exists()]:
        raise CheckpointError(f"{path / INDEX} names files that are missing: {', '.join(missing[:10])}")
    return list(files.values()), {tensor: files[name] for tensor, name in weight_map.items()}


def _shard(path: Path, name: str) -> Path:
    """A file of the folder itself. The snapshots of the Hugging Face cache link into the `blobs` beside them."""
    file = path / name
    homes = [_real(path)]
    if _real(path).parent.name == "snapshots":
        homes.append(_real(path).parent.parent / "blobs")
    if PurePosixPath(name).name != name or "\\" in name or _real(file).parent not in homes:
        raise CheckpointError(f"{path / INDEX} names {name!r}, which is not a file inside {path}")
    return file


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises where links go in a circle


def _refuse_quantized(path: Path, config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{path / 'config.json'}: quantization_config has the quant_method {method!r}, which is not supported yet"
        )
