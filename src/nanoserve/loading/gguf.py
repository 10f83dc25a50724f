"""GgufFile: the header of a GGUF file, read over a memory map. It knows neither torch nor what the keys mean.

A file is taken as hostile: every count and length is held against the bytes that are left before anything is
allocated for it, and whatever does not fit is a CheckpointError that names the file and the fact. Layout: the GGUF
specification, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from nanoserve.core.errors import CheckpointError

MAGIC = b"GGUF"
MAX_KEYS = 65_536
MAX_TENSORS = 262_144
MAX_KEY_BYTES = 1024  # names end up in messages; the specification allows 64 KiB
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 21  # in all arrays together: eight times the largest vocabulary in use
MAX_DIMENSIONS = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q").unpack_from

# Number of a type in the file: name, weights in a block, bytes of a block.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # rows first
    type_id: int
    offset: int  # from the begin of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]  # str, int, float, bool, or a list of one of them
    tensors: dict[str, GgufTensor]
    buffer: mmap.mmap  # the whole file, copy-on-write: nothing can change the file through it


def read_gguf(path: Path) -> GgufFile:
    """Read and check everything but the weights. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    metadata, tensors = _Header(path, buffer).read()
    return GgufFile(path, metadata, tensors, buffer)


class _Header:
    """A cursor over the file."""

    def __init__(self, path: Path, buffer: mmap.mmap):
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0
        self.items = 0  # of arrays, so far

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        magic = self.bytes(4, "the magic number")
        if magic != MAGIC:
            raise self.error(f"is not a GGUF file: it begins with {magic!r}")
        version = self.integer("I", "the version")
        if version not in (2, 3):
            hint = " (a big-endian file)" if version in (0x02000000, 0x03000000) else ""
            raise self.error(f"has GGUF version {version}{hint}; versions 2 and 3 are understood")
        num_tensors = self.integer("Q", "the number of tensors")
        num_keys = self.integer("Q", "the number of keys")
        self.room(num_keys, 13, MAX_KEYS, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.name("a key")
            if key in metadata:
                raise self.error(f"has the key {key!r} twice")
            metadata[key] = self.value(self.integer("I", f"the type of {key!r}"), key)
        self.room(num_tensors, 32, MAX_TENSORS, "tensors")
        infos = [self.tensor_info() for _ in range(num_tensors)]
        return metadata, self.place(infos, metadata.get("general.alignment", 32))

    def error(self, fact: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {fact}")

    def room(self, count: int, least: int, limit: int, what: str) -> None:
        """Refuse `count` things of at least `least` bytes each where so many cannot be there."""
        if count > limit or count * least > self.size - self.at:
            raise self.error(
                f"says it has {count} {what}, at byte {self.at}; only {self.size - self.at} bytes follow, and at most "
                f"{limit} are read"
            )

    def bytes(self, count: int, what: str) -> bytes:
        end = self.at + count
        if end > self.size:
            raise self.error(f"ends inside {what}: it is truncated, or damaged at byte {self.at}")
        data = self.buffer[self.at : end]
        self.at = end
        return data

    def integer(self, code: str, what: str) -> int:
        value: int = struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code), what))[0]
        return value

    def name(self, what: str) -> str:
        """Keys and tensor names must be text: they are looked up and shown."""
        length = self.integer("Q", f"the length of {what}")
        self.room(length, 1, MAX_KEY_BYTES, f"bytes in {what}")
        try:
            return self.bytes(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"has {what} that is not UTF-8, before byte {self.at}") from error

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            length = self.integer("Q", f"the length of {key!r}")
            self.room(length, 1, MAX_STRING_BYTES, f"bytes in {key!r}")
            return self.bytes(length, f"{key!r}").decode(errors="replace")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.error(f"has {key!r} of the unknown type {kind}")
        return self.scalars(kind, 1, key)[0]

    def array(self, key: str) -> list[Any]:
        kind = self.integer("I", f"the item type of {key!r}")
        count = self.integer("Q", f"the length of {key!r}")
        if kind == _ARRAY:
            raise self.error(f"has arrays inside the array {key!r}, which are not read")
        if kind != _STRING and kind not in _SCALARS:
            raise self.error(f"has {key!r} with items of the unknown type {kind}")
        width = 8 if kind == _STRING else struct.calcsize("<" + _SCALARS[kind])
        self.room(count, width, MAX_ARRAY_ITEMS - self.items, f"items in {key!r}")
        self.items += count
        return self.strings(count, key) if kind == _STRING else self.scalars(kind, count, key)

    def scalars(self, kind: int, count: int, key: str) -> list[Any]:
        code = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack(code, self.bytes(struct.calcsize(code), f"{key!r}")))
        return [value != 0 for value in values] if kind == _BOOL else values

    def strings(self, count: int, key: str) -> list[str]:
        """A vocabulary has a hundred thousand strings: cut all, then decode all at once."""
        buffer, at, size = self.buffer, self.at, self.size
        cut: list[bytes] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + _LENGTH(buffer, at)[0]
                if at > size:
                    raise IndexError
                cut.append(buffer[start:at])
        except (IndexError, struct.error) as error:
            raise self.error(f"ends inside item {len(cut)} of {key!r}: it is truncated or damaged") from error
        self.at = at
        texts = b"\0".join(cut).decode(errors="replace").split("\0")
        if len(texts) != count:  # an item holds a NUL itself, or there are none
            texts = [item.decode(errors="replace") for item in cut]
        return texts

    def tensor_info(self) -> GgufTensor:
        """With the offset as the file has it, from the begin of its data."""
        name = self.name("a tensor name")
        dimensions = self.integer("I", f"the dimensions of {name!r}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.error(f"has tensor {name!r} of {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are known")
        shape = tuple(self.integer("Q", f"the shape of {name!r}") for _ in range(dimensions))[::-1]
        type_id = self.integer("I", f"the type of {name!r}")
        offset = self.integer("Q", f"the offset of {name!r}")
        if type_id not in TYPES:
            known = ", ".join(kind[0] for kind in TYPES.values())
            raise self.error(f"has tensor {name!r} of quantization type {type_id}, which is not read; known: {known}")
        kind, block, block_bytes = TYPES[type_id]
        if min(shape) < 1 or shape[-1] % block:
            raise self.error(f"has tensor {name!r} of shape {list(shape)}, which blocks of {block} ({kind}) do not fit")
        return GgufTensor(name, shape, type_id, offset, prod(shape) // block * block_bytes)

    def place(self, infos: list[GgufTensor], alignment: Any) -> dict[str, GgufTensor]:
        """Check where the data of each tensor lies. The specification asks for a multiple of 8 as alignment."""
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self.error(f"has general.alignment {alignment!r:.60}; it must be a power of two of at least 8")
        begin = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for info in infos:
            if info.name in tensors:
                raise self.error(f"has tensor {info.name!r} twice")
            if info.offset % alignment:
                raise self.error(f"has tensor {info.name!r} at offset {info.offset}, not a multiple of {alignment}")
            start = begin + info.offset
            if start + info.nbytes > self.size:
                raise self.error(
                    f"has tensor {info.name!r} at bytes {start} to {start + info.nbytes}, but ends at {self.size}: "
                    "it is truncated or damaged"
                )
            tensors[info.name] = GgufTensor(info.name, info.shape, info.type_id, start, info.nbytes)
        ends = 0
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            if tensor.offset < ends:
                raise self.error(f"has tensor {tensor.name!r} over the data of another")
            ends = tensor.offset + tensor.nbytes
        return tensors
