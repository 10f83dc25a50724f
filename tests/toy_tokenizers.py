"""Small tokenizers of both kinds, made in memory: bytes with merges, and SentencePiece's pieces with byte fallback."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from nanoserve.text.tokenizer import Tokenizer

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level(merges: tuple[tuple[str, str], ...] = (("l", "l"), ("Ġ", "t"), ("Ã", "©"))) -> Tokenizer:
    """256 bytes, a few merges, three control tokens (the first three ids) and a plain added token, <tool>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*CONTROLS, *alphabet, *(left + right for left, right in merges)]
    backend = tokenizers.Tokenizer(models.BPE({piece: id for id, piece in enumerate(pieces)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROLS])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return Tokenizer(
        backend,
        bos_id=1,
        eos_id=2,
        special_tokens={"bos_token": CONTROLS[1], "eos_token": CONTROLS[2]},
    )


def sentencepiece(pieces: tuple[str, ...] = ("▁", "▁wor", "ld", "lo", "Hel", "▁Hel", "a", "é"), **options) -> Tokenizer:
    """<unk>, <s>, </s>, 256 bytes (id 3 + byte), then `pieces`. Adds BOS and a first space, as Llama 2 does."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    model = models.BPE({name: id for id, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    return Tokenizer(backend, prefix=[1], bos_id=1, eos_id=2, special_tokens={"bos_token": "<s>"}, **options)


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    id = tokenizer._backend.token_to_id(piece)
    assert id is not None, piece
    return id
