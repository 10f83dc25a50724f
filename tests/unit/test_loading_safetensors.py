"""Safetensors folders: in one piece, in shards, damaged, hostile."""

from __future__ import annotations

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.open import open_checkpoint
from nanoserve.loading.safetensors_checkpoint import SafetensorsCheckpoint

TENSORS = {"a.weight": torch.arange(12.0).view(3, 4), "b.weight": torch.ones(5).bfloat16(), "c": torch.ones(2).half()}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def single(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / FIRST)
    save_file({name: TENSORS[name] for name in ("b.weight", "c")}, tmp_path / SECOND)
    index(tmp_path, {"a.weight": FIRST, "b.weight": SECOND, "c": SECOND})
    return tmp_path


def index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_reads_names_shapes_and_values(kind, request):
    folder = request.getfixturevalue(kind)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    found = open_checkpoint(folder)
    assert isinstance(found, SafetensorsCheckpoint)
    assert found.config == {"model_type": "llama"}
    assert found.generation_config == {"eos_token_id": [2, 7]}
    assert found.names == set(TENSORS) == set(found)
    for name, tensor in TENSORS.items():
        weight = found.read(name)
        assert found.shape(name) == weight.shape == tuple(tensor.shape)
        assert weight.format is None
        assert weight.data.dtype == tensor.dtype
        assert torch.equal(weight.data, tensor)


def test_tensors_are_mapped_from_the_file(single):
    data = open_checkpoint(single).read("a.weight").data
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("model.safetensors")]
    assert any(int(low, 16) <= data.data_ptr() < int(high, 16) for low, high in ranges)


def test_no_generation_config(single):
    assert open_checkpoint(single).generation_config == {}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float8_e4m3fn])
def test_type_that_is_not_a_weight(single, dtype):
    save_file({"odd": torch.ones(4).to(dtype)}, single / "model.safetensors")
    found = open_checkpoint(single)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'odd' is of type (I64|F64|F8_E4M3)"):
        found.read("odd")


def test_A43_missing_shard(sharded):
    (sharded / SECOND).unlink()
    with pytest.raises(CheckpointError, match=f"files that are missing: .*{SECOND}"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("kept", [0, 7, 8, 60, -1])
def test_A43_truncated_shard(sharded, kept):
    content = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=rf"{SECOND} is damaged, truncated or cannot be read"):
        open_checkpoint(sharded)


def test_A43_offsets_out_of_range(single):
    path = single / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        open_checkpoint(single)


def test_A43_header_length_of_2_to_the_62(single):
    content = (single / "model.safetensors").read_bytes()
    (single / "model.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + content[8:])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        open_checkpoint(single)


@pytest.mark.parametrize("name", ["../x.safetensors", "sub/x.safetensors", "/etc/passwd", "..", "", "a\\b", "sub/../x"])
def test_A43_names_outside_the_folder(sharded, name):
    (sharded.parent / "x.safetensors").write_bytes(b"")
    index(sharded, {"a.weight": FIRST, "b.weight": name})
    with pytest.raises(CheckpointError, match=r"index\.json names .* which is not a file inside"):
        open_checkpoint(sharded)


def test_A43_link_out_of_the_folder(sharded, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "x.safetensors"
    (sharded / SECOND).rename(elsewhere)
    (sharded / SECOND).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="which is not a file inside"):
        open_checkpoint(sharded)


def test_links_of_the_hugging_face_cache(sharded, tmp_path_factory):
    repository = tmp_path_factory.mktemp("models--a--b")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in sharded.iterdir():
        blob = repository / "blobs" / f"hash-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    assert open_checkpoint(snapshot).names == set(TENSORS)


def test_A43_stray_files_are_ignored(sharded):
    save_file({"a.weight": torch.zeros(1), "z": torch.zeros(1)}, sharded / "stray.safetensors")
    (sharded / "notes.txt").write_text("x")
    found = open_checkpoint(sharded)
    assert found.names == set(TENSORS)
    assert torch.equal(found.read("a.weight").data, TENSORS["a.weight"])


def test_A43_index_names_a_tensor_that_its_file_lacks(sharded):
    index(sharded, {"a.weight": FIRST, "b.weight": SECOND, "c": SECOND, "d": FIRST})
    with pytest.raises(CheckpointError, match=r"tensors that are not in their files: d$"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "x", "[" * 100_000])
def test_A43_index_without_a_map(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_config_that_is_no_json_object(single, content):
    (single / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(single)


QUANTIZED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["lm_head"]},
    "compressed-tensors": {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*gate"]},
    "fp8": {"quant_method": "fp8", "ignored_layers": ["model.layers.0"]},
    "mystery": {"quant_method": "mystery", "bits": 3},
    None: {"bits": 4},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_A45_a_quantized_checkpoint_is_refused_by_its_method(single, method):
    (single / "config.json").write_text(json.dumps({"quantization_config": QUANTIZED[method]}))
    with pytest.raises(
        CheckpointError, match=rf"config\.json: .* quant_method {re.escape(repr(method))}, which is not supported yet"
    ):
        open_checkpoint(single)


class Payload:
    """Pickled, it writes a file where it is loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_A55_pickled_weights_are_not_loaded(tmp_path, suffix):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / f"pytorch_model{suffix}"
    weights.write_bytes(pickle.dumps(Payload(tmp_path / "marker")))
    for path in (tmp_path, weights):
        with pytest.raises(CheckpointError, match=r"which (is|are) not loaded: (it|they) can run code"):
            open_checkpoint(path)
    assert not (tmp_path / "marker").exists()


def test_A56_code_in_the_folder_is_never_run(single):
    code = f"open({str(single / 'marker')!r}, 'w')"
    for name in ("modeling_x", "configuration_x", "conftest", "safetensors", "sitecustomize"):
        (single / f"{name}.py").write_text(code)
    auto = {"auto_map": {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M"}}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (single / name).write_text(json.dumps(auto))
    found = open_checkpoint(single)
    for name in found:
        found.read(name)
    assert not (single / "marker").exists()


@pytest.mark.parametrize("name", [None, 3, "", {}, [], "a\0b", "x" * 300, "loop"])
def test_an_index_whose_files_have_no_possible_name(sharded, name):
    (sharded / "loop").symlink_to("loop")
    index(sharded, {"a.weight": FIRST, "b.weight": name, "c": SECOND})
    with pytest.raises(CheckpointError, match=re.escape(str(sharded))):
        open_checkpoint(sharded)
