"""Progress of what takes long: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_SECONDS = 5.0
BYTES = 1 << 20  # totals from here on are bytes


class Progress:
    """Called with what is done, how much of it, and of how much (0: unknown). Use as a context, which ends the bar."""

    def __init__(self) -> None:
        self._what = ""
        self._bar: tqdm[Any] | None = None
        self._told = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._draw(what, done, total)
        elif what != self._what or (done < total and time.monotonic() > self._told + LINE_SECONDS):
            self._told = time.monotonic()
            print(f"{what}: {_amount(done)} of {_amount(total) if total else '?'}", file=sys.stderr, flush=True)
        self._what = what

    def _draw(self, what: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if what != self._what or self._bar is None:
            self.close()
            unit = {"unit": "B", "unit_scale": True} if total >= BYTES else {}
            self._bar = tqdm(desc=what, total=total or None, leave=False, dynamic_ncols=True, **unit)  # type: ignore[call-overload]
        self._bar.update(done - self._bar.n)
        if done == total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _amount(number: int) -> str:
    return f"{number / 1e6:.1f} MB" if number >= BYTES else str(number)
