"""StopStrings: finds the end of an answer in a stream of text, and holds back only what may be the begin of a stop.

Each stop string is matched with the Knuth-Morris-Pratt automaton: a character costs O(1) per stop string, however
long they are and however the text is cut.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """The stop string that is complete first ends the text; of several complete at once, the longest. `include`: the
    text ends with the stop string, else before it."""

    def __init__(self, stops: Iterable[str], include: bool):
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Text that is certain, and the stop string that was hit; after one, push no more. While not `armed`, whole
        stop strings pass as text."""
        if not self._matchers:
            return text, None
        buffer = self._held + text
        start = len(self._held)
        for end, char in enumerate(text, start + 1):
            hits = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if hits and armed:
                stop = max(hits, key=len)
                self._held = ""
                return buffer[: end if self._include else end - len(stop)], stop
        held = max(matcher.length for matcher in self._matchers)
        certain = len(buffer) - held
        self._held = buffer[certain:]
        return buffer[:certain], None

    def flush(self) -> str:
        """At the end: what was held back for a stop string that did not come."""
        text, self._held = self._held, ""
        return text


class _Matcher:
    """How much of one stop string the text ends with: never all of it, between two characters."""

    __slots__ = ("borders", "length", "stop")

    def __init__(self, stop: str):
        self.stop = stop
        self.length = 0
        # borders[i]: the longest proper prefix of stop[:i+1] that is also its end; grown as far as matches reached
        self.borders = [0]

    def advance(self, char: str) -> bool:
        """Whether `char` completes the stop string."""
        stop, length = self.stop, self.length
        while length and stop[length] != char:
            length = self.borders[length - 1]
        if stop[length] == char:
            length += 1
            if length > len(self.borders):
                self._grow()
        complete = length == len(stop)
        self.length = self.borders[-1] if complete else length
        return complete

    def _grow(self) -> None:
        stop, end = self.stop, len(self.borders)
        border = self.borders[-1]
        while border and stop[border] != stop[end]:
            border = self.borders[border - 1]
        self.borders.append(border + (stop[border] == stop[end]))
