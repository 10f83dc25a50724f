"""Small files of a model's folder, read with suspicion: texts and JSON. Knows nothing of what is in them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nanoserve.core.errors import CheckpointError

MAX_BYTES = 1 << 26


def is_there(path: Path) -> bool:
    """Whether the folder has an entry of that name. A link to nothing is one: what it should lead to is missing."""
    return os.path.lexists(path)


def require_file(path: Path) -> None:
    """A file or a link to one; opening a pipe, for one, would wait for ever. Raises CheckpointError."""
    if path.is_file():
        return
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link that leads to no file")
    raise CheckpointError(f"{path} is not a file" if path.exists() else f"{path} is missing")


def read_text(path: Path) -> str:
    """UTF-8, or what else a byte order mark says. Raises CheckpointError."""
    try:
        require_file(path)
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is over {MAX_BYTES} bytes long")
        data = path.read_bytes()
        return data.decode(json.detect_encoding(data))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file. Raises CheckpointError."""
    try:
        content = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """Empty where the folder has no such file."""
    return read_json(path) if is_there(path) else {}
