"""gguf_tokenizer: the tokenizer that a GGUF file's metadata describes.

Two kinds: "gpt2", byte-level BPE with merges and a pre-tokenizer known by its name, and "llama", SentencePiece's BPE
by scores, with bytes for characters it does not know. It knows the keys, not the file's layout (loading/gguf.py).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoserve.core.errors import CheckpointError
from nanoserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# The regular expressions that the models' own tokenizers split text with, before merging.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_QWEN35 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_TAIL
_GPT4O = _CASED % (_ENGLISH + "?", _ENGLISH + "?") + r"|\p{N}{1,3}" + _CASED_TAIL


class PreTokenizer(NamedTuple):
    """How text is cut before merging, one pattern after the other, and what else the name implies."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is in the vocabulary is taken whole, whatever the merges say
    add_bos: bool = False  # where the file does not say
    compose: bool = False  # to Unicode's composed form (NFC)


_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_BY_NAMES = {
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _DIGITS_GPT2,
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum modern-bert a.x-4.0": _PLAIN_GPT2,
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer((_LLAMA3,), True, True),
    "smaug-bpe dbrx glm4 chatglm-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), compose=True),
    "deepseek-r1-qwen stablelm2 hunyuan megrez solar-open kormo grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,), compose=True),
    "tekken": PreTokenizer((_TEKKEN,), True, True),
    "gpt-4o llama4 kanana2": PreTokenizer((_GPT4O,)),
}
PRE_TOKENIZERS = {name: kind for names, kind in _BY_NAMES.items() for name in names.split()}


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """`path` is for messages. Raises CheckpointError naming the key."""
    return _Reader(metadata, path).read()


