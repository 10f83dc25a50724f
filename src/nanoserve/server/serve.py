"""serve: an app on a socket, through uvicorn. Bounds what a client can make the server keep before a route sees it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from nanoserve.server.settings import ServerSettings


async def serve(app: FastAPI, settings: ServerSettings, on_ready: Callable[[str], None] = lambda url: None) -> None:
    """Runs until SIGINT or SIGTERM, then lets running requests end within `shutdown_timeout`. `on_ready` gets the
    address once it is open. Runs in the loop of the engine's client; whoever started the engine closes it."""
    await Server(app, settings, on_ready).serve()


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI, settings: ServerSettings, on_ready: Callable[[str], None]):
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            # Bounds heads and trailers, passes over upgrades (h2c) that clients offer beside a body, and frames answers
            # for HTTP/1.0 as that wants them: none of which the faster httptools does.
            http="h11",
            h11_max_incomplete_event_size=settings.max_header_bytes,
            ws="none",
            lifespan="off",
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
            timeout_keep_alive=75,  # longer than a usual proxy's, so that it is the proxy that closes
            timeout_graceful_shutdown=settings.shutdown_timeout,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)
        self._on_ready = on_ready
        self._root_path = settings.root_path

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        self._on_ready(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{self._root_path}")

    def _stop(self, number: int) -> None:
        running = len(self.server_state.tasks)
        if running and not self.should_exit:
            seconds = self.config.timeout_graceful_shutdown
            print(f"stopping: {running} requests have {seconds} s to end; another signal ends them now", flush=True)
        self.handle_exit(number, None)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends `serve`, which returns; uvicorn's own way would raise the signal again, and kill this
        process before the engine is closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
