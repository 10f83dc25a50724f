"""Log probabilities in OpenAI's two shapes: a list of entries (chat) and parallel lists (completions).

Each generated token has its entry, the end token too. In chat, `bytes` are the token's own, also where they are a part
of a character, so that joined they are the text; a token that the text leaves out has none.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import TokenLogprobs
from nanoserve.server.generation import Piece
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


class LogprobsWriter:
    """For the choices of one call."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, top: int | None):
        """`top`: alternatives to report beside each chosen token; None: no logprobs."""
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._top = top

    def chat(self, piece: Piece) -> ChatLogprobs | None:
        if self._top is None:
            return None
        content = [
            ChatLogprob(self._name(token), _finite(entry.logprob), list(self._tokenizer.token_bytes(token)), [
                TopLogprob(self._name(other), _finite(value), list(self._tokenizer.token_bytes(other)))
                for other, value in self._alternatives(entry)
            ])
            for token, entry in zip(piece.tokens, piece.logprobs, strict=True)
        ]  # fmt: skip
        for token, written in zip(piece.tokens, content, strict=True):
            if self._sampling.skip_special_tokens and self._tokenizer.is_special(token):
                written.bytes = []
        if isinstance(piece.stop, int) and not self._sampling.include_stop_str_in_output:
            content[-1].bytes = []
        return ChatLogprobs(content)

    def completion(self, piece: Piece) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        shape = CompletionLogprobs([], [], [], list(piece.offsets))
        for token, entry in zip(piece.tokens, piece.logprobs, strict=True):
            name, logprob = self._name(token), _finite(entry.logprob)
            shape.tokens.append(name)
            shape.token_logprobs.append(logprob)
            # Two ids may have one name: the likelier one, which comes first, stands; the chosen one before all.
            top = {name: logprob}
            for other, value in self._alternatives(entry):
                top.setdefault(self._name(other), _finite(value))
            shape.top_logprobs.append(top)
        return shape

    def _alternatives(self, entry: TokenLogprobs) -> Iterable[tuple[int, float]]:
        return zip(entry.top_ids[: self._top], entry.top_logprobs[: self._top], strict=True)

    def _name(self, token: int) -> str:
        return token_name(self._tokenizer.token_bytes(token))


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
