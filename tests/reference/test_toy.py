"""The toy checkpoint, as transformers reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

from nanoserve.bench.toy import FAMILIES, IM_END, IM_START, make_toy
from nanoserve.models.families import model_config
from reference.harness import Run, config_json, error, ours, prefill, reference_logits


def load(folder: Path) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_agrees(family: str, tmp_path: Path) -> None:
    theirs = load(make_toy(tmp_path, family))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 500_000
    assert theirs.config.tie_word_embeddings
    ids = list(b"hello, toy of many bytes" * 3)
    state = theirs.state_dict()
    model = ours(model_config(config_json(theirs.config)), state, 128)
    assert error(prefill(Run(model, 128), ids, [10]), reference_logits(theirs, ids)) <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_outputs_do_not_collapse(family: str, tmp_path: Path) -> None:
    theirs = load(make_toy(tmp_path, family))
    ids = torch.tensor([list(b"hello"), list(b"abcde")])
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, min_new_tokens=48,
                          do_sample=False)  # fmt: skip
    for row in out[:, 5:].tolist():
        assert len(set(row)) > 8


def test_one_byte_is_one_token(tmp_path: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(make_toy(tmp_path))
    text = "".join(map(chr, range(1, 0x180))) + "日本語 🎉  \n\n x"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer("<|im_start|>a<|im_end|>")["input_ids"] == [IM_START, ord("a"), IM_END]
    assert tokenizer.eos_token_id == IM_END


def test_chat_template(tmp_path: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(make_toy(tmp_path))
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    folders = [make_toy(tmp_path / name, seed=seed) for name, seed in (("a", 5), ("b", 5), ("c", 6))]
    first, second, third = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert first == second
    assert first["model.safetensors"] != third["model.safetensors"]


def test_shards_hold_the_same_weights(tmp_path: Path) -> None:
    whole, sharded = load(make_toy(tmp_path / "whole")), load(make_toy(tmp_path / "sharded", shards=3))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 3
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, sharded.state_dict()[name])


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    theirs = load(make_toy(tmp_path, tie_word_embeddings=False, num_hidden_layers=3, vocab_size=300))
    assert theirs.lm_head.weight is not theirs.model.embed_tokens.weight
    assert theirs.config.num_hidden_layers == 3
    assert theirs.lm_head.weight.shape[0] == 300
