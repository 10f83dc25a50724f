"""nanoserve chat: a talk in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanoserve.cli.flags import engine_config
from nanoserve.cli.sampling import sampling_params
from nanoserve.core.errors import RequestError
from nanoserve.core.params import SamplingParams

if TYPE_CHECKING:
    from nanoserve.llm import LLM

HINT = "/reset begins anew, /exit or ctrl-D ends, ctrl-C stops an answer"


def chat(arguments: argparse.Namespace) -> int:
    config, params = engine_config(arguments), sampling_params(arguments)
    if params.n != 1:
        raise RequestError("a talk has one answer at a time; --n must be 1", param="n")
    from nanoserve.llm import LLM

    llm = LLM(**vars(config))
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
    with _interrupts() as interrupted:
        for delta in llm.stream(messages, params):  # leaving it early ends the work
            first = first or time.perf_counter()
            count += len(delta.tokens)
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
            if interrupted():
                break
        print()
    now = time.perf_counter()
    rate = f", {(count - 1) / (now - first):.1f} tok/s" if count > 1 else ""
    _note(f"{count} tokens{rate}, first after {first - began:.2f} s{', stopped' if interrupted() else ''}")
    return "".join(pieces)


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether ctrl-C was pressed. It is only noted, since an exception in the middle of an engine's step would leave
    the engine between two states."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _note(text: str) -> None:
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}[{text}]{plain}", file=sys.stderr, flush=True)
