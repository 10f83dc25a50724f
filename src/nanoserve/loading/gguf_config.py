"""A GGUF file's metadata, told in the vocabulary of a Hugging Face config.json. It knows no weights."""

from __future__ import annotations

import math
import struct
from typing import Any

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.gguf import GgufFile
from nanoserve.models.fields import Fields

ARCHITECTURES = ("llama", "smollm3", "qwen2", "qwen3")
PERMUTED = ("llama", "smollm3")  # their q and k rows are stored in the order of interleaved rotation

# What the llama3 stretch of every published model is made with; a GGUF has only the divisors that come out of it.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONG_ROPE = ("rope_factors_long.weight", "rope_factors_short.weight")
KNOWN_SCALING = (
    "type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "finetuned"
)  # fmt: skip


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Raises CheckpointError, which names the file, the key and what it holds."""
    try:
        return _config(file)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from error


def gguf_generation_config(file: GgufFile) -> dict[str, Any]:
    """All ids that end an answer: of the text, of a turn, of a message that calls a tool."""
    tokenizer = _fields(file, "tokenizer.ggml.")
    vocab_size = _vocab_size(file)
    ids = {name: _token_id(tokenizer, f"{name}_token_id", vocab_size) for name in ("bos", "eos", "eot", "eom")}
    ends = [ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None]
    return {"bos_token_id": ids["bos"], "eos_token_id": list(dict.fromkeys(ends))}


def _config(file: GgufFile) -> dict[str, Any]:
    arch = Fields(file.metadata).word("general.architecture", ARCHITECTURES)
    if file.metadata.get("split.count", 1) != 1:
        raise CheckpointError("is one part of a split GGUF, which is not read; merge the parts into one file")
    fields = _fields(file, f"{arch}.")
    for name in ("expert_count", "attention.sliding_window_pattern", "attention.temperature_scale"):
        if fields.raw.get(name):
            raise fields.error(name, f"is {fields.raw[name]!r:.60}, which is not supported")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(name, head_dim) != head_dim:
            raise fields.error(name, f"is {fields.raw[name]}, and only that of whole heads, {head_dim}, is supported")
    config = {
        "model_type": arch,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count", at_most=max(len(file.tensors), 1)),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": _shortest(fields.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(fields.number("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, fields, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **gguf_generation_config(file),
    }
    if fields.raw.get("attention.sliding_window"):
        if arch != "llama":
            raise fields.error("attention.sliding_window", "is set, which is not supported for this architecture")
        config |= {"model_type": "mistral", "sliding_window": fields.integer("attention.sliding_window")}
    return config


def _fields(file: GgufFile, prefix: str) -> Fields:
    """The keys below `prefix`. A value given layer by layer counts as one where all layers agree."""
    raw = {}
    for key, value in file.metadata.items():
        if key.startswith(prefix):
            same = isinstance(value, list) and prefix != "tokenizer.ggml." and value[1:] == value[:-1]
            raw[key.removeprefix(prefix)] = value[0] if same and value else value
    return Fields(raw, inside=prefix)


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: there may be more than tokens, never less."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("has no tensor 'token_embd.weight'")
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list) or len(tokens) > embedding.shape[0]:
        raise CheckpointError(f"tokenizer.ggml.tokens does not fit the {embedding.shape[0]} rows of the embedding")
    return embedding.shape[0]


def _token_id(tokenizer: Fields, name: str, vocab_size: int) -> int | None:
    value = tokenizer.raw.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size):
        raise tokenizer.error(name, f"is {value!r:.60}, not a token of the vocabulary of {vocab_size}")
    return value


def _rope_scaling(file: GgufFile, fields: Fields, head_dim: int) -> dict[str, Any] | None:
    for name in LONG_ROPE:
        if name in file.tensors:
            raise CheckpointError(f"has the tensor {name!r}: longrope from a GGUF is not supported")
    scaling = Fields(
        {key.removeprefix("rope.scaling."): v for key, v in fields.raw.items() if key.startswith("rope.scaling.")},
        inside=f"{fields.inside}rope.scaling.",
    )
    for name in scaling.raw:
        if name not in KNOWN_SCALING:
            raise scaling.error(name, "is not supported")
    linear = "linear" if fields.has("rope.scale_linear") else "none"  # the older spelling
    kind = scaling.word("type", ("none", "linear", "yarn"), linear)
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise scaling.error("type", f"is {kind!r} beside the tensor 'rope_freqs.weight', which is not supported")
        return _llama3_scaling(file, head_dim, fields.number("rope.freq_base", 10000.0))
    if kind == "none":
        return None
    factor = scaling.number("factor", fields.number("rope.scale_linear", 1.0))
    if kind == "linear":
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    out: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if scaling.has("original_context_length"):
        out["original_max_position_embeddings"] = scaling.integer("original_context_length")
    for key in ("beta_fast", "beta_slow"):
        if scaling.has(f"yarn_{key}"):
            out[key] = scaling.number(f"yarn_{key}")
    if scaling.has("attn_factor"):  # there it multiplies the factor that follows from the stretch; here it is all of it
        out["attention_factor"] = scaling.number("attn_factor") * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return out


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    """The tensor divides the frequency of each channel pair. Find the parameters that it was made with."""
    tensor, pairs = file.tensors["rope_freqs.weight"], head_dim // 2
    if tensor.type_id != 0 or tensor.shape != (pairs,):
        raise CheckpointError(f"has a tensor 'rope_freqs.weight' that is not {pairs} numbers of type F32")
    divisors = struct.unpack_from(f"<{pairs}f", file.buffer, tensor.offset)
    factor = max(divisors)
    low, high, original = LLAMA3.values()
    for i, divisor in enumerate(divisors):
        turns = original * theta ** (-2 * i / head_dim) / (2 * math.pi)  # of this pair, within the original length
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not 1 <= factor < 1e6 or not math.isclose(divisor, 1 / ((1 - keep) / factor + keep), rel_tol=1e-4):
            raise CheckpointError("has a tensor 'rope_freqs.weight' that is not Llama 3's stretch of the positions")
    return None if factor == 1 else {"rope_type": "llama3", "factor": _shortest(factor), **LLAMA3}


def _shortest(value: float) -> float:
    """The number with the fewest digits that is this float32: 1e-05 for 9.999999747378752e-06."""
    exact = struct.pack("<f", value) if abs(value) < 3e38 else b""
    candidates = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((c for c in candidates if exact and struct.pack("<f", c) == exact), value)
