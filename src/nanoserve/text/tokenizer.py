"""Tokenizer: text to ids and ids to text. It knows neither files (load.py) nor chats (chat.py).

Decoding is done in bytes: every token is an exact string of bytes (`token_bytes`), and a text is the UTF-8 reading of
their sum, with U+FFFD for what is no UTF-8. So text only ever grows at its end, which is what streams stand on.
Clean-up of spaces before punctuation, which some tokenizer configurations ask for, is not done for that reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from nanoserve.core.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import tokenizers

# Around a string that is meant as a control token, in a text for `encode_marked`. Unicode keeps these two code points
# for a program's own use: no text that people exchange holds them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"

_SPACE = "▁"  # how SentencePiece writes a space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Protocol):
    """The part of a Tokenizer that turns ids into text."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def strips_first_space(self) -> bool: ...  # a text's first space was put there by the encoder
    def token_bytes(self, id: int) -> bytes: ...


class Tokenizer:
    """`prefix` and `suffix` are the ids that frame a text: BOS and EOS, where the tokenizer adds them."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        bos_id: int | None = None,
        eos_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self._backend = backend
        self._prefix, self._suffix = list(prefix), list(suffix)
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, tokenizers.AddedToken] = added
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.vocab_size = _vocab_size(backend)
        self._byte_level, self._byte_pieces, self.strips_first_space = _decoder_kind(backend.decoder)
        self._bytes: dict[int, bytes] = {}
        self._marked: dict[frozenset[str], tuple[tokenizers.Tokenizer, dict[int, int]]] = {}

    def is_special(self, id: int) -> bool:
        return id in self.special_ids

    @cached_property
    def added_tokens(self) -> Mapping[str, bool]:
        """Strings that are single tokens wherever they occur; True: special, left out of texts."""
        return {token.content: token.special for token in self._added.values()}

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """`add_special`: with BOS and EOS where the tokenizer adds them; a text that has them itself gets no second
        ones. `parse_special=False`: what looks like a special token is plain text."""
        if parse_special:
            ids = _ids(self._backend, text)
        else:
            special = frozenset(content for content, special in self.added_tokens.items() if special)
            ids = self.encode_marked(text.replace(OPEN, "").replace(CLOSE, ""), special)
        if add_special:
            if self._prefix and ids[: len(self._prefix)] != self._prefix:
                ids = self._prefix + ids
            if self._suffix and ids[-len(self._suffix) :] != self._suffix:
                ids = ids + self._suffix
        return ids

    def encode_marked(self, text: str, controls: frozenset[str]) -> list[int]:
        """Of `controls`, which are added tokens, only those between OPEN and CLOSE become their ids; elsewhere they
        are plain text. No BOS or EOS."""
        if controls not in self._marked:
            self._marked[controls] = self._rename(controls)
        backend, original = self._marked[controls]
        return [original.get(id, id) for id in _ids(backend, text)]

    def _rename(self, controls: frozenset[str]) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer over the same model that knows `controls` by their marked names alone, and how its ids of them
        translate."""
        from tokenizers import AddedToken, Tokenizer

        backend = Tokenizer(self._backend.model)
        # An attribute that is None cannot be set.
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(backend, part, value)
        original: dict[int, int] = {}
        for id, token in sorted(self._added.items()):
            if token.content in controls:
                name = OPEN + token.content + CLOSE
                token = AddedToken(name, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
                                   normalized=token.normalized, special=token.special)  # fmt: skip
            backend.add_tokens([token])
            renamed = backend.token_to_id(token.content)
            assert renamed is not None
            original[renamed] = id
        return backend, original

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        skipped = self.special_ids if skip_special else ()
        text = b"".join(self.token_bytes(id) for id in ids if id not in skipped).decode(errors="replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text

    def token_bytes(self, id: int) -> bytes:
        """What the token adds to a text; perhaps a part of a character. Nothing for ids past the vocabulary."""
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._read_bytes(id)
        return known

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode(errors="replace")

    def _read_bytes(self, id: int) -> bytes:
        if id in self.special_ids:
            return str(self._added[id].content).encode()
        piece: str | None = self._backend.id_to_token(id) if id >= 0 else None
        if piece is None:
            return b""
        if self._byte_level:
            if id in self._added or any(char not in _BYTE_OF for char in piece):
                return piece.encode()
            return bytes(_BYTE_OF[char] for char in piece)
        if self._byte_pieces and id not in self._added and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes((int(match[1], 16),))
        return piece.replace(_SPACE, " ").encode()


def _ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        # Unlike `encode`, this lets other threads run meanwhile.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except TypeError as error:  # the only str it refuses
        raise RequestError(
            "the text holds half of a UTF-16 surrogate pair, which is no character", param="prompt"
        ) from error
    return ids


def _vocab_size(backend: tokenizers.Tokenizer) -> int:
    """One more than the largest id: the number of tokens, unless there are gaps among the ids."""
    count: int = backend.get_vocab_size()
    if all(backend.id_to_token(id) is not None for id in range(count)):
        return count  # without a dictionary of all, which takes a quarter of a second to make
    return 1 + max(backend.get_vocab().values())


def _decoder_kind(decoder: Any) -> tuple[bool, bool, bool]:
    """Is it byte-level; else has it byte pieces; does it strip the first space. CheckpointError if neither."""
    steps = _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return True, False, False
    spaces = any(step["type"] == "Replace" and step["pattern"].get("String") == _SPACE for step in steps)
    if not spaces and "Metaspace" not in kinds:
        raise CheckpointError(
            f"the tokenizer's decoder is {', '.join(sorted(kinds)) or 'missing'}; known are ByteLevel and "
            f"SentencePiece's (Replace or Metaspace)"
        )
    strips = any(
        (step["type"] == "Strip" and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return False, "ByteFallback" in kinds, strips


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's names of bytes: those that print stand for themselves, the others for 256 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
