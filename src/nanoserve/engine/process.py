"""EngineProcess: an AsyncEngine in a child process, so that HTTP and text never hold the engine's interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable

import msgspec

from nanoserve.core import errors
from nanoserve.core.config import EngineConfig
from nanoserve.core.errors import EngineDeadError, NanoserveError, RequestError
from nanoserve.core.request import Request
from nanoserve.engine.channel import CHUNK, Frames, frame
from nanoserve.engine.messages import (
    Abort,
    Add,
    EngineInfo,
    EngineStats,
    Failed,
    News,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Report,
    Stop,
    Update,
)

Inbox = asyncio.Queue[Update | Exception]


class EngineProcess:
    """Made by `start`. Used from one event loop."""

    def __init__(self, child: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._child = child
        self._reader = reader
        self._writer = writer
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._dead: str | None = None
        self._inboxes: dict[str, Inbox] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._listener: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, config: EngineConfig, on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
    ) -> EngineProcess:
        """Returns when the engine can serve. Raises the engine's own ConfigError or CheckpointError where it
        cannot be built, and EngineDeadError where its process ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "nanoserve.engine.child", str(theirs.fileno())]
            # In a group of its own, which a terminal's Ctrl-C does not reach.
            child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        engine = cls(child, reader, writer)
        writer.write(frame(config))
        ready = asyncio.get_running_loop().create_future()
        engine._listener = asyncio.create_task(engine._listen(ready, on_progress))
        try:
            await ready
        except BaseException:
            await engine.close()
            raise
        return engine

    # ---- the face

    @property
    def info(self) -> EngineInfo:
        assert self._info is not None, "start() waits for it"
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def dead(self) -> str | None:
        return self._dead

    @property
    def pid(self) -> int:
        return self._child.pid

    async def generate(self, request: Request) -> AsyncIterator[Update]:
        self._check()
        if request.id in self._inboxes:
            raise RequestError(f"request_id {request.id!r} is running already", param="request_id")
        inbox: Inbox = asyncio.Queue()
        self._inboxes[request.id] = inbox
        running = request.sampling.n
        try:
            self._writer.write(frame(Add(request)))
            while running:
                update = await inbox.get()
                if isinstance(update, Exception):
                    running = 0
                    raise update
                running -= update.finish is not None
                yield update
        finally:
            del self._inboxes[request.id]
            if running:
                self.abort(request.id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        if self._dead is None:
            self._writer.write(frame(Abort(request_id, index)))

    async def ping(self) -> None:
        self._check()
        number = next(self._numbers)
        answer = self._pings[number] = asyncio.get_running_loop().create_future()
        self._writer.write(frame(Ping(number)))
        try:
            await answer
        finally:
            self._pings.pop(number, None)

    async def close(self) -> None:
        """Ask the process to end, then make it."""
        if self._dead is None:
            self._writer.write(frame(Stop()))
        self._writer.close()
        try:
            await asyncio.to_thread(self._child.wait, 5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            await asyncio.to_thread(self._child.wait)
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener

    def _check(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead)

    # ---- what comes up

    async def _listen(self, ready: asyncio.Future[None], on_progress: Callable[[str, int, int], None]) -> None:
        frames = Frames()
        decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        failure: Exception | None = None
        try:
            while data := await self._reader.read(CHUNK):
                for body in frames.feed(data):
                    match decoder.decode(body):
                        case News(updates, stats):
                            self._stats = stats
                            for update in updates:
                                if (inbox := self._inboxes.get(update.request_id)) is not None:
                                    inbox.put_nowait(update)
                        case Refused(request_id, message, param, code, status):
                            if (inbox := self._inboxes.get(request_id)) is not None:
                                inbox.put_nowait(_refusal(message, param, code, status))
                        case Pong(number, stats):
                            self._stats = stats
                            if (answer := self._pings.get(number)) is not None and not answer.done():
                                answer.set_result(None)
                        case Progress(what, done, total):
                            on_progress(what, done, total)
                        case Ready(info):
                            self._info = info
                            if not ready.done():  # whoever waited may have given up
                                ready.set_result(None)
                        case Failed(kind, message):
                            failure = _start_error(kind, message)
        except ConnectionError:
            pass
        finally:  # also where on_progress raised: nobody must wait for ever
            self._die(failure or EngineDeadError(await self._last_words()), ready)

    async def _last_words(self) -> str:
        """How the process ended, for whoever must find out why."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = await asyncio.to_thread(self._child.wait, 1)
            if code == -signal.SIGKILL:
                return "the engine process was killed (SIGKILL); the system does that where memory runs out"
            if code < 0:
                return f"the engine process died of {signal.Signals(-code).name}"
        return "the engine process ended"

    def _die(self, failure: Exception, ready: asyncio.Future[None]) -> None:
        self._dead = str(failure)
        if not ready.done():
            ready.set_exception(failure)
        for inbox in self._inboxes.values():
            inbox.put_nowait(EngineDeadError(self._dead))
        for answer in self._pings.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(self._dead))


def _refusal(message: str, param: str | None, code: str | None, status: int) -> RequestError:
    error = RequestError(message, param=param, code=code)
    error.status = status
    return error


def _start_error(kind: str, message: str) -> Exception:
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, NanoserveError) and not issubclass(known, RequestError):
        return known(message)
    return EngineDeadError(message)
