"""Where files are kept that can be fetched or made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$NANOSERVE_CACHE, else `nanoserve` in the user's cache folder. Hugging Face's own files are kept elsewhere."""
    if own := os.environ.get("NANOSERVE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "nanoserve"
