"""The command line. Each command imports what it needs when it runs, so that `--help` answers at once."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from nanoserve import __version__
from nanoserve.cli.flags import add_model, add_settings
from nanoserve.cli.sampling import add_sampling
from nanoserve.core.config import EngineConfig
from nanoserve.core.errors import EngineDeadError, NanoserveError
from nanoserve.server.settings import ServerSettings

BEGAN = time.perf_counter()
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 2 where what was asked cannot be, 1 where it failed on the way."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except NanoserveError as error:
        print(f"nanoserve {arguments.command}: {error}", file=sys.stderr)
        return FAILED if isinstance(error, EngineDeadError) else MISUSED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "serve":
            from nanoserve.cli.serve import serve

            return serve(arguments, BEGAN)
        case "chat":
            from nanoserve.cli.chat import chat

            return chat(arguments)
        case "generate":
            from nanoserve.cli.generate import generate

            return generate(arguments)
        case "pull":
            from nanoserve.cli.pull import pull_model

            return pull_model(arguments)
        case "inspect":
            from nanoserve.cli.inspect import inspect

            return inspect(arguments)
        case _:
            print(__version__)
            return 0


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="nanoserve", description="An LLM inference engine you can read in an afternoon.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> Parser:
        made: Parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".",
                                           allow_abbrev=False)  # fmt: skip
        return made

    serve = command("serve", "serve a model over HTTP, with the OpenAI API")
    add_model(serve)
    add_settings(serve, EngineConfig, "engine")
    add_settings(serve, ServerSettings, "server")

    chat = command("chat", "talk with a model in the terminal")
    add_model(chat)
    chat.add_argument("--system", metavar="TEXT", help="what the model is told before the talk begins")
    add_sampling(chat, skip=("n",))
    add_settings(chat, EngineConfig, "engine")

    generate = command("generate", "continue a text")
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text; default: what standard input has")
    add_sampling(generate, max_tokens=256)
    add_settings(generate, EngineConfig, "engine")

    pull = command("pull", "fetch a model and print where it is")
    pull.add_argument("name", metavar="NAME", help="a known name, or a Hugging Face id: org/name, org/name:FILE.gguf")
    pull.add_argument("--revision", metavar="REVISION", help="branch, tag or commit of a Hugging Face model")

    inspect = command("inspect", "tell a model's size, and what of it fits this machine")
    add_model(inspect)
    inspect.add_argument("--bandwidth", type=float, metavar="GB/S", help="of memory; default: measured here")
    inspect.add_argument("--json", action="store_true", help="for programs; sizes in bytes")
    shown = ("revision", "load_format", "device", "dtype", "kv_cache_dtype", "max_model_len", "block_size",
             "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")  # fmt: skip
    add_settings(inspect, EngineConfig, "engine", only=("model", *shown))

    command("version", "print the version")

    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        of_command = commands.choices[arguments.command]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], of_command._option_string_actions, 1)
        of_command.error(f"{unknown[0]!r} is not understood" + (f" (is it {near[0]}?)" if near else ""))
    return arguments
