"""TextStream: the tokens of one sequence, as they come, to text for its reader.

The one place, for server and LLM, that joins half characters, finds stop strings, and leaves out the end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nanoserve.core.params import SamplingParams
from nanoserve.core.request import FinishReason
from nanoserve.text.detokenizer import Detokenizer
from nanoserve.text.stops import StopStrings
from nanoserve.text.tokenizer import Vocabulary


class Delta(NamedTuple):
    """What one push brought. Text may lag behind tokens: half characters and begun stop strings are held back."""

    text: str
    finish: FinishReason | None
    stop: str | int | None  # the stop string, or the id of the end token, that ended the text
    tokens: tuple[int, ...]  # those that count: up to the one that completed a stop string, and the end token too
    offsets: tuple[int, ...]  # for each of `tokens`: characters that were whole before it


class TextStream:
    """Stop strings that are complete before `min_tokens` tokens are text. The end token's own text is left out,
    unless `include_stop_str_in_output` (and a special one still is, with `skip_special_tokens`)."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], sampling: SamplingParams):
        self._detokenizer = Detokenizer(vocabulary, prompt_ids, sampling.skip_special_tokens)
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)
        self._include = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._count = 0
        self._length = 0  # characters, held ones too
        self._finished = False

    def push(self, tokens: Sequence[int], finish: FinishReason | None, stop_id: int | None) -> Delta:
        """`finish` and `stop_id` as the engine reports them. When the delta has a `finish` and the engine had none,
        a stop string was hit, and the engine is to be told. Afterwards pushes bring nothing."""
        if self._finished:
            return Delta("", None, None, (), ())
        pieces: list[str] = []
        offsets: list[int] = []
        end = len(tokens) - 1 if stop_id is not None and not self._include else len(tokens)
        for index, token in enumerate(tokens):
            self._count += 1
            offsets.append(self._length)
            if index < end:
                hit = self._take(self._detokenizer.push((token,)), pieces)
                if hit is not None:
                    self._finished = True
                    return Delta("".join(pieces), FinishReason.STOP, hit, tuple(tokens[: index + 1]), tuple(offsets))
        if finish is not None:
            self._finished = True
            hit = self._take(self._detokenizer.flush(), pieces)
            if hit is not None:
                return Delta("".join(pieces), FinishReason.STOP, hit, tuple(tokens), tuple(offsets))
            pieces.append(self._stops.flush())
        return Delta("".join(pieces), finish, stop_id, tuple(tokens), tuple(offsets))

    def _take(self, text: str, pieces: list[str]) -> str | None:
        """Add what is certain to `pieces`; the stop string that was hit, if any."""
        self._length += len(text)
        certain, hit = self._stops.push(text, armed=self._count >= self._min_tokens)
        pieces.append(certain)
        return hit
