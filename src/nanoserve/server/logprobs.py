"""Log probabilities in OpenAI's two shapes: a list of entries (chat) and parallel lists (completions).

Each generated token has its entry, the end token too. `bytes` are the token's own, also where they are a part of a
character, so that joined they are the text; a control token that the text leaves out has none.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

import msgspec

from nanoserve.core.plan import TokenLogprobs
from nanoserve.text.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no infinity


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]  # characters of the completion that are whole before the token


def token_name(data: bytes) -> str:
    """The token's text, or for a part of a character its bytes, as in 'bytes:\\xf0\\x9f'."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenNames:
    """The bytes and names of tokens, for one request."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special

    def name(self, token: int) -> str:
        return token_name(self._tokenizer.token_bytes(token))

    def text_bytes(self, token: int) -> bytes:
        """What the token adds to the text."""
        skipped = self._skip_special and self._tokenizer.is_special(token)
        return b"" if skipped else self._tokenizer.token_bytes(token)

    def chat(self, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs], top: int) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ChatLogprob(
                    self.name(token),
                    max(entry.logprob, FLOOR),
                    list(self.text_bytes(token)),
                    [
                        TopLogprob(self.name(other), max(value, FLOOR), list(self._tokenizer.token_bytes(other)))
                        for other, value in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
                    ],
                )
                for token, entry in zip(tokens, logprobs, strict=True)
            ]
        )


class CompletionLogprobsWriter:
    """For one choice: keeps count of the characters that its tokens made."""

    def __init__(self, names: TokenNames, top: int):
        self._names = names
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        shape = CompletionLogprobs([], [], [], [])
        for token, entry in zip(tokens, logprobs, strict=True):
            name = self._names.name(token)
            shape.tokens.append(name)
            shape.token_logprobs.append(max(entry.logprob, FLOOR))
            # Two ids may have one name: the likelier one, which comes first, stands.
            top = {name: max(entry.logprob, FLOOR)}
            for other, value in zip(entry.top_ids[: self._top], entry.top_logprobs[: self._top], strict=True):
                top.setdefault(self._names.name(other), max(value, FLOOR))
            shape.top_logprobs.append(top)
            shape.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._names.text_bytes(token)))
        return shape
