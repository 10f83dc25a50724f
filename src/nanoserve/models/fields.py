"""Fields: a checkpoint's config, read with suspicion. It knows kinds of values and nothing of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoserve.core.errors import CheckpointError

LARGEST = 1 << 31  # of any dimension: a crafted one must not become an allocation
LARGEST_NUMBER = 1e12  # and arithmetic on any other number must not overflow


class Fields:
    """Every getter raises CheckpointError, naming the field and what it holds instead.

    A default stands for a field that is absent or null; without one the field is required."""

    def __init__(self, raw: Mapping[str, Any], inside: str = ""):
        self.raw = raw
        self.inside = inside  # "rope_parameters." where these are nested fields

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def integer(self, name: str, default: int | None = None, at_most: int = LARGEST) -> int:
        """A whole number of at least 1."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= at_most:
            raise self.error(name, f"is {value!r}, not a whole number from 1 to {at_most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number over 0."""
        return self._positive(name, self._get(name, default))

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self._get(name, None)
        if not isinstance(value, (list, tuple)) or len(value) != length:
            raise self.error(name, f"must be a list of {length} numbers, not {_short(value)}")
        return tuple(self._positive(name, item) for item in value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {_short(value)}, not true or false")
        return value

    def word(self, name: str, known: tuple[str, ...], default: str | None = None) -> str:
        value = self._get(name, default)
        if value not in known:
            raise self.error(name, f"is {_short(value)}; known: {', '.join(known)}")
        return str(value)

    def sequence(self, name: str, length: int, allowed: tuple[Any, ...], default: list[Any]) -> list[Any]:
        """A list with an entry for each of `length` layers (or more)."""
        value = self._get(name, default)
        if not isinstance(value, list) or len(value) < length:
            raise self.error(name, f"must be a list of {length} entries, not {_short(value)}")
        for item in value[:length]:
            if item not in allowed:
                raise self.error(name, f"has the entry {_short(item)}; known: {', '.join(map(str, allowed))}")
        return value[:length]

    def error(self, name: str, fact: str) -> CheckpointError:
        return CheckpointError(f"config: {self.inside}{name} {fact}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value

    def _positive(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= LARGEST_NUMBER:
            raise self.error(name, f"is {_short(value)}, not a number over 0 and at most {LARGEST_NUMBER:g}")
        return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
