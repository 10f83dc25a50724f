"""The loader: fuses, checks, and leaves nothing missing and nothing over."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.generation import eos_token_ids
from nanoserve.loading.loader import load_weights
from nanoserve.models.parameters import Parameter, Part
from nanoserve.quant.gguf import Q8_0
from nanoserve.quant.weight import DenseMatrix, Weight

EMBED = Parameter("embed", (Part("model.embed_tokens.weight", (8, 4)),))
NORM = Parameter("norm", (Part("model.norm.weight", (4,)),))
HEAD = Parameter("head", (Part("lm_head.weight", (8, 4)),))
QKV = Parameter("qkv", (Part("q", (4, 4)), Part("k", (2, 4)), Part("v", (2, 4))))
BIAS = Parameter("bias", (Part("q.bias", (4,)), Part("k.bias", (2,)), Part("v.bias", (2,))))


class Memory:
    """A checkpoint of tensors in memory. It counts what is read."""

    path = Path("somewhere")

    def __init__(self, tensors, config=None, generation_config=None):
        self.tensors = tensors
        self.config = config or {}
        self.generation_config = generation_config or {}
        self.reads = []

    names = property(lambda self: frozenset(self.tensors))

    def __iter__(self):
        return iter(self.tensors)

    def shape(self, name):
        found = self.tensors[name]
        return tuple(found.shape)

    def read(self, name):
        self.reads.append(name)
        found = self.tensors[name]
        return found if isinstance(found, Weight) else Weight(found, tuple(found.shape))


def tensors(*parameters: Parameter) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {part.name: torch.randn(part.shape, generator=generator) for p in parameters for part in p.parts}


def load(checkpoint, *wanted, progress=lambda done, total: None):
    place = lambda parts: DenseMatrix.place(parts, torch.float32, torch.device("cpu"))  # noqa: E731
    return load_weights(checkpoint, wanted, place, lambda vector: vector.float(), progress)


def test_fuses_matrices_and_vectors_in_order():
    source = tensors(QKV, BIAS)
    seen = []
    weights = load(Memory(source), QKV, BIAS, progress=lambda done, total: seen.append((done, total)))
    assert list(weights) == ["qkv", "bias"]
    assert torch.equal(weights["qkv"].weight, torch.cat([source["q"], source["k"], source["v"]]))
    assert torch.equal(weights["bias"], torch.cat([source["q.bias"], source["k.bias"], source["v.bias"]]))
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_parts_reach_the_placer_as_they_are():
    weight = Weight(Q8_0.quantize(torch.ones(2, 32)), (2, 32), Q8_0)
    parameter = Parameter("x", (Part("a", (2, 32)), Part("b", (2, 32))))
    got = []
    load_weights(Memory({"a": weight, "b": torch.ones(2, 32)}), [parameter], got.append, None, lambda done, total: None)
    assert got[0][0] is weight
    assert got[0][1].format is None


def test_A42_tied_without_head():
    source = tensors(EMBED)
    assert torch.equal(load(Memory(source), EMBED)["embed"].weight, source["model.embed_tokens.weight"])


def test_A42_tied_with_the_same_head():
    source = tensors(EMBED)
    source["lm_head.weight"] = source["model.embed_tokens.weight"].clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(Memory(source), EMBED)


@pytest.mark.parametrize("head", [torch.zeros(8, 4), torch.zeros(9, 4), torch.zeros(8, 4).half()])
def test_A42_tied_with_another_head_takes_the_embedding_and_says_so(head):
    source = tensors(EMBED) | {"lm_head.weight": head}
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs .* the embedding is used"):
        weights = load(Memory(source), EMBED)
    assert list(weights) == ["embed"]
    assert torch.equal(weights["embed"].weight, source["model.embed_tokens.weight"])


def test_A42_untied_with_head():
    source = tensors(EMBED, HEAD)
    assert torch.equal(load(Memory(source), EMBED, HEAD)["head"].weight, source["lm_head.weight"])


def test_A42_untied_without_head_is_an_error():
    checkpoint = Memory(tensors(EMBED))
    with pytest.raises(CheckpointError, match=r"somewhere has no lm_head\.weight; the config does not tie"):
        load(checkpoint, EMBED, HEAD)
    assert checkpoint.reads == []


def test_missing_tensors_are_listed():
    with pytest.raises(CheckpointError, match=r"somewhere has no q, k, v, q\.bias, k\.bias, v\.bias$"):
        load(Memory(tensors(EMBED)), EMBED, QKV, BIAS)


def test_A42_tensors_left_over_are_listed_ten_at_most():
    source = tensors(EMBED) | {f"extra.{i}": torch.zeros(1) for i in range(13)}
    with pytest.raises(CheckpointError, match=r"no place for: extra\.0, .*, extra\.9 and 3 more$"):
        load(Memory(source), EMBED)


def test_rotary_tables_of_old_exports_are_ignored():
    source = tensors(EMBED) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    assert list(load(Memory(source), EMBED)) == ["embed"]


@pytest.mark.parametrize("shape", [(4, 8), (8, 5), (8,), (8, 4, 1)])
def test_shape_that_does_not_fit_the_config(shape):
    checkpoint = Memory({"model.embed_tokens.weight": torch.zeros(shape)})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has the shape .*; the config asks for \[8, 4\]"):
        load(checkpoint, EMBED)
    assert checkpoint.reads == []


@pytest.mark.parametrize(
    ("config", "generation_config", "ids"),
    [
        ({}, {}, ()),
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, (7, 2)),
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 3}, (3, 1, 2)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
    ],
)
def test_end_tokens(config, generation_config, ids):
    assert eos_token_ids(Memory({}, config, generation_config)) == ids


@pytest.mark.parametrize("token", [10, -1, "2", 1.0, True, [2, "x"], {}])
def test_end_token_that_is_none(token):
    with pytest.raises(CheckpointError, match=r"eos_token_id .* is not a token of 10"):
        eos_token_ids(Memory({}, {"vocab_size": 10, "eos_token_id": token}))
