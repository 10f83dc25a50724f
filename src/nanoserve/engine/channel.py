"""Channel: length-prefixed msgpack frames over a socket, for the engine's end. The other end is asyncio's."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from nanoserve.engine.messages import Report

HEADER = struct.Struct("<I")
CHUNK = 1 << 18

Incoming = TypeVar("Incoming")


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


class ChannelClosed(Exception):
    """The other end is gone."""


class Frames:
    """Cuts received bytes into the bodies of whole frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, start)
            end = start + HEADER.size + size
            if len(self._buffer) < end:
                break
            yield bytes(self._buffer[start + HEADER.size : end])
            start = end
        del self._buffer[:start]


class Channel(Generic[Incoming]):
    def __init__(self, sock: socket.socket, incoming: type[Incoming]):
        self._sock = sock
        self._frames = Frames()
        self._decoder = msgspec.msgpack.Decoder(incoming)

    def send(self, report: Report) -> None:
        """Blocks while the other end is slow: an engine must not outrun its reader without bound."""
        try:
            self._sock.sendall(frame(report))
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, *, wait: bool) -> list[Incoming]:
        """All messages that are here; with `wait`, at least one read's worth."""
        messages: list[Incoming] = []
        while True:
            try:
                data = self._sock.recv(CHUNK, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            messages += map(self._decoder.decode, self._frames.feed(data))
            wait = False
