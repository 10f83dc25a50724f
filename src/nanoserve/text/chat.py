"""ChatTemplate and encode_chat: messages to the text, and the ids, that a chat model was trained on.

Only the template writes control tokens. What looks like one in a message, a tool or an argument is marked before
rendering and encoded as plain text (`Tokenizer.encode_marked`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nanoserve.core.errors import RequestError
from nanoserve.text.messages import plain_messages, with_arguments
from nanoserve.text.tokenizer import CLOSE, OPEN, Tokenizer

if TYPE_CHECKING:
    from nanoserve.text.sandbox import Program

RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)
MAX_KWARGS_CHARS = 1 << 16
END = "END_OF_THE_FINAL_MESSAGE "  # its last space shows whether the template trims


class ChatTemplate:
    """A model's template. `special_tokens` are variables it may use (bos_token, eos_token, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._controls: tuple[Tokenizer, _Controls] | None = None

    @cached_property
    def _program(self) -> Program:
        from jinja2 import TemplateError

        from nanoserve.text.sandbox import Program  # takes 30 ms, and a server of completions needs it not

        try:
            return Program(self.source)
        except (TemplateError, RecursionError) as error:
            raise RequestError(f"this model's chat template does not compile: {error}", param="messages") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt as text. By default it ends with the head of a new assistant message, also after an assistant's;
        with `continue_final_message` (and without `add_generation_prompt`) it ends inside the last message.
        `kwargs` are further variables, which the template must use.

        Raises RequestError; where the template refuses the messages, in its own words."""
        return self._render(messages, None, tools, add_generation_prompt, continue_final_message, kwargs)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt as ids: BOS and other control tokens where the template wrote them, and nowhere else."""
        controls = self._controls_of(tokenizer)
        marker = _Marker(controls)
        text = self._render(messages, marker, tools, add_generation_prompt, continue_final_message, kwargs)
        try:
            if marker.marked:
                return tokenizer.encode_marked(controls.turn_marks(text), controls.strings)
            return tokenizer.encode(text, add_special=False)
        except RequestError as error:
            raise RequestError(error.message, param="messages", code=error.code) from error

    def _controls_of(self, tokenizer: Tokenizer) -> _Controls:
        """Special tokens, and other single tokens that the template writes, such as <tool_call>."""
        if self._controls is None or self._controls[0] is not tokenizer:
            literals = self._program.literals
            special = {content for content, special in tokenizer.added_tokens.items() if special}
            written = {content for content in tokenizer.added_tokens if content in literals and not content.isspace()}
            self._controls = tokenizer, _Controls(frozenset(special | written), frozenset(special))
        return self._controls[1]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        marker: _Marker | None,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict[str, Any],
    ) -> str:
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        program = self._program
        self._check_kwargs(kwargs, program.names)
        if tools and "tools" not in program.names:
            raise RequestError("this model's chat template knows no tools", param="tools")
        turns = plain_messages(messages, keeps_developer="developer" in program.literals)
        if marker is not None:
            turns = [marker.mark_message(turn) for turn in turns]
            tools, kwargs = marker.mark(tools), marker.mark(kwargs)
        final = _open_end(turns) if continue_final_message else None
        variables = {
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": [with_arguments(turn) for turn in turns],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = program.render(variables)
        except Exception as error:  # a template may raise anything
            refused = type(error).__name__ == "TemplateError"  # by the template's own raise_exception
            message = str(error) if refused else f"this model's chat template fails on these messages: {error!r:.500}"
            raise RequestError(message, param="messages", code="chat_template") from error
        return text if final is None else _cut_end(text, final)

    def _check_kwargs(self, kwargs: Mapping[str, Any], names: frozenset[str]) -> None:
        for name in kwargs:
            if name in RESERVED or name in self._special_tokens:
                _refuse_kwarg(name, "is not the caller's to set")
            if name not in names:
                _refuse_kwarg(name, "is no variable of this model's chat template")
        if kwargs and len(json.dumps(kwargs, default=str)) > MAX_KWARGS_CHARS:
            raise RequestError(
                f"chat_template_kwargs has more than {MAX_KWARGS_CHARS} characters", param="chat_template_kwargs"
            )


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **kwargs: Any,
) -> list[int]:
    """The prompt of a chat as ids; see ChatTemplate.render. Raises RequestError, also where there is no template."""
    if template is None:
        raise RequestError("this model has no chat template", param="messages", code="no_chat_template")
    return template.encode(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **kwargs,
    )


class _Controls:
    """The strings that a template writes as control tokens."""

    def __init__(self, strings: frozenset[str], special: frozenset[str]):
        self.strings = strings
        self.any = re.compile(_any_of(strings))
        self.special = re.compile(_any_of(special))
        self._marked = re.compile(f"({OPEN}?)({_any_of(strings)})({CLOSE}?)|[{OPEN}{CLOSE}]")

    def turn_marks(self, text: str) -> str:
        """From marks around what the caller wrote to marks around what the template wrote.

        A template may cut a text at a mark, so one of the two is enough; marks that lost their string are dropped,
        after they kept what is left and right of them from becoming one control token."""

        def turn(match: re.Match[str]) -> str:
            left, string, right = match.groups()
            if string is None:
                return ""
            return string if left or right else OPEN + string + CLOSE

        return self._marked.sub(turn, text)


def _any_of(strings: frozenset[str]) -> str:
    """A pattern: the longest first, where one begins with another."""
    return "|".join(re.escape(string) for string in sorted(strings, key=len, reverse=True)) or "(?!)"


class _Marker:
    """Marks what looks like a control token, in plain data. `marked`: whether there was any. The marks themselves
    are dropped from what the caller sent."""

    def __init__(self, controls: _Controls):
        self._controls = controls
        self.marked = False

    def mark_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """What an assistant said is the model's own: its <think> is the model's <think>, and templates look for it.
        Its special tokens are still the template's to write."""
        pattern = self._controls.special if message["role"] == "assistant" else self._controls.any
        marked: dict[str, Any] = self.mark(message, pattern)
        return marked

    def mark(self, value: Any, pattern: re.Pattern[str] | None = None) -> Any:
        pattern = pattern or self._controls.any
        if isinstance(value, str):
            value, count = pattern.subn(f"{OPEN}\\g<0>{CLOSE}", value.replace(OPEN, "").replace(CLOSE, ""))
            self.marked = self.marked or count > 0
            return value
        if isinstance(value, Mapping):
            return {self.mark(key, pattern): self.mark(item, pattern) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item, pattern) for item in value]
        return value


def _open_end(turns: list[dict[str, Any]]) -> str:
    """Puts END behind the last message; its content."""
    content: str | None = turns[-1].get("content")
    if content is None:
        raise RequestError("the last message has no content to continue", param="continue_final_message")
    turns[-1] = {**turns[-1], "content": content + END}
    return content


def _cut_end(text: str, final: str) -> str:
    """The text before END. Where the template trims contents, the end of the last one is trimmed too."""
    at = text.rfind(END.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "this model's chat template does not show the last message as it is, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(END, at) else text[:at].rstrip()


def _refuse_kwarg(name: str, why: str) -> None:
    raise RequestError(
        f"chat_template_kwargs: {name!r} {why}", param=f"chat_template_kwargs.{name}", code="invalid_value"
    )
