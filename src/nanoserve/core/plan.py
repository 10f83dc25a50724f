"""The only words between the scheduler and the runner: a StepPlan goes down, a StepResult comes up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from nanoserve.core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowOpen:
    """A sequence takes a row: everything the device must know about it."""

    row: int
    tokens: tuple[int, ...]  # all known tokens: the prompt, and after a preemption what was generated
    prompt_length: int
    blocks: tuple[int, ...]
    computed: int  # leading tokens whose KV is in `blocks` already
    sampling: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # masked until min_tokens were generated


class SeqWork(NamedTuple):
    """Compute tokens [start, start+num_tokens) of a row; sample after the last of them if `samples`."""

    row: int
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class StepPlan:
    """One step. Apply closes, then opens, then grows; then compute `work`. Nobody changes it once made."""

    number: int
    closes: list[int] = field(default_factory=list)
    opens: list[RowOpen] = field(default_factory=list)
    grows: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # row, blocks appended to it
    work: list[SeqWork] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.work)


class TokenLogprobs(NamedTuple):
    """Natural log of the model's own distribution, before temperature, penalties and masks."""

    logprob: float  # of the sampled token
    top_ids: tuple[int, ...]  # the most likely first
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Beside `plan.work`, one entry each. An empty tuple where nothing was sampled; a negative id (see
    FAILED_SAMPLE) where the logits were not finite."""

    number: int
    sampled: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...]  # () for rows that did not ask


FAILED_SAMPLE = -1
