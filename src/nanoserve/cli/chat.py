"""nanoserve chat: a talk in the terminal."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import TYPE_CHECKING, Self

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
    with _CtrlC() as ctrl_c:
        _note(f"{config.model}: {HINT}")
        while (line := _ask(ctrl_c)) is not None:
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
                        messages.append({"role": "assistant", "content": _answer(llm, messages, params, ctrl_c)})
                    except RequestError as error:
                        messages.pop()
                        _note(f"{error} (/reset makes room)" if error.code == "context_length_exceeded" else str(error))
    return 0


class _CtrlC:
    """At the prompt ctrl-C gives up the line; elsewhere it is noted, so that no number of presses ends the program."""

    def __init__(self) -> None:
        self.asking = False
        self.pressed = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: object) -> None:
        if self.asking:
            self.asking = False
            raise KeyboardInterrupt
        self.pressed = True


def _ask(ctrl_c: _CtrlC) -> str | None:
    """A line; None at the end of the input."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    import readline  # noqa: F401  (input() then edits lines and remembers them)

    try:
        ctrl_c.asking = True
        line = input("> ")
        ctrl_c.asking = False
    except EOFError:
        ctrl_c.asking = False
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""
    return line


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, ctrl_c: _CtrlC) -> str:
    """What was said, which stays part of the talk where it was stopped, too."""
    pieces: list[str] = []
    count, began, first = 0, time.perf_counter(), 0.0
    ctrl_c.pressed = False
    for delta in llm.stream(messages, params):  # leaving it early ends the work
        first = first or time.perf_counter()
        count += len(delta.tokens)
        pieces.append(delta.text)
        print(delta.text, end="", flush=True)
        if ctrl_c.pressed:
            break
    print()
    now = time.perf_counter()
    rate = f", {(count - 1) / (now - first):.1f} tok/s" if count > 1 else ""
    _note(f"{count} tokens{rate}, first after {(first or now) - began:.2f} s{', stopped' if ctrl_c.pressed else ''}")
    return "".join(pieces)


def _note(text: str) -> None:
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}[{text}]{plain}", file=sys.stderr, flush=True)
