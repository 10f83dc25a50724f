"""Sandbox: what a chat template may do and how it is compiled. It knows no messages.

The dialect is that of Hugging Face chat templates, so that a model's own template renders byte for byte as it does
where the model was trained. A template is a program by a stranger: it reaches no Python internals, cannot change what
it is given, and is stopped after MAX_SECONDS and MAX_CHARS. Every turn of a loop and every call looks at the clock.
What is not bounded is one operation between two looks: repetition, padding and powers of absurd size are refused, but
a template that is made to fill memory still can.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanoserve.text.messages import Arguments
from nanoserve.text.tokenizer import CLOSE, OPEN

MAX_SECONDS = 5.0  # a usual template takes 0.1 ms
MAX_CHARS = 1 << 24
MAX_ITEMS = 1 << 20  # of a list that is made by repetition
MAX_NUMBER = 1 << 16  # as a width, an indent, an exponent
MAX_POWER_BITS = 1 << 12
_WIDTH = re.compile(r"%[-+ #0.*]*(\d+)|\{[^{}]*:[^{}\d]*(\d+)")


class Program:
    """A compiled template. Raises jinja2.TemplateError where the source does not compile."""

    def __init__(self, source: str):
        self._environment = _Sandbox()
        tree = self._environment.parse(source)
        self.names = frozenset(find_undeclared_variables(tree))  # variables that it uses and does not set
        constants = (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        texts = (node.data for node in tree.find_all(nodes.TemplateData))
        self.literals = "\0".join([*texts, *constants])  # all that it can write by itself
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [loop.iter], [], None, None)
        code = self._environment.compile(tree)
        self._template = Template.from_code(self._environment, code, self._environment.make_globals(None))

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises whatever Python and jinja2 raise."""
        token = self._environment.deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            pieces, size = [], 0
            for piece in self._template.generate(variables):
                size += len(piece)
                _limit(size, MAX_CHARS, "the text")
                pieces.append(piece)
            return "".join(pieces)
        finally:
            self._environment.deadline.reset(token)


class _Generation(Extension):
    """{% generation %}: marks the assistant's part for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block has a scope of its own: what is set inside is not seen after it.
        return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

    def content(self, caller: Macro) -> str:
        return caller()


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.deadline: ContextVar[float] = ContextVar("deadline")
        padding = {name: _bounded(self.filters[name]) for name in ("center", "indent")}
        self.filters |= {"tojson": _tojson, "format": _bounded_format(self.filters["format"]), **padding}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._look_at_the_clock()
            yield item

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._look_at_the_clock()
        if isinstance(function, BuiltinMethodType) and isinstance(function.__self__, str):
            _check_numbers((*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        format = _bounded_format(lambda _, *args, **kwargs: wrapped(*args, **kwargs))
        return lambda *args, **kwargs: format(value.__self__, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+" if isinstance(left, str) and isinstance(right, str):
                _limit(len(left) + len(right), MAX_CHARS, "a text")
            case "*":
                for many, times in ((left, right), (right, left)):
                    if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                        _limit(len(many) * times, MAX_CHARS if isinstance(many, str) else MAX_ITEMS, "a repetition")
            case "**" if isinstance(left, int) and isinstance(right, int):
                _limit(left.bit_length() * right, MAX_POWER_BITS, "a power")
            case "%" if isinstance(left, str):
                _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def _look_at_the_clock(self) -> None:
        if time.monotonic() > self.deadline.get():
            raise SecurityError(f"it runs for more than {MAX_SECONDS:g} seconds")


def _bounded(function: Any) -> Any:
    """A filter that pads, with its numbers checked."""

    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        return function(value, *args, **kwargs)

    return checked


def _bounded_format(function: Any) -> Any:
    def checked(template: str, *args: Any, **kwargs: Any) -> Any:
        _check_format(template, (*args, *kwargs.values()))
        return function(template, *args, **kwargs)

    return checked


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int):
            _limit(value, MAX_NUMBER, "a number")


def _check_format(template: str, values: Iterable[Any]) -> None:
    """Widths in a format string; those given as * or {} are among the values."""
    _check_numbers(int((percent or brace)[:9]) for percent, brace in _WIDTH.findall(template))
    if "*" in template or "{}" in template:
        _check_numbers(values)


def _limit(value: int, limit: int, what: str) -> None:
    if value > limit:
        raise SecurityError(f"{what} grows over {limit:,}")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As json.dumps writes it: jinja's own filter escapes HTML, which no model was trained on."""
    if isinstance(value, Arguments) and not (ensure_ascii or indent is not None or separators or sort_keys):
        return str(value)  # the very text that the model once wrote
    _check_numbers((indent,))
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ascii(text) if ensure_ascii else text


def _ascii(text: str) -> str:
    """Escapes what is no ASCII, except the marks around what looks like a control token."""
    return "".join(
        char if " " <= char <= "~" or char in (OPEN, CLOSE, "\n") else json.dumps(char)[1:-1] for char in text
    )
