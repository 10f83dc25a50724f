"""A GGUF file as a checkpoint: facts, names, the order of rows, and errors that name the key."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.generation import eos_token_ids
from nanoserve.loading.gguf_checkpoint import GgufCheckpoint, hugging_face_name
from nanoserve.loading.loader import load_weights
from nanoserve.models.families import model_config
from nanoserve.models.parameters import parameters
from nanoserve.quant.gguf import Q4_0, Q8_0
from nanoserve.quant.weight import DenseMatrix
from tiny_gguf import FFN, HEAD_DIM, HIDDEN, VOCAB, gguf_name, write

ARCHITECTURES = ("llama", "smollm3", "qwen2", "qwen3")


def checkpoint(tmp_path, *args, **kwargs) -> GgufCheckpoint:
    write(tmp_path / "x.gguf", *args, **kwargs)
    return GgufCheckpoint(tmp_path / "x.gguf")


def load(found: GgufCheckpoint):
    place = lambda parts: DenseMatrix.place(parts, torch.float32, torch.device("cpu"))  # noqa: E731
    wanted = parameters(model_config(found.config))
    return load_weights(found, wanted, place, lambda v: v, lambda done, total: None)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_come_under_their_names_in_their_order(tmp_path, arch):
    tensors = write(tmp_path / "x.gguf", arch)
    found = GgufCheckpoint(tmp_path / "x.gguf")
    assert found.names == set(tensors) == set(found)
    for name, weight in tensors.items():
        assert found.shape(name) == weight.shape
        assert np.array_equal(found.read(name).dense().numpy(), weight)
    fused = load(found)["layers.1.qkv"].weight.numpy()
    parts = [tensors[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert np.array_equal(fused, np.concatenate(parts))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_facts(tmp_path, arch):
    facts = model_config(checkpoint(tmp_path, arch).config)
    assert (facts.family, facts.vocab_size, facts.hidden_size, facts.head_dim) == (arch, VOCAB, HIDDEN, HEAD_DIM)
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.intermediate_size) == (4, 2, FFN)
    assert (facts.num_layers, facts.max_position_embeddings, facts.rms_norm_eps) == (2, 128, 1e-5)
    assert facts.tie_word_embeddings
    assert facts.qkv_bias == (arch == "qwen2")
    assert facts.qk_norm == (arch == "qwen3")


@pytest.mark.parametrize("fmt", [Q4_0, Q8_0], ids=lambda f: f.name)
def test_rows_of_quantized_q_and_k_are_put_back_as_blocks(tmp_path, fmt):
    write(tmp_path / "x.gguf", types={"proj.weight": fmt.name})
    found = GgufCheckpoint(tmp_path / "x.gguf")
    tensors = write(tmp_path / "plain.gguf")
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = found.read(f"model.layers.0.self_attn.{name}.weight")
        assert weight.format is fmt
        plain = torch.from_numpy(tensors[f"model.layers.0.self_attn.{name}.weight"])
        assert torch.equal(weight.data, fmt.quantize(plain))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_dense_types(tmp_path, kind, dtype):
    tensors = write(tmp_path / "x.gguf", types={"weight": kind})
    weight = GgufCheckpoint(tmp_path / "x.gguf").read("model.layers.0.mlp.up_proj.weight")
    assert weight.format is None
    assert weight.data.dtype == dtype
    assert torch.equal(weight.data, torch.from_numpy(tensors["model.layers.0.mlp.up_proj.weight"]).to(dtype))


def test_head_of_its_own(tmp_path):
    head = np.ones((VOCAB, HIDDEN), np.float32)
    found = checkpoint(tmp_path, extra={"output.weight": head})
    assert not found.config["tie_word_embeddings"]
    assert torch.equal(load(found)["head"].weight, torch.from_numpy(head))


def test_head_dim_of_its_own(tmp_path):
    """The embedding has 64 channels for 4 heads, and each head 16 of them or what key_length says."""
    found = checkpoint(tmp_path, "qwen3", {"qwen3.attention.key_length": 32, "qwen3.attention.value_length": 32})
    assert found.config["head_dim"] == 32
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has the shape"):
        load(found)


def test_end_tokens(tmp_path):
    keys = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    found = checkpoint(tmp_path, keys=keys)
    assert eos_token_ids(found) == (2, 7)
    assert found.generation_config["bos_token_id"] == 1


ROPE = {
    "none": ({}, ("default", {})),
    "linear": ({"type": "linear", "factor": 4.0}, ("linear", {"factor": 4.0})),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_beta_fast": 16.0},
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "truncate": True}),
    ),
    "yarn with a factor on top": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 32, "attn_factor": 0.5},
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32, "truncate": True,
                  "attention_factor": 0.5 * (0.1 * math.log(4) + 1)}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPE)
def test_A41_rope_scaling(tmp_path, name):
    scaling, (kind, numbers) = ROPE[name]
    keys = {f"qwen2.rope.scaling.{key}": value for key, value in scaling.items()}
    rope = model_config(checkpoint(tmp_path, "qwen2", keys).config).layers[0].rope
    assert (rope.kind, dict(rope.scaling)) == (kind, numbers)


def test_A41_older_spelling_of_linear_scaling(tmp_path):
    assert checkpoint(tmp_path, keys={"llama.rope.scale_linear": 2.0}).config["rope_scaling"]["factor"] == 2.0


def llama3_divisors(factor: float, theta: float = 500000.0, original: float = 8192.0) -> np.ndarray:
    """As Llama 3.1 defines them, by wavelength."""
    out = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * theta ** (i / HEAD_DIM)
        smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / factor + smooth)
        out.append(1.0 if wavelength < original / 4 else factor if wavelength > original else between)
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_A41_llama3_positions_are_found_in_their_tensor(tmp_path, factor):
    divisors = llama3_divisors(factor)
    assert np.unique(divisors).size > 1
    found = checkpoint(tmp_path, keys={"llama.rope.freq_base": 500000.0}, extra={"rope_freqs.weight": divisors})
    rope = model_config(found.config).layers[0].rope
    assert rope.kind == "llama3"
    assert dict(rope.scaling) == {
        "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
    }  # fmt: skip
    load(found)  # and the tensor is not left over


def test_divisors_of_one_are_plain_positions(tmp_path):
    found = checkpoint(tmp_path, extra={"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)})
    assert found.config["rope_scaling"] is None


@pytest.mark.parametrize(
    "divisors", [llama3_divisors(8.0)[::-1], np.full(8, np.nan, np.float32), np.full(8, np.inf, np.float32),
                 np.full(8, -1, np.float32), np.ones(5, np.float32)]
)  # fmt: skip
def test_divisors_of_another_kind_are_refused(tmp_path, divisors):
    with pytest.raises(CheckpointError, match=r"x\.gguf: has a tensor 'rope_freqs.weight' that is not"):
        checkpoint(tmp_path, extra={"rope_freqs.weight": np.ascontiguousarray(divisors)})


def test_layer_by_layer_values_that_agree(tmp_path):
    found = checkpoint(tmp_path, keys={"llama.feed_forward_length": [FFN, FFN]})
    assert found.config["intermediate_size"] == FFN


def test_sliding_window_makes_it_a_mistral(tmp_path):
    facts = model_config(checkpoint(tmp_path, keys={"llama.attention.sliding_window": 16}).config)
    assert (facts.family, facts.layers[0].window) == ("mistral", 16)


BAD_FACTS = {
    "block_count 0": ({"llama.block_count": 0}, r"llama\.block_count is 0"),
    "block_count text": ({"llama.block_count": "two"}, r"llama\.block_count is 'two'"),
    "block_count missing": ({"llama.block_count": None}, r"llama\.block_count is missing"),
    "block_count huge": ({"llama.block_count": 2**31}, r"llama\.block_count is 2147483648"),
    "head_count 0": ({"llama.attention.head_count": 0}, r"head_count is 0"),
    "head_count_kv 3": ({"llama.attention.head_count_kv": 3}, "num_key_value_heads is 3"),
    "head counts that differ": ({"llama.attention.head_count": [4, 2]}, r"head_count is \[4, 2\]"),
    "bos outside the vocabulary": ({"tokenizer.ggml.bos_token_id": VOCAB}, f"bos_token_id is {VOCAB}, not a token"),
    "eos outside the vocabulary": ({"tokenizer.ggml.eos_token_id": 2**32 - 1}, "eos_token_id is 4294967295"),
    "eos text": ({"tokenizer.ggml.eos_token_id": "end"}, "eos_token_id is 'end'"),
    "more tokens than rows": ({"tokenizer.ggml.tokens": ["t"] * (VOCAB + 1)}, "does not fit the 40 rows"),
    "eps missing": ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    "eps not a number": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
    "partial rotary": ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count is 8"),
    "values of another size": ({"llama.attention.value_length": 8}, r"value_length is 8"),
    "experts": ({"llama.expert_count": 8}, "expert_count is 8"),
    "unknown scaling": ({"llama.rope.scaling.type": "spiral"}, "none, linear, yarn"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
    "scaling that is not understood": ({"llama.rope.scaling.alpha": 2.0}, r"rope\.scaling\.alpha is not supported"),
    "one part of several": ({"split.count": 3}, "one part of a split GGUF"),
    "unknown architecture": ({"general.architecture": "mamba"}, "'mamba'; known: llama, smollm3, qwen2, qwen3"),
}


@pytest.mark.parametrize("name", BAD_FACTS)
def test_A47_bad_facts_get_one_clear_error(tmp_path, name):
    keys, fact = BAD_FACTS[name]
    write(tmp_path / "x.gguf", keys=keys)
    with pytest.raises(CheckpointError, match=fact):
        load(GgufCheckpoint(tmp_path / "x.gguf"))


def test_missing_and_unknown_tensors_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"x\.gguf: has no tensor 'token_embd\.weight'"):
        checkpoint(tmp_path, drop=("model.embed_tokens.weight",))
    with pytest.raises(CheckpointError, match=r"x\.gguf has no model\.layers\.1\.mlp\.up_proj\.weight"):
        load(checkpoint(tmp_path, drop=("model.layers.1.mlp.up_proj.weight",)))
    extra = np.zeros((4, 4), np.float32)
    with pytest.raises(CheckpointError, match=r"no place for: blk\.0\.ffn_gate_inp\.weight, model\.layers\.7\.mlp"):
        load(checkpoint(tmp_path, extra={"blk.0.ffn_gate_inp.weight": extra, "blk.7.ffn_up.weight": extra}))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' under two names"):
        checkpoint(tmp_path, extra={"model.norm.weight": extra})
    with pytest.raises(CheckpointError, match="rope_factors_long"):
        checkpoint(tmp_path, extra={"rope_factors_long.weight": extra})


def test_names():
    assert hugging_face_name("blk.12.attn_k.bias") == "model.layers.12.self_attn.k_proj.bias"
    for name in ("blk.x.attn_k.bias", "blk.1.attn_k", "blk.1.attn_z.weight", "blk.١.attn_k.weight", ""):
        assert hugging_face_name(name) == name
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.3.self_attn.q_norm.weight"):
        assert hugging_face_name(gguf_name(name)) == name


def test_default_model(smollm2):
    """The facts as transformers reads them from the same file."""
    found = GgufCheckpoint(smollm2)
    facts = model_config(found.config)
    assert (facts.family, facts.hidden_size, facts.num_layers, facts.intermediate_size) == ("llama", 576, 30, 1536)
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim) == (9, 3, 64)
    assert (facts.vocab_size, facts.max_position_embeddings, facts.rms_norm_eps) == (49152, 8192, 1e-5)
    assert facts.layers[0].rope.theta == 100000.0
    assert facts.layers[0].rope.kind == "default"
    assert facts.tie_word_embeddings
    assert eos_token_ids(found) == (2,)
    assert {part.name for p in parameters(facts) for part in p.parts} == found.names
