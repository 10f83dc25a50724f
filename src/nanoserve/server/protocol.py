"""The request bodies: every field that a client may send, what it means here, and what is not built yet.

A field is honoured, or refused by name (`Refused`), or a hint that changes nothing in the result (its description
says so). null means that the field is absent. Bounds of sampling fields are checked by SamplingParams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from nanoserve.core.errors import RequestError
from nanoserve.core.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams
from nanoserve.server.body import Body, Bounded, Refused

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # what fits the engine's messages and tensors
MAX_NAMES = 64  # of an object whose names are the caller's
MAX_PROMPTS = 2**16  # that are looked at; fewer are taken
RequestId = Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]
LOGPROBS = "Report the natural log of each token's probability in the model, before any sampling field changed it."
NEEDS_TOOLS = "Not supported yet: tool calls."
NEEDS_GRAMMAR = "Not supported yet: constrained output."


class StreamOptions(Body):
    include_usage: bool | None = Field(None, description="Send one more chunk at the end, with the usage.")
    include_obfuscation: Annotated[Any, Refused((False,))] = Field(None, description="Not supported yet: padding.")
    continuous_usage_stats: Annotated[Any, Refused((False,))] = Field(
        None, description="Not supported yet: usage in every chunk."
    )


class GenerationBody(Body):
    """What chat and completions have in common."""

    model: str | None = Field(None, description="A name that GET /v1/models lists; without it, the model served.")
    stream: bool | None = Field(None, description="Send the text as it is made, in server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")

    n: int | None = Field(None, description="Continuations of each prompt. Default 1.")
    max_tokens: int | None = Field(
        None, description="Most tokens to generate. Default: what the context has room for; 16 for completions."
    )
    temperature: float | None = Field(None, description="0 takes the likeliest token. Default: the model's own, or 1.")
    top_p: float | None = Field(None, description="Draw among the likeliest tokens of this total probability.")
    top_k: Int32 | None = Field(None, description="Draw among this many likeliest tokens; 0 and -1: no limit.")
    min_p: float | None = Field(None, description="Drop tokens less likely than this share of the likeliest one.")
    presence_penalty: float | None = Field(None, description="Off the logit of tokens that the output holds.")
    frequency_penalty: float | None = Field(None, description="The same, for each time that it holds them.")
    repetition_penalty: float | None = Field(None, description="Divides the logits of tokens of prompt and output.")
    logit_bias: Annotated[dict[str, float], Bounded(MAX_LOGIT_BIAS)] | None = Field(
        None, description="Token id to what is added to its logit, -100 to 100."
    )
    seed: int | None = Field(None, description="Equal seeds draw equal tokens, whatever else is running.")
    min_tokens: int | None = Field(None, description="No end token, and no stop string, before this many tokens.")
    stop: str | Annotated[list[str], Bounded(MAX_STOP_STRINGS)] | None = Field(
        None, description="Strings that end the text; they are not part of it."
    )
    stop_token_ids: Annotated[list[int], Bounded(MAX_LOGIT_BIAS)] | None = Field(
        None, description="Token ids that end the text, beside the model's own."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Keep the stop string at the text's end.")
    ignore_eos: bool | None = Field(None, description="The model's own end tokens end nothing.")
    skip_special_tokens: bool | None = Field(None, description="Leave control tokens out of the text. Default true.")
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Keep this many tokens of the prompt, the last ones; usage shows what was kept."
    )
    priority: Int32 | None = Field(None, description="Smaller goes first. Default 0.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Only requests with an equal salt share cached prefixes."
    )
    request_id: RequestId | None = Field(None, description="Becomes part of the answer's id.")
    return_token_ids: bool | None = Field(None, description="Add the token ids of prompt and output to the answer.")

    user: str | None = Field(None, description="A hint; changes nothing.")

    prompt_logprobs: Annotated[Any, Refused()] = Field(None, description="Not supported yet.")
    allowed_token_ids: Annotated[Any, Refused()] = Field(None, description="Not supported yet.")
    bad_words: Annotated[Any, Refused(([],))] = Field(None, description="Not supported yet.")
    structured_outputs: Annotated[Any, Refused()] = Field(None, description=NEEDS_GRAMMAR)
    response_format: Annotated[Any, Refused(({"type": "text"},))] = Field(None, description=NEEDS_GRAMMAR)

    SAMPLING: ClassVar = (
        "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
        "skip_special_tokens",
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is taken only with stream", param="stream_options")
        return self

    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each chosen token; None: no logprobs at all."""
        raise NotImplementedError

    def limit(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    def sampling(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """`defaults` stand for fields that are left out."""
        given = dict(defaults) | {name: value for name in self.SAMPLING if (value := getattr(self, name)) is not None}
        field, max_tokens = self.limit()
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"{field} must be at least 1, not {max_tokens}", param=field, code="invalid_value")
        bias = {_token_id(key): value for key, value in (self.logit_bias or {}).items()}
        return SamplingParams(**given, max_tokens=max_tokens, logit_bias=bias, logprobs=self.num_logprobs())

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise RequestError(
            f"logit_bias: {key[:64]!r} is no token id", param=f"logit_bias.{key[:64]}", code="invalid_value"
        )
    return int(key)


# ---- chat


class TextPart(Body):
    type: Literal["text"]
    text: str


def _text_parts(value: Any) -> Any:
    if isinstance(value, list):
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                message = f"content parts of type {kind[:32]!r} are not supported: this model reads text alone"
                raise RequestError(message, code="unsupported_parameter")
    return value


class FunctionCall(Body):
    name: str
    arguments: str | dict[str, Any] = Field(description="A JSON object, or its text.")


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, description="As in streamed answers; changes nothing.")


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Annotated[list[TextPart], Bounded()] | None, BeforeValidator(_text_parts)] = Field(
        None, description="Text, or parts of it, which are joined by line breaks. Never read as control tokens."
    )
    name: str | None = Field(None, description="Reaches the chat template.")
    tool_calls: Annotated[list[ToolCall], Bounded()] | None = Field(None, description="Calls that were made before.")
    tool_call_id: str | None = Field(None, description="The call that a tool message answers.")
    reasoning_content: str | None = Field(None, description="Reaches the chat template.")
    refusal: Annotated[Any, Refused()] = Field(None, description="Not supported yet.")
    audio: Annotated[Any, Refused()] = Field(None, description="Not supported yet.")
    function_call: Annotated[Any, Refused()] = Field(None, description="Not supported: use tool_calls.")
    annotations: Annotated[Any, Refused(([],))] = Field(None, description="Not supported yet.")

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise RequestError(f"a {self.role} message cannot have tool_calls", param="tool_calls")
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.reasoning_content)):
            raise RequestError(f"a {self.role} message needs content", param="content", code="invalid_value")
        return self

    @property
    def size(self) -> int:
        """Characters of all that it says: tool calls and names reach the template, too."""
        return len(self.model_dump_json(exclude_none=True))