class _Reader:
    def __init__(self, metadata: Mapping[str, Any], path: Path):
        self.metadata = metadata
        self.path = path

    def read(self) -> Tokenizer:
        kind = self.value("model", str)
        tokens: list[str] = self.values("tokens", str)
        if tokens is None or kind is None:
            raise self.error("holds no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
        tokens = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
        vocab = {token: id for id, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise self.error(f"has {len(tokens) - len(vocab)} tokens twice in tokenizer.ggml.tokens")
        types: list[int] = self.values("token_type", int, len(tokens)) or [NORMAL] * len(tokens)
        default_bos = default_eos = None
        if kind == "gpt2":
            pre = self.pre_tokenizer()
            backend = self.byte_level(vocab, pre)
            add_bos = pre.add_bos
        elif kind == "llama":
            backend = self.sentencepiece(tokens, vocab, types)
            add_bos = True
            default_bos, default_eos = 1, 2
        else:
            raise self.error(f'has tokenizer.ggml.model {kind!r}; known are "gpt2" and "llama"')
        _add_tokens(backend, tokens, types)

        bos, eos = self.id("bos", tokens, default_bos), self.id("eos", tokens, default_eos)
        unk, pad = self.id("unknown", tokens), self.id("padding", tokens)
        add_bos = _or(self.value("add_bos_token", bool), add_bos)
        add_eos = _or(self.value("add_eos_token", bool), False)
        named = {"bos_token": bos, "eos_token": eos, "unk_token": unk, "pad_token": pad}
        template = self.metadata.get("tokenizer.chat_template")
        return Tokenizer(
            backend,
            prefix=[bos] if add_bos and bos is not None else [],
            suffix=[eos] if add_eos and eos is not None else [],
            bos_id=bos,
            eos_id=eos,
            special_tokens={name: tokens[id] for name, id in named.items() if id is not None},
            chat_template=template if isinstance(template, str) else None,
        )

    def byte_level(self, vocab: dict[str, int], pre: PreTokenizer) -> tokenizers.Tokenizer:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        lines = self.values("merges", str)
        if lines is None:
            raise self.error("has no tokenizer.ggml.merges")
        # The first part may begin with a space, in vocabularies that write spaces as they are.
        merges = [(line[: (at := line.find(" ", 1))], line[at + 1 :]) for line in lines]
        # The tokenizers library panics where the whole is no token.
        if odd := next((merge for merge in merges if "".join(merge) not in vocab), None):
            raise self.error(f"has tokenizer.ggml.merges that do not fit its tokens: {odd!r:.60} make none")
        try:
            model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
        except Exception as error:  # tokenizers raises nothing narrower
            raise self.error(f"has tokenizer.ggml.merges that do not fit its tokens: {error}") from error
        backend = Tokenizer(model)
        if pre.compose:
            backend.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        backend.decoder = decoders.ByteLevel()
        return backend

    def pre_tokenizer(self) -> PreTokenizer:
        name = self.value("pre", str)
        if name is None or name == "default":
            log.warning("%s does not name its pre-tokenizer (tokenizer.ggml.pre): GPT-2's is used. If that is not the "
                        "model's, it gets other tokens than it was trained on; give its own with --tokenizer.",
                        self.path)  # fmt: skip
            return _PLAIN_GPT2
        if name not in PRE_TOKENIZERS:
            raise self.error(
                f"has the pre-tokenizer {name!r} (tokenizer.ggml.pre), which is not known; give a folder with the "
                f"model's tokenizer.json with --tokenizer. Known: {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        return PRE_TOKENIZERS[name]

    def sentencepiece(self, tokens: list[str], vocab: dict[str, int], types: list[int]) -> tokenizers.Tokenizer:
        from tokenizers import Tokenizer, decoders, models, normalizers

        scores: list[float] | None = self.values("scores", (int, float), len(tokens))
        if scores is None:
            raise self.error("has no tokenizer.ggml.scores")
        unk = self.id("unknown", tokens, 0)
        model = models.BPE(
            vocab=vocab,
            merges=_merges(tokens, scores, types),
            unk_token=None if unk is None else tokens[unk],
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = Tokenizer(model)
        spaces = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if _or(self.value("add_space_prefix", bool), True):
            # Each stretch of text between control tokens gets the space, as in the models' own tokenizers.
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
            steps.append(decoders.Strip(" ", 1, 0))
        else:
            backend.normalizer = spaces
        backend.decoder = decoders.Sequence(steps)
        return backend

    def error(self, fact: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {fact}")

    def value(self, name: str, kind: type) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and not isinstance(value, kind):
            raise self.error(f"has tokenizer.ggml.{name} {value!r:.40}, which is not of type {kind.__name__}")
        return value

    def values(self, name: str, kind: type | tuple[type, ...], count: int | None = None) -> Any:
        """A list of one kind, of `count` items or more."""
        values = self.metadata.get(f"tokenizer.ggml.{name}")
        if values is None:
            return None
        if not isinstance(values, list) or not isinstance(next(iter(values), None), kind):
            raise self.error(f"has tokenizer.ggml.{name} that is not a list of the right type, or empty")
        if count is not None and len(values) < count:
            raise self.error(f"has {len(values)} items in tokenizer.ggml.{name} for {count} tokens")
        return values

    def id(self, name: str, tokens: list[str], default: int | None = None) -> int | None:
        id = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if id is None:
            return default if default is not None and default < len(tokens) else None
        if not isinstance(id, int) or not 0 <= id < len(tokens):
            raise self.error(f"has tokenizer.ggml.{name}_token_id {id!r:.40}, and {len(tokens)} tokens")
        return id


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens and those that users defined are found in a text before anything else."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )


def _merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that make the piece of the highest score: every way to cut a piece in
    two known ones is a merge, of the piece's rank."""
    known = {token: id for id, token in enumerate(tokens) if types[id] in (NORMAL, UNUSED)}
    ranked = sorted(known, key=lambda piece: -scores[known[piece]])
    cuts = ([(piece[:at], piece[at:]) for at in range(1, len(piece))] for piece in ranked)
    return [(left, right) for left, right in chain.from_iterable(cuts) if left in known and right in known]
