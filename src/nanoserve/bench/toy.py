"""A toy checkpoint: random weights of a real architecture, and a tokenizer in which one byte is one token, so that a
test can assert a prompt's exact ids. Made in a moment, for tests and benchmarks of everything but a model's quality."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanoserve.models.families import model_config
from nanoserve.models.parameters import parameters

END_OF_TEXT, IM_START, IM_END = 256, 257, 258  # the ids after the bytes'
SPECIAL = {END_OF_TEXT: "<|endoftext|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Each family with the fact that sets it apart switched on.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 48, "head_dim": 16},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 24},
}

# Standard deviations over 1/sqrt(inputs), and means of norms. What attention and the feed-forward add must outweigh
# the embedding it is added to: under a tied head, the token nearest to a hardly touched embedding is that token, for
# ever repeated. Sharp queries and keys make the output depend on single tokens of the context.
GAINS = {"q_proj": 2.5, "k_proj": 2.5, "o_proj": 6.0, "down_proj": 8.0, "q_norm": 2.0, "k_norm": 2.0}


def make_toy(folder: Path, family: str = "llama", seed: int = 0, shards: int = 1, **overrides: Any) -> Path:
    """Writes a Hugging Face folder and returns it. `overrides` are fields of config.json; the same arguments make the
    same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": family,
        "vocab_size": IM_END + 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "dtype": "float32",
        **FAMILIES[family],
        **overrides,
    }
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"], "pad_token_id": END_OF_TEXT})
    _write(folder / "tokenizer.json", _tokenizer())
    _write(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    })  # fmt: skip
    _save(folder, _weights(config, seed), shards)
    return folder


def _weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for parameter in parameters(model_config(config)):
        for part in parameter.parts:
            module = part.name.split(".")[-2]
            noise, gain = torch.randn(part.shape, generator=generator), GAINS.get(module, 1.0)
            if parameter.is_matrix:
                found[part.name] = noise * (gain / part.shape[1] ** 0.5)
            else:
                found[part.name] = noise * 0.1 + (gain if "norm" in module else 0.0)
    return found


def _save(folder: Path, weights: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    where: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        shard = {name: weights[name] for name in names[i::shards]}
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(weight.nbytes for weight in weights.values())
    _write(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _tokenizer() -> dict[str, Any]:
    """A byte-level BPE without merges. Ids of bytes are the bytes."""
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, text in SPECIAL.items()
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """The character by which a byte-level BPE writes each byte: itself where it is printable, else the next unused
    one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
