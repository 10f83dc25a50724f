"""A GGUF file of a tiny random model, written by the reference writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN, VOCAB = 64, 4, 2, 2, 96, 40
HEAD_DIM = HIDDEN // HEADS


def weights(arch: str = "llama", seed: int = 0) -> dict[str, np.ndarray]:
    """float32, under Hugging Face's names and in its order of rows."""
    random = np.random.default_rng(seed)
    kv = KV_HEADS * HEAD_DIM
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            if arch == "qwen2":
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        if arch == "qwen3":
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, FFN)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + D/2 of each head become 2i and 2i + 1, as the llama architecture stores q and k."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    for theirs, ours in (
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
        ("model.layers", "blk"), ("self_attn.o_proj", "attn_output"), ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"), ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"), ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    return name


def write(
    path: Path,
    arch: str = "llama",
    keys: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    types: dict[str, str] | None = None,
    drop: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Write a model and return its weights. `keys` are set after the usual ones, None removes one; `extra` tensors go
    under the names given; `types` is a quantization by the end of a Hugging Face name, F32 elsewhere."""
    tensors = weights(arch)
    facts: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | (keys or {})
    writer = gguf.GGUFWriter(path, facts.pop("general.architecture", arch))
    for key, value in facts.items():
        if value is None:
            continue
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, weight in tensors.items():
        if name in drop:
            continue
        stored = weight
        if arch in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            stored = interleave(weight, HEADS if "q_proj" in name else KV_HEADS)
        _add(
            writer, gguf_name(name), stored, next((t for end, t in (types or {}).items() if name.endswith(end)), "F32")
        )
    for name, weight in (extra or {}).items():
        _add(writer, name, weight, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(weight, number), raw_dtype=number)
