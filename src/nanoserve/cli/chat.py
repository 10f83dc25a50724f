"""nanoserve chat: a talk in the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from nanoserve.cli.flags import engine_config
from nanoserve.cli.sampling import sampling_params
from nanoserve.core.errors import RequestError
from nanoserve.core.params import SamplingParams

if TYPE_CHECKING:
    from nanoserve.llm import LLM

HINT = "/reset begins anew, /exit or ctrl-D ends, ctrl-C stops an answer"


def chat(arguments: argparse.Namespace) -> int:
    config = engine_config(arguments)
    sampling_params(arguments)  # what is wrong with a flag is said before the model loads
    from nanoserve.llm import LLM

    llm = LLM(**vars(config))
    params = sampling_params(arguments, llm.info.sampling_defaults)
    opening = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    messages = list(opening)
    _note(f"{config.model}: {HINT}")
    while (line := _ask()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/reset":
                messages = list(opening)
                _note("a new talk")
            case text if text.startswith("/"):
                _note(f"{text} is no command; {HINT}")
            case text:
                messages.append({"role": "user", "content": text})
                try:
                    messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
                except RequestError as error:
                    messages.pop()
                    _note(f"{error} (/reset makes room)" if error.code == "context_length_exceeded" else str(error))
    return 0


def _ask() -> str | None:
    """A line; None at the end of the input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    import readline  # noqa: F401  (input() then edits lines and remembers them)

    try:
        return input("> ")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    pieces: list[str] = []
    count, began, first = 0, time.perf_counter(), 0.0
    stopped = ""
    try:
        for delta in llm.stream(messages, params):
            first = first or time.perf_counter()
            count += len(delta.tokens)
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:  # what was said so far stays part of the talk
        stopped = ", stopped"
    print()
    now = time.perf_counter()
    rate = f", {(count - 1) / (now - first):.1f} tok/s" if count > 1 else ""
    _note(f"{count} tokens{rate}, first after {(first or now) - began:.2f} s{stopped}")
    return "".join(pieces)


def _note(text: str) -> None:
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}[{text}]{plain}", file=sys.stderr, flush=True)
