"""Tiny configs of every family and every fact that sets one checkpoint apart from another."""

from __future__ import annotations

from collections.abc import Callable

import transformers as hf

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Where a kind treats channels by how fast they turn, theta is small: some of six pairs must lie in each of its ranges.
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 50.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 50.0}
YARN_FULL = {**YARN, "factor": 3.0, "beta_fast": 6, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.3,
             "truncate": False}  # fmt: skip
YARN_ATTENTION = {**YARN, "attention_factor": 1.3}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0 + 0.1 * i for i in range(6)],
            "long_factor": [2.0 + i for i in range(6)], "original_max_position_embeddings": 16,
            "rope_theta": 1e4}  # fmt: skip
LONGROPE_SHORT = {**LONGROPE, "original_max_position_embeddings": 128, "factor": 3.0}
LONGROPE_ATTENTION = {**LONGROPE, "attention_factor": 1.1}

ROPES = {
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-all-fields": YARN_FULL,
    "yarn-attention-factor": YARN_ATTENTION,
    "longrope": LONGROPE,
    "longrope-short": LONGROPE_SHORT,
    "longrope-attention-factor": LONGROPE_ATTENTION,
}

QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
MIXED_TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]

VARIANTS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama-tied-biases": lambda: hf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-wide-heads": lambda: hf.LlamaConfig(**SIZES, head_dim=20),
    "llama-no-groups": lambda: hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES),
    "smollm3-listed": lambda: hf.SmolLM3Config(**SIZES, no_rope_layers=[0, 1, 1, 0], tie_word_embeddings=False),
    "smollm3-window": lambda: hf.SmolLM3Config(**SIZES, use_sliding_window=True, sliding_window=7, attention_bias=True),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: hf.MistralConfig(**SIZES, sliding_window=7, head_dim=16),
    "qwen2": lambda: hf.Qwen2Config(**SIZES),
    "qwen2-window": lambda: hf.Qwen2Config(**SIZES, **QWEN_WINDOW, tie_word_embeddings=True),
    "qwen2-yarn": lambda: hf.Qwen2Config(**SIZES, rope_parameters=dict(YARN)),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=16),
    "qwen3-window-bias": lambda: hf.Qwen3Config(
        **SIZES, head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=5, layer_types=MIXED_TYPES
    ),
    **{
        f"llama-{name}": lambda rope=rope: hf.LlamaConfig(**SIZES, rope_parameters=dict(rope))
        for name, rope in ROPES.items()
    },
}
