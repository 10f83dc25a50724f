"""start: what `nanoserve serve` runs. The engine's process loads while this one imports and reads the tokenizer."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nanoserve.core.config import EngineConfig
from nanoserve.engine.messages import EngineInfo
from nanoserve.engine.process import EngineProcess
from nanoserve.loading.pull import pull
from nanoserve.server.settings import ServerSettings

if TYPE_CHECKING:
    from nanoserve.text.tokenizer import Tokenizer

OnProgress = Callable[[str, int, int], None]
OnReady = Callable[[str, EngineInfo, dict[str, float]], None]


def start(
    config: EngineConfig, settings: ServerSettings, on_progress: OnProgress, on_ready: OnReady, began: float
) -> None:
    """Serves until a signal. `on_ready` gets the address, the engine's facts and the seconds that each part of the
    start took, counted from `began` (time.perf_counter). Raises ConfigError, CheckpointError or PullError."""
    seconds = {"process": time.perf_counter() - began}
    if not settings.served_model_name:
        settings = dataclasses.replace(settings, served_model_name=(config.model,))
    mark = time.perf_counter()
    # Not in the event loop, which would keep Ctrl-C for the end of a download.
    path = pull(config.model, revision=config.revision, progress=on_progress)
    seconds["model file"] = time.perf_counter() - mark

    def ready(url: str, info: EngineInfo) -> None:
        engine = {f"engine: {part}": value for part, value in info.seconds.items()}
        on_ready(url, info, seconds | engine | {"total": time.perf_counter() - began})

    asyncio.run(_serve(config, settings, path, on_progress, ready, seconds))


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    path: Path,
    on_progress: OnProgress,
    on_ready: Callable[[str, EngineInfo], None],
    seconds: dict[str, float],
) -> None:
    loading = asyncio.create_task(EngineProcess.start(dataclasses.replace(config, model=str(path)), on_progress))
    mark = time.perf_counter()
    try:
        tokenizer = await asyncio.to_thread(_load_front, Path(config.tokenizer or path))
        seconds["front (beside the engine)"] = time.perf_counter() - mark
        engine = await loading
    except BaseException:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        raise
    from nanoserve.server.app import create_app
    from nanoserve.server.serve import serve

    try:
        app = create_app(engine, tokenizer, settings)
        await serve(app, settings, lambda url: on_ready(url, engine.info))
    finally:
        await engine.close()


def _load_front(path: Path) -> Tokenizer:
    """The imports and the tokenizer, in a thread, so that the engine's process hears from this one meanwhile."""
    import nanoserve.server.app
    import nanoserve.server.serve  # noqa: F401
    from nanoserve.text.load import load_tokenizer

    return load_tokenizer(path)
