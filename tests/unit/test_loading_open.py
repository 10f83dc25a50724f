"""Which kind of checkpoint lies at a path."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanoserve.bench.toy import make_toy
from nanoserve.core.errors import CheckpointError
from nanoserve.loading.dummy import DummyCheckpoint
from nanoserve.loading.generation import sampling_defaults
from nanoserve.loading.gguf_checkpoint import GgufCheckpoint
from nanoserve.loading.loader import load_weights
from nanoserve.loading.open import open_checkpoint
from nanoserve.loading.safetensors_checkpoint import SafetensorsCheckpoint
from nanoserve.models.families import model_config
from nanoserve.models.parameters import parameters
from nanoserve.quant.weight import DenseMatrix
from nanoserve.text.load import load_tokenizer
from tiny_gguf import write

CONFIG = {
    "model_type": "qwen3", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip


def folder(tmp_path, **files):
    for name, content in files.items():
        (tmp_path / name.replace("__", ".")).write_text(content)
    return tmp_path


def test_gguf_file_and_folder(tmp_path):
    write(tmp_path / "x.gguf")
    shutil.copy(tmp_path / "x.gguf", tmp_path / "renamed")
    for path in (tmp_path / "x.gguf", tmp_path / "renamed", tmp_path):
        for load_format in ("auto", "gguf"):
            assert isinstance(open_checkpoint(path, load_format), GgufCheckpoint)
    folder(tmp_path, config__json="{}")  # as repositories of converted models have it
    assert open_checkpoint(tmp_path).path == tmp_path / "x.gguf"


def test_load_format_decides_where_both_are_there(tmp_path):
    write(tmp_path / "x.gguf")
    folder(tmp_path, config__json="{}")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert isinstance(open_checkpoint(tmp_path), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(tmp_path, "safetensors"), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(tmp_path, "gguf"), GgufCheckpoint)


def test_several_gguf_files(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"one \.gguf file, or be one; found: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


def test_nothing_that_can_be_opened(tmp_path):
    cases = {
        "gone": "does not exist",
        "empty": "is an empty folder",
        "noconfig": r"config\.json is missing",
        "noweights": r"neither model\.safetensors nor model\.safetensors\.index\.json",
        "notes.txt": "neither a GGUF file nor a folder",
        "alone.safetensors": "has weights alone",
        "bad.gguf": "not a GGUF file",
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "noconfig").mkdir()
    folder(tmp_path / "noconfig", README="x")
    (tmp_path / "noweights").mkdir()
    folder(tmp_path / "noweights", config__json="{}")
    for name in ("notes.txt", "alone.safetensors", "bad.gguf"):
        (tmp_path / name).write_text("just some text")
    for name, fact in cases.items():
        with pytest.raises(CheckpointError, match=fact) as caught:
            open_checkpoint(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(CheckpointError, match="found: none"):
        open_checkpoint(tmp_path / "empty", "gguf")


def test_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        open_checkpoint(tmp_path / "pipe")


def test_opening_imports_no_torch(tmp_path):
    """The HTTP front opens checkpoints, and torch is a second of its start."""
    write(tmp_path / "x.gguf")
    (tmp_path / "hf").mkdir()
    folder(tmp_path / "hf", config__json=json.dumps(CONFIG))
    save_file({"a": torch.ones(1)}, tmp_path / "hf" / "model.safetensors")
    code = (
        "import sys; from pathlib import Path; from nanoserve.loading.open import open_checkpoint\n"
        "from nanoserve.loading.generation import eos_token_ids\n"
        "for path in sys.argv[1:]: eos_token_ids(open_checkpoint(Path(path)))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "x.gguf", tmp_path / "hf"], check=True)


def test_dummy_weights(tmp_path):
    folder(tmp_path, config__json=json.dumps(CONFIG), generation_config__json='{"eos_token_id": 3}')
    found = open_checkpoint(tmp_path, "dummy", seed=1)
    assert isinstance(found, DummyCheckpoint)
    assert found.generation_config == {"eos_token_id": 3}
    wanted = parameters(model_config(found.config))
    weights = load_weights(found, wanted, lambda p: DenseMatrix(p[0].dense()), lambda v: v, lambda done, total: None)
    assert set(weights) == {parameter.name for parameter in wanted}
    assert torch.equal(weights["norm"], torch.ones(32))
    assert torch.equal(weights["layers.0.qkv_bias"], torch.zeros((4 + 2 + 2) * 16))
    name = "model.layers.1.mlp.down_proj.weight"
    weight = found.read(name).data
    assert abs(weight.std().item() - 48**-0.5) < 0.02
    assert torch.equal(weight, open_checkpoint(tmp_path, "dummy", seed=1).read(name).data)
    assert not torch.equal(weight, open_checkpoint(tmp_path, "dummy", seed=2).read(name).data)
    assert not torch.equal(weight, found.read("model.layers.0.mlp.down_proj.weight").data)


def test_dummy_weights_for_the_facts_of_a_gguf(tmp_path):
    write(tmp_path / "x.gguf")
    real, dummy = open_checkpoint(tmp_path), open_checkpoint(tmp_path, "dummy")
    assert dummy.config == real.config
    assert dummy.names == real.names


def test_sampling_defaults_are_the_generation_configs(tmp_path: Path) -> None:
    folder = make_toy(tmp_path / "toy")
    config = folder / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6, "top_k": 20, "max_length": 9, "top_p": None}))
    assert sampling_defaults(open_checkpoint(folder)) == {"temperature": 0.6, "top_k": 20}
    config.write_text(json.dumps({"temperature": -1}))
    with pytest.raises(CheckpointError, match="temperature"):
        sampling_defaults(open_checkpoint(folder))


def test_a_gguf_without_its_suffix_or_in_a_folder_has_its_tokenizer_too(tmp_path):
    write(tmp_path / "x.gguf", keys={"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 40})
    (tmp_path / "link").symlink_to("x.gguf")
    for path in (tmp_path / "x.gguf", tmp_path / "link", tmp_path):
        assert load_tokenizer(path).vocab_size == 40


SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
         "model.safetensors")  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", ["pipe", "folder", "link to nothing", "link to itself"])
def test_A47_what_is_there_and_no_file_is_named_and_never_waited_for(tmp_path, name, kind):
    file = make_toy(tmp_path) / name
    file.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "link to nothing":
            file.symlink_to("nothing")
        case _:
            file.symlink_to(file)
    read = (
        load_tokenizer
        if name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        else open_checkpoint
    )
    with pytest.raises(CheckpointError, match=f"{re.escape(str(file))} is (not a file|a link that leads to no file)"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_json_may_begin_with_a_byte_order_mark(tmp_path, name):
    file = make_toy(tmp_path) / name
    file.write_text(file.read_text(), encoding="utf-8-sig")
    open_checkpoint(tmp_path)
    assert load_tokenizer(tmp_path).chat_template


def test_a_chat_template_that_is_no_text_is_named(tmp_path):
    (make_toy(tmp_path) / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        load_tokenizer(tmp_path)
