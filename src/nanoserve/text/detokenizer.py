"""Detokenizer: ids, as they come, to text that will not change any more.

A token may be a part of a character. What was pushed is read as bytes, and a character goes out when its last byte is
there; the cost of a token does not depend on how many went before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from nanoserve.text.tokenizer import Vocabulary

MAX_CHAR_BYTES = 4  # of UTF-8


class Detokenizer:
    """All texts of `push` and that of `flush`, behind the prompt's text, are the decoding of all ids. A character
    that the prompt has begun belongs to the output."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], skip_special: bool):
        self._token_bytes = vocabulary.token_bytes
        self._skipped = vocabulary.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        before = self._end_of(prompt_ids)
        self._decoder.decode(before)
        # The first space of a whole text is not part of it, with some tokenizers; here the text begins in the prompt.
        self._strip = vocabulary.strips_first_space and not before

    def _end_of(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes: enough to hold a character that is cut by its end."""
        end = b""
        for id in reversed(prompt_ids):
            if len(end) >= MAX_CHAR_BYTES:
                break
            if id not in self._skipped:
                end = self._token_bytes(id) + end
        return end

    def push(self, ids: Iterable[int]) -> str:
        data = b"".join([self._token_bytes(id) for id in ids if id not in self._skipped])
        return self._stripped(self._decoder.decode(data))

    def flush(self) -> str:
        """At the end: one U+FFFD where a character was cut."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
