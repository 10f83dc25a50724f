"""nanoserve serve: prints how the start goes, and what was decided."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import socket
from collections.abc import Mapping

from nanoserve.cli.flags import engine_config, given
from nanoserve.cli.progress import Progress
from nanoserve.core.errors import ConfigError
from nanoserve.engine.messages import EngineInfo
from nanoserve.server.settings import ServerSettings
from nanoserve.server.start import start


def serve(arguments: argparse.Namespace, began: float) -> int:
    config, settings = engine_config(arguments), ServerSettings(**given(arguments, ServerSettings))
    _check_address(settings)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    name = (settings.served_model_name or (config.model,))[0]
    with Progress() as progress:

        def ready(url: str, info: EngineInfo, seconds: Mapping[str, float]) -> None:
            progress.close()
            print(report(name, url, info, seconds, with_key=bool(settings.api_key)), flush=True)

        start(config, settings, progress, ready, began)
    return 0


def report(name: str, url: str, info: EngineInfo, seconds: Mapping[str, float], *, with_key: bool) -> str:
    """What a person wants to know once the server can be used."""
    parts = ", ".join(f"{part} {value:.2f}" for part, value in seconds.items() if part != "total")
    tokens = info.num_blocks * info.block_size
    reasons = {decision.name: decision for decision in info.decisions}
    blocks = reasons.pop("num_blocks", None)
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]})
    key = " -H 'Authorization: Bearer YOUR-KEY'" if with_key else ""
    lines = [
        f"model      {name}: {info.family}, {info.num_parameters / 1e6:,.1f} M parameters, "
        f"{info.weight_bytes / 1e6:,.1f} MB of weights",
        f"start      {seconds['total']:.2f} s: {parts}",
        f"KV cache   {info.num_blocks:,} blocks of {info.block_size} tokens: {tokens:,} tokens, "
        f"{tokens * info.kv_bytes_per_token / 1e6:,.1f} MB" + (f" ({blocks.reason})" if blocks else ""),
        *(f"chosen     {decision.name} {decision.value}: {decision.reason}" for decision in reasons.values()),
        f"ready      {url}",
        "try        "
        f"curl {shlex.quote(url + '/v1/chat/completions')} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(body)}",
    ]
    return "\n".join(lines)


def _check_address(settings: ServerSettings) -> None:
    """Before the model loads: a port that is taken should not take a minute to say so."""
    try:
        with socket.create_server((settings.host, settings.port), family=_family(settings.host)):
            pass
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # it names the address once more
        raise ConfigError(f"--host {settings.host} --port {settings.port} cannot be listened on: {reason}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
