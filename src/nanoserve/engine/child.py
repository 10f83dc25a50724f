"""The engine process: builds an engine and serves commands from the socket it was started with.

    python -m nanoserve.engine.child FD

Its first message is the EngineConfig. It ends when the socket closes, so that it never outlives its front.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from nanoserve.core.config import EngineConfig
from nanoserve.core.errors import NanoserveError, RequestError
from nanoserve.engine.channel import Channel, ChannelClosed
from nanoserve.engine.messages import Abort, Add, Command, Failed, News, Ping, Pong, Progress, Ready, Refused, Stop

if TYPE_CHECKING:  # it imports torch
    from nanoserve.engine.engine import Engine

log = logging.getLogger(__name__)


def main() -> None:
    # The front decides when to end: a service manager signals every process of a service, and that must not cut a
    # drain short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sock = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(ChannelClosed):
        _serve(sock)


def _serve(sock: socket.socket) -> None:
    (config,) = Channel(sock, EngineConfig).receive(wait=True)
    channel: Channel[Command] = Channel(sock, Command)  # type: ignore[arg-type]
    began = time.perf_counter()
    try:
        from nanoserve.engine.build import build_engine  # late: imports torch, and its failure is reported

        seconds = {"imports": time.perf_counter() - began}
        engine = build_engine(config, lambda what, done, total: channel.send(Progress(what, done, total)))
        channel.send(Ready(msgspec.structs.replace(engine.info, seconds=seconds | engine.info.seconds)))
        run(engine, channel)
    except NanoserveError as error:
        channel.send(Failed(type(error).__name__, str(error)))
    except ChannelClosed:
        raise
    except Exception as error:
        log.exception("the engine failed")
        channel.send(Failed(type(error).__name__, f"{type(error).__name__}: {error}"))
        sys.exit(1)


def run(engine: Engine, channel: Channel[Command]) -> None:
    """The loop: take in commands, make a step, tell the news."""
    while True:
        for command in channel.receive(wait=engine.idle):
            match command:
                case Add(request):
                    try:
                        engine.add(request)
                    except RequestError as error:
                        channel.send(Refused(request.id, error.message, error.param, error.code, error.status))
                case Abort(request_id, index):
                    engine.abort(request_id, index)
                case Ping(number):
                    channel.send(Pong(number, engine.stats))
                case Stop():
                    return
        updates = engine.step()
        if updates:
            channel.send(News(updates, engine.stats))


if __name__ == "__main__":
    main()
