"""The answers' JSON: what chat and completions say, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from nanoserve.core.params import SamplingParams
from nanoserve.core.request import Request
from nanoserve.server import generation
from nanoserve.server.generation import Piece
from nanoserve.server.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsWriter
from nanoserve.server.protocol import ChatBody, CompletionBody
from nanoserve.text.tokenizer import Tokenizer

Ids = tuple[int, ...] | UnsetType


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, usage: generation.Usage) -> Usage:
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        return cls(prompt, completion, prompt + completion, PromptDetails(min(usage.cached_tokens, prompt)))


def stop_reason(piece: Piece, sampling: SamplingParams) -> str | int | None:
    """The stop string, or the one of `stop_token_ids`; null where the model ended by its own end token."""
    own_end = isinstance(piece.stop, int) and piece.stop not in sampling.stop_token_ids
    return None if own_end else piece.stop


class Answer(Protocol):
    """One call's answer: knows the call's id, and what was asked to be in it."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> msgspec.Struct: ...
    def chunk(self, piece: Piece) -> msgspec.Struct: ...
    def last_chunk(self, usage: Usage) -> msgspec.Struct: ...


# ---- chat


class ChatMessage(msgspec.Struct):
    role: str
    content: str


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None  # in a choice's first chunk
    content: str | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: Ids = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET  # in a choice's last chunk
    token_ids: Ids = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: Ids = UNSET


class ChatCompletionChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET  # null before the last where usage was asked for
    prompt_token_ids: Ids = UNSET


class ChatAnswer:
    def __init__(self, head: tuple[str, int, str], body: ChatBody, request: Request, tokenizer: Tokenizer):
        """`head`: id, created (seconds since 1970), model."""
        self._head = head
        self._body = body
        self._request = request
        self._logprobs = LogprobsWriter(tokenizer, request.sampling, body.num_logprobs()).chat
        self._usage = None if body.wants_usage else UNSET
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Piece], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            *self._head,
            [
                ChatChoice(
                    piece.index,
                    ChatMessage("assistant", piece.text),
                    self._logprobs(piece),
                    piece.finish,
                    stop_reason(piece, self._request.sampling),
                    self._ids(piece.tokens),
                )
                for piece in choices
            ],
            usage,
            prompt_token_ids=self._ids(self._request.prompt),
        )

    def chunk(self, piece: Piece) -> ChatCompletionChunk:
        first = piece.index not in self._begun
        delta = ChatDelta("assistant", piece.text) if first else ChatDelta(None, piece.text or None)
        choice = ChatChunkChoice(
            piece.index, delta, self._logprobs(piece), piece.finish, token_ids=self._ids(piece.tokens)
        )
        if piece.finish is not None:
            choice.stop_reason = stop_reason(piece, self._request.sampling)
        chunk = ChatCompletionChunk(*self._head, [choice], usage=self._usage)
        if not self._begun:
            chunk.prompt_token_ids = self._ids(self._request.prompt)
        if first:
            self._begun.add(piece.index)
        return chunk

    def last_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(*self._head, [], usage=usage)

    def _ids(self, ids: tuple[int, ...]) -> Ids:
        return ids if self._body.return_token_ids else UNSET


# ---- completions


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET  # in a choice's last chunk
    token_ids: Ids = UNSET
    prompt_token_ids: Ids = UNSET  # in a choice's first chunk


class Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None
    object: str = "text_completion"


class CompletionAnswer:
    def __init__(
        self, head: tuple[str, int, str], body: CompletionBody, requests: Sequence[Request], tokenizer: Tokenizer
    ):
        self._head = head
        self._body = body
        self._requests = requests
        self._n = requests[0].sampling.n
        self._logprobs = LogprobsWriter(tokenizer, requests[0].sampling, body.num_logprobs()).completion
        self._usage = None if body.wants_usage else UNSET
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Completion:
        return Completion(*self._head, [self._choice(piece) for piece in choices], usage)

    def chunk(self, piece: Piece) -> Completion:
        return Completion(*self._head, [self._choice(piece)], self._usage)

    def last_chunk(self, usage: Usage) -> Completion:
        return Completion(*self._head, [], usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        choice = CompletionChoice(piece.index, piece.text, self._logprobs(piece), piece.finish)
        if piece.finish is not None:
            choice.stop_reason = stop_reason(piece, self._requests[0].sampling)
        if self._body.return_token_ids:
            choice.token_ids = piece.tokens
            if piece.index not in self._begun:
                self._begun.add(piece.index)
                choice.prompt_token_ids = self._requests[piece.index // self._n].prompt
        return choice
