"""Every error a person can meet.

NanoserveError
├── ConfigError        a flag or setting cannot be honoured (at start)
├── CheckpointError    a model file is missing, damaged, or not understood
├── PullError          a model cannot be fetched
├── RequestError       one request cannot be served; it names its parameter
│   ├── ContextLengthError
│   └── OverloadedError
└── EngineDeadError    the engine stopped; nothing can be served
"""

from __future__ import annotations


class NanoserveError(Exception):
    """Root of the tree. Its text is written for a person and safe to show."""


class ConfigError(NanoserveError, ValueError):
    """A setting cannot be honoured; the message names the flag and says what would work."""


class CheckpointError(NanoserveError, ValueError):
    """A checkpoint is missing, truncated, crafted or unknown; the message names the file and the fact."""


class PullError(NanoserveError, RuntimeError):
    """A model cannot be had; the message says what was tried."""


class RequestError(NanoserveError, ValueError):
    """One request cannot be served. `param` is the field at fault, `code` a stable word for programs."""

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or prompt plus tokens to generate, exceeds what this engine serves."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message, param=param, code="context_length_exceeded")


class OverloadedError(RequestError):
    """The engine takes no more work now; trying again later may succeed."""

    status = 429


class EngineDeadError(NanoserveError, RuntimeError):
    """The engine process ended or failed; no request can be served any more."""
