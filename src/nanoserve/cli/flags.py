"""Flags made from the fields of settings: one field, one flag, under the field's name. A flag that is not given is
not there afterwards, so that a default has one home, the field."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from nanoserve.core.config import EngineConfig, flag
from nanoserve.core.errors import ConfigError

Settings = TypeVar("Settings")


def add_settings(
    parser: argparse.ArgumentParser, settings: type, title: str, *, only: tuple[str, ...] | None = None
) -> None:
    """`settings`: a dataclass whose fields were made with core.config.setting."""
    group, hints = parser.add_argument_group(title), get_type_hints(settings)
    for f in fields(settings):
        if only is None or f.name in only:
            add_flag(group, f, hints[f.name], f.metadata["help"], f.default, f.metadata["choices"])


def add_flag(
    group: argparse._ArgumentGroup, field: Field[Any], kind: Any, help: str, default: Any, choices: Any = None
) -> None:
    kinds = [member for member in get_args(kind) if member is not NoneType] if isinstance(kind, UnionType) else [kind]
    kind, origin = kinds[0], get_origin(kinds[0])
    options: dict[str, Any] = {"type": kind, "metavar": None if choices else kind.__name__.upper(), "choices": choices}
    if kind is bool:
        options = {"action": argparse.BooleanOptionalAction}
    elif origin is tuple:
        item = get_args(kind)[0]
        options = {"type": item, "action": "append", "metavar": item.__name__.upper()}
        help += "; may be given several times"
    elif origin is Mapping:
        options = {"type": _pair, "action": "append", "metavar": "ID:NUMBER"}
        help += "; may be given several times"
    if default not in (None, MISSING, (), ""):
        help += f" (default: {default})"
    text = help.replace("%", "%%")
    group.add_argument(flag(field.name), dest=field.name, default=argparse.SUPPRESS, help=text, **options)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")


def given(arguments: argparse.Namespace, settings: type[Settings]) -> dict[str, Any]:
    """The fields of `settings` that a flag was given for."""
    found = {f.name: getattr(arguments, f.name) for f in fields(settings) if f.name in arguments}  # type: ignore[arg-type]
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    settings = given(arguments, EngineConfig)
    positional = getattr(arguments, "positional", None)
    if positional is not None and settings.setdefault("model", positional) != positional:
        raise ConfigError(f"two models were given: {positional} and --model {settings['model']}")
    return EngineConfig(**settings)


def _pair(text: str) -> tuple[int, float]:
    token, colon, number = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:NUMBER")
    return int(token), float(number)


_pair.__name__ = "ID:NUMBER"  # what argparse calls a value that int or float refuses
