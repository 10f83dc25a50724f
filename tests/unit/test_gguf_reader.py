"""The GGUF reader: what it reads, and that no file, however crafted, gets more than an error."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.gguf import read_gguf
from nanoserve.loading.gguf_checkpoint import GgufCheckpoint
from nanoserve.loading.loader import load_weights
from nanoserve.models.families import model_config
from nanoserve.models.parameters import parameters
from nanoserve.quant.weight import DenseMatrix
from tiny_gguf import VOCAB, write


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def info(name: str | bytes, shape: tuple[int, ...], type_id: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_id, offset)


def crafted(keys: list[bytes] = (), infos: list[bytes] = (), data: int = 256, **counts: int) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", counts.get("version", 3), counts.get("num_tensors", len(infos)),
                                 counts.get("num_keys", len(keys)))  # fmt: skip
    body = head + b"".join(keys) + b"".join(infos)
    return body + bytes(-len(body) % 32) + bytes(data)


def read(tmp_path, content: bytes):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def test_reads_what_the_reference_writer_wrote(tmp_path):
    facts = {"a.bool": True, "a.text": "é\0x", "a.ints": [1, -2, 3], "a.floats": [0.5, 1.5],
             "a.strings": ["", "ü", "a\0b"], "a.float": 0.25}  # fmt: skip
    tensors = write(tmp_path / "x.gguf", keys=facts)
    file = read_gguf(tmp_path / "x.gguf")
    assert {name: file.metadata[name] for name in facts} == facts
    assert file.metadata["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(VOCAB)]
    assert file.metadata["llama.block_count"] == 2
    norm = file.tensors["output_norm.weight"]
    assert norm.shape == (64,)
    assert np.array_equal(np.frombuffer(file.buffer, np.float32, 64, norm.offset), tensors["model.norm.weight"])


def test_scalar_types(tmp_path):
    kinds = {0: ("B", 255), 1: ("b", -1), 2: ("H", 65535), 3: ("h", -2), 4: ("I", 2**32 - 1), 5: ("i", -3),
             6: ("f", 0.5), 10: ("Q", 2**64 - 1), 11: ("q", -4), 12: ("d", 1e300)}  # fmt: skip
    keys = [key(f"k{kind}", kind, struct.pack("<" + code, value)) for kind, (code, value) in kinds.items()]
    assert read(tmp_path, crafted(keys)).metadata == {f"k{kind}": value for kind, (_, value) in kinds.items()}


def test_version_2_is_read(tmp_path):
    assert read(tmp_path, crafted([key("a", 7, b"\1")], version=2)).metadata == {"a": True}


def test_custom_alignment(tmp_path):
    write(tmp_path / "x.gguf", keys={"general.alignment": 128})
    assert all(tensor.offset % 128 == 0 for tensor in read_gguf(tmp_path / "x.gguf").tensors.values())


def test_text_that_is_not_utf8(tmp_path):
    array = struct.pack("<IQ", 8, 2) + text(b"\xff") + text("ok")
    metadata = read(tmp_path, crafted([key("a", 8, text(b"x\xffy")), key("b", 9, array)])).metadata
    assert metadata == {"a": "x\ufffdy", "b": ["\ufffd", "ok"]}


ALIGN = "general.alignment"
CRAFTED = {
    "empty file": (b"", "cannot be read"),
    "other file": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "version 1": (crafted(version=1), "version 1"),
    "big-endian": (crafted(version=0x03000000), "big-endian"),
    "n_kv 2**63": (crafted(num_keys=2**63), "9223372036854775808 keys"),
    "n_kv more than bytes": (crafted(num_keys=1000), "1000 keys"),
    "tensor count 2**40": (crafted(num_tensors=2**40), "1099511627776 tensors"),
    "string length 2**62": (crafted([key("a", 8, struct.pack("<Q", 2**62))]), "bytes in 'a'"),
    "key length 2**62": (crafted([struct.pack("<Q", 2**62) + bytes(20)]), "bytes in a key"),
    "key is no text": (crafted([key(b"\xff\xfe", 7, b"\1")]), "not UTF-8"),
    "key twice": (crafted([key("a", 7, b"\1")] * 2), "key 'a' twice"),
    "unknown type": (crafted([key("a", 13, bytes(8))]), "unknown type 13"),
    "array of arrays": (crafted([key("a", 9, struct.pack("<IQ", 9, 1) + bytes(32))]), "arrays inside the array 'a'"),
    "array of nothing known": (crafted([key("a", 9, struct.pack("<IQ", 99, 1))]), "unknown type 99"),
    "array length 2**61": (crafted([key("a", 9, struct.pack("<IQ", 5, 2**61))]), "items in 'a'"),
    "strings 2**60": (crafted([key("a", 9, struct.pack("<IQ", 8, 2**60))]), "items in 'a'"),
    "string inside an array": (crafted([key("a", 9, struct.pack("<IQQ", 8, 1, 2**63) + bytes(64))]), "item 0 of 'a'"),
    "item past the end": (crafted([key("a", 9, struct.pack("<IQQ", 8, 20, 250))]), "of 'a'"),
    "alignment 0": (crafted([key(ALIGN, 4, struct.pack("<I", 0))]), "alignment 0"),
    "alignment 2**31": (
        crafted([key(ALIGN, 4, struct.pack("<I", 2**31))], [info("t", (8,))]), "'t' at bytes 2147483648"
    ),
    "alignment 24": (crafted([key(ALIGN, 4, struct.pack("<I", 24))]), "alignment 24"),
    "alignment text": (crafted([key(ALIGN, 8, text("x"))]), "alignment 'x'"),
    "dims product overflow": (crafted(infos=[info("t", (2**32, 2**32, 2**32))]), "'t' at bytes"),
    "dims negative": (crafted(infos=[info("t", (2**64 - 32,))]), "'t' at bytes"),
    "no dims": (crafted(infos=[info("t", ())]), "0 dimensions"),
    "2**31 dims": (crafted(infos=[text("t") + struct.pack("<I", 2**31) + bytes(64)]), "2147483648 dimensions"),
    "zero dim": (crafted(infos=[info("t", (0, 4))]), "do not fit"),
    "offset past the end": (crafted(infos=[info("t", (8,), offset=2**40)]), "truncated"),
    "offset 2**64 - 32": (crafted(infos=[info("t", (8,), offset=2**64 - 32)]), "truncated"),
    "offset not aligned": (crafted(infos=[info("t", (8,), offset=4)]), "not a multiple of 32"),
    "type 255": (crafted(infos=[info("t", (8,), 255)]), "quantization type 255"),
    "removed type": (crafted(infos=[info("t", (32,), 4)]), "quantization type 4"),
    "half a block": (crafted(infos=[info("t", (48,), 3)]), r"\[48\], which blocks of 32 \(Q4_1\)"),
    "tensor twice": (crafted(infos=[info("t", (8,)), info("t", (8,), offset=32)]), "'t' twice"),
    "tensors overlap": (crafted(infos=[info("t", (16,)), info("u", (8,), offset=32)]), "'u' over the data"),
    "tensor name no text": (crafted(infos=[info(b"\xff", (8,))]), "not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_A47_crafted_file_gets_one_clear_error(tmp_path, name):
    content, fact = CRAFTED[name]
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=fact) as caught:
        read(tmp_path, content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(tmp_path / "x.gguf") in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert peak < 1 << 20


def load(path):
    """Everything that serving does with a checkpoint before the first request."""
    checkpoint = GgufCheckpoint(path)
    facts = model_config(checkpoint.config)
    return load_weights(
        checkpoint, parameters(facts), lambda parts: DenseMatrix(parts[0].dense()), lambda v: v, lambda done, n: None
    )


def test_A47_truncated_at_each_16_bytes(tmp_path):
    path = tmp_path / "x.gguf"
    write(path, types={"proj.weight": "Q4_0"})
    content = path.read_bytes()
    for length in range(0, len(content) - 32, 16):  # the end is padding
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)


def test_A47_mutated_bytes_load_or_fail_with_one_error(tmp_path):
    path = tmp_path / "x.gguf"
    write(path, types={"proj.weight": "Q8_0"})
    content = path.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    random = np.random.default_rng(0)
    outcomes = {"loaded": 0, "refused": 0}
    tracemalloc.start()
    for _ in range(800):
        mutated = bytearray(content)
        for _ in range(random.integers(1, 4)):
            at = int(random.integers(0, header))
            match random.integers(0, 3):
                case 0:
                    mutated[at] ^= 1 << int(random.integers(0, 8))
                case 1:
                    mutated[at] = int(random.integers(0, 256))
                case _:
                    mutated[at : at + 8] = struct.pack("<Q", 1 << int(random.integers(0, 64)))
        path.write_bytes(mutated)
        try:
            load(path)
            outcomes["loaded"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(outcomes.values()) > 15, outcomes
    assert peak < 64 << 20
