"""nanoserve: an LLM inference engine you can read in an afternoon.

from nanoserve import LLM, SamplingParams
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanoserve.core.params import SamplingParams
    from nanoserve.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Late, since LLM brings torch, and the command line and the HTTP front start without it."""
    if name == "LLM":
        from nanoserve.llm import LLM

        return LLM
    if name == "SamplingParams":
        from nanoserve.core.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")
