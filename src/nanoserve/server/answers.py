"""The answers' JSON: what chat and completions say, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from nanoserve.core.request import Request
from nanoserve.server import generation
from nanoserve.server.generation import Piece
from nanoserve.server.logprobs import ChatLogprobs, CompletionLogprobs, CompletionLogprobsWriter, TokenNames
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


class Answer(Protocol):
    """One call's answer: knows the call's id, and what was asked to be in it."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> msgspec.Struct: ...
    def chunk(self, piece: Piece) -> msgspec.Struct: ...
    def last_chunk(self, usage: Usage) -> msgspec.Struct: ...


# ---- chat


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"


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
        self._prompt = request.prompt
        self._names = TokenNames(tokenizer, request.sampling.skip_special_tokens)
        self._usage = None if body.stream and body.wants_usage else UNSET
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Piece], usage: Usage) -> ChatCompletion:
        return ChatCompletion(
            *self._head,
            [
                ChatChoice(
                    piece.index,
                    ChatMessage(piece.text),
                    self._logprobs(piece),
                    piece.finish,
                    piece.stop,
                    self._ids(piece.tokens),
                )
                for piece in choices
            ],
            usage,
            prompt_token_ids=self._ids(self._prompt),
        )

    def chunk(self, piece: Piece) -> ChatCompletionChunk:
        first = piece.index not in self._begun
        delta = ChatDelta("assistant", piece.text) if first else ChatDelta(None, piece.text or None)
        stop = UNSET if piece.finish is None else piece.stop
        choice = ChatChunkChoice(piece.index, delta, self._logprobs(piece), piece.finish, stop, self._ids(piece.tokens))
        chunk = ChatCompletionChunk(*self._head, [choice], usage=self._usage)
        if not self._begun:
            chunk.prompt_token_ids = self._ids(self._prompt)
        if first:
            self._begun.add(piece.index)
        return chunk

    def last_chunk(self, usage: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(*self._head, [], usage=usage)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        top = self._body.num_logprobs()
        return None if top is None else self._names.chat(piece.tokens, piece.logprobs, top)

    def _ids(self, ids: tuple[int, ...]) -> Ids:
        return ids if self._body.return_token_ids else UNSET


# ---- completions


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None
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
        self._names = TokenNames(tokenizer, requests[0].sampling.skip_special_tokens)
        self._usage = None if body.stream and body.wants_usage else UNSET
        self._begun: dict[int, CompletionLogprobsWriter] = {}

    def whole(self, choices: Sequence[Piece], usage: Usage) -> Completion:
        return Completion(*self._head, [self._choice(piece) for piece in choices], usage)

    def chunk(self, piece: Piece) -> Completion:
        return Completion(*self._head, [self._choice(piece)], self._usage)

    def last_chunk(self, usage: Usage) -> Completion:
        return Completion(*self._head, [], usage)

    def _choice(self, piece: Piece) -> CompletionChoice:
        top = self._body.logprobs
        stop = UNSET if piece.finish is None else piece.stop
        choice = CompletionChoice(piece.index, piece.text, None, piece.finish, stop)
        first = piece.index not in self._begun
        writer = self._begun.setdefault(piece.index, CompletionLogprobsWriter(self._names, top or 0))
        if top is not None:
            choice.logprobs = writer.write(piece.tokens, piece.logprobs)
        if self._body.return_token_ids:
            choice.token_ids = piece.tokens
            if first:
                choice.prompt_token_ids = self._requests[piece.index // self._n].prompt
        return choice
