"""GgufCheckpoint: a GGUF file as a Checkpoint. Names and the order of rows are turned into Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.gguf import GgufTensor, read_gguf
from nanoserve.loading.gguf_config import PERMUTED, gguf_config, gguf_generation_config

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.quant.weight import Weight

GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufCheckpoint:
    def __init__(self, path: Path):
        self.path = path
        self.file = read_gguf(path)
        self.config = gguf_config(self.file)
        self.generation_config = gguf_generation_config(self.file)
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in self.file.tensors.values():
            name = hugging_face_name(tensor.name)
            if name in self._tensors:
                raise CheckpointError(f"{path} has tensor {name!r} under two names")
            self._tensors[name] = tensor
        # The divisors of llama3 positions are in the config by now.
        self._tensors.pop("rope_freqs.weight", None)
        self._permuted = self.metadata["general.architecture"] in PERMUTED

    @property
    def metadata(self) -> dict[str, Any]:
        """As the file has it: the tokenizer and the chat template are in here."""
        return self.file.metadata

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str) -> Weight:
        """Mapped from the file, but for q and k of permuted architectures, which are copied."""
        import torch

        from nanoserve.quant.gguf import gguf_format
        from nanoserve.quant.weight import Weight

        tensor = self._tensors[name]
        dense = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}.get(tensor.type_id)
        raw = torch.frombuffer(self.file.buffer, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.offset)
        data = raw.view(dense).view(tensor.shape) if dense else raw.view(prod(tensor.shape[:-1]), -1)
        if self._permuted and (part := re.search(r"self_attn\.([qk])_proj", name)):
            heads = self.config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
            data = _half_split_rows(data, heads, f"{self.path}: {name}")
        return Weight(data, tensor.shape, None if dense else gguf_format(tensor.type_id))


def hugging_face_name(name: str) -> str:
    """Names that are not known stay, so that the loader can list them."""
    if name in GLOBAL:
        return GLOBAL[name]
    part = re.fullmatch(r"blk\.(\d{1,9})\.(\w+)\.(weight|bias)", name, re.ASCII)
    if part is None or part[2] not in LAYER:
        return name
    return f"model.layers.{int(part[1])}.{LAYER[part[2]]}.{part[3]}"


def _half_split_rows(data: Tensor, heads: int, what: str) -> Tensor:
    """Undo the interleaving of each head's rows: stored 2i and 2i+1 are i and i + D/2. Whole rows, so that blocks stay
    as they are."""
    if data.shape[0] % (2 * heads):
        raise CheckpointError(f"{what} has {data.shape[0]} rows, which {heads} heads do not fit")
    return data.view(heads, -1, 2, *data.shape[1:]).transpose(1, 2).reshape(data.shape)