class ChatEnd(Body):
    """How a chat's prompt ends, and what its template gets beside the messages."""

    add_generation_prompt: bool | None = Field(
        None, description="End with the head of a new assistant message. Default: unless continue_final_message."
    )
    continue_final_message: bool | None = Field(
        None, description="The answer continues the last message, which the prompt leaves open. Default false."
    )
    chat_template_kwargs: Annotated[dict[str, Any], Bounded(MAX_NAMES)] | None = Field(
        None, description="More names for the chat template."
    )

    @model_validator(mode="after")
    def _check_end(self) -> ChatEnd:
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        return self

    @property
    def opens_answer(self) -> bool:
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


class ChatBody(GenerationBody, ChatEnd):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Bounded()] = Field(min_length=1, description="The conversation so far.")
    max_completion_tokens: int | None = Field(None, description="The same as max_tokens.")
    logprobs: bool | None = Field(None, description=LOGPROBS)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Report this many likeliest tokens too. Only with logprobs."
    )

    metadata: Annotated[dict[str, str], Bounded(MAX_NAMES)] | None = Field(None, description="A hint; changes nothing.")
    parallel_tool_calls: bool | None = Field(None, description="A hint; there are no tools to call.")
    prompt_cache_key: str | None = Field(None, description="A hint; the prefix cache needs no key.")
    prompt_cache_retention: str | None = Field(None, description="A hint; changes nothing.")
    prompt_cache_options: Annotated[dict[str, Any], Bounded(MAX_NAMES)] | None = Field(
        None, description="A hint; changes nothing."
    )
    safety_identifier: str | None = Field(None, description="A hint; changes nothing.")
    service_tier: Annotated[Any, Refused(("auto", "default"))] = Field(None, description="There is one tier.")
    store: Annotated[Any, Refused((False,))] = Field(None, description="Not supported: nothing is kept.")

    tools: Annotated[Any, Refused(([],))] = Field(None, description=NEEDS_TOOLS)
    tool_choice: Annotated[Any, Refused(("none", "auto"))] = Field(None, description=NEEDS_TOOLS)
    chat_template: Annotated[Any, Refused()] = Field(None, description="Refused: the server's template is used.")
    functions: Annotated[Any, Refused(([],))] = Field(None, description=NEEDS_TOOLS)
    function_call: Annotated[Any, Refused(("none", "auto"))] = Field(None, description=NEEDS_TOOLS)
    audio: Annotated[Any, Refused()] = Field(None, description="Not supported yet.")
    modalities: Annotated[Any, Refused((["text"],))] = Field(None, description="Text alone.")
    moderation: Annotated[Any, Refused()] = Field(None, description="Not supported yet.")
    prediction: Annotated[Any, Refused()] = Field(None, description="Not supported yet.")
    reasoning_effort: Annotated[Any, Refused()] = Field(None, description="Not supported yet.")
    verbosity: Annotated[Any, Refused(("medium",))] = Field(None, description="Not supported yet.")
    web_search_options: Annotated[Any, Refused()] = Field(None, description="Not supported yet.")

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is taken only with logprobs: true", param="top_logprobs")
        if None is not self.max_tokens != self.max_completion_tokens is not None:
            raise RequestError("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        return self

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return super().limit()


# ---- completions

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several, as text or ids, to a list of prompts. Done by hand: a union of list types would look
    at each entry four times, and report each."""
    several = isinstance(value, list) and not (value and type(value[0]) is int)
    prompts: list[Prompt] = value if several else [value]
    if not prompts:
        raise RequestError("there is no prompt", code="invalid_value")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"holds {len(prompts)} prompts; at most {MAX_PROMPTS} are taken", code="invalid_value")
    for number, prompt in enumerate(prompts):
        which = f"prompt {number} " if several else ""
        if isinstance(prompt, list):
            if not prompt:
                raise RequestError(f"{which}has no tokens", code="invalid_value")
            if not all(type(token) is int for token in prompt):
                raise RequestError(f"{which}holds something that is no token id", code="invalid_type")
        elif not isinstance(prompt, str):
            raise RequestError(f"{which}must be text or a list of token ids", code="invalid_type")
    return prompts


_PROMPT_FORMS: list[dict[str, Any]] = [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]
PROMPT_SCHEMA = {"anyOf": [*_PROMPT_FORMS, {"type": "array", "items": {"anyOf": _PROMPT_FORMS}}]}


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[Any, BeforeValidator(_prompts), WithJsonSchema(PROMPT_SCHEMA)] = Field(
        description="Text, token ids, or a list of these. Control tokens written in the text are read as such."
    )
    add_special_tokens: bool | None = Field(
        None, description="Begin text with the token that the tokenizer begins text with. Default true."
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description=f"{LOGPROBS} And that of this many likeliest tokens."
    )
    best_of: int | None = Field(None, description="Not supported yet; only the value of n is taken.")
    echo: Annotated[Any, Refused((False,))] = Field(None, description="Not supported yet.")
    suffix: Annotated[Any, Refused(("",))] = Field(None, description="Not supported yet.")

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (1 if self.n is None else self.n):
            raise RequestError(
                "best_of is not supported yet; only the value of n is taken",
                param="best_of",
                code="unsupported_parameter",
            )
        return self

    def num_logprobs(self) -> int | None:
        return self.logprobs


# ---- tokens


class TokenizeBody(ChatEnd):
    """POST /tokenize: the ids of a text, as a completion would use them, or of a chat."""

    model: str | None = Field(None, description="A name that GET /v1/models lists.")
    prompt: str | None = Field(None, description="Text; exclusive with messages.")
    add_special_tokens: bool | None = Field(None, description="As in completions. Default true.")
    messages: Annotated[list[Message], Bounded(), Field(min_length=1)] | None = Field(
        None, description="A conversation; exclusive with prompt."
    )
    return_token_strs: bool | None = Field(None, description="Add the text of each token.")

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt", code="invalid_value")
        return self


class DetokenizeBody(Body):
    """POST /detokenize: the text of ids, control tokens included."""

    model: str | None = Field(None, description="A name that GET /v1/models lists.")
    tokens: Annotated[list[int], Bounded(2**22)] = Field(description="Token ids.")
