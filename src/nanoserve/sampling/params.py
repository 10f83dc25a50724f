"""RowSampling: what the sampler must know about one row."""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.core.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    params: SamplingParams
    seed: int  # with the number of known tokens it decides the draw, and nothing else does
    prompt_length: int
    stop_ids: frozenset[int]  # never sampled while fewer than params.min_tokens were generated

    @property
    def penalised(self) -> bool:
        """Whether the tokens known so far change this row's logits."""
        p = self.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    def adjusts(self, generated: int) -> bool:
        """Whether a stage before the temperature changes this row's logits."""
        p = self.params
        return self.penalised or bool(p.logit_bias) or (generated < p.min_tokens and bool(self.stop_ids))
