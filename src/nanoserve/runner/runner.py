"""Runner: computes a StepPlan. It knows rows, blocks and tokens, and nothing of requests."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoserve.attention.interface import KVPool
from nanoserve.core.plan import StepPlan, StepResult, TokenLogprobs
from nanoserve.models.transformer import Transformer
from nanoserve.runner.rows import Batch, RowTable
from nanoserve.sampling.sampler import Sampler


class Runner:
    """`forward` then `sample`, once a step each, in the order of the plans."""

    def __init__(self, model: Transformer, pool: KVPool, rows: RowTable, sampler: Sampler):
        self.model = model
        self.pool = pool
        self.rows = rows
        self.sampler = sampler
        self._batch: Batch | None = None
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Compute the plan's tokens, their KV, and the logits of the rows that sample."""
        self._batch, self._logits = None, None
        self.rows.apply(plan)
        self._batch = batch = self.rows.batch(plan.work)
        hidden = self.model.forward(batch.ids, batch.positions, batch.meta, self.pool)
        if batch.sample_rows:
            self._logits = self.model.logits(hidden[batch.sample_tokens])

    @torch.inference_mode()
    def sample(self, plan: StepPlan) -> StepResult:
        """Draw one token for each row that samples; it is known to the rows from here on."""
        assert self._batch is not None, "forward comes before sample"
        rows = self._batch.sample_rows
        sampled: list[tuple[int, ...]] = [()] * len(plan.work)
        logprobs: list[tuple[TokenLogprobs, ...]] = [()] * len(plan.work)
        if self._logits is not None:
            settings = [setting for row in rows if (setting := self.rows.sampling[row]) is not None]
            drawn = self.sampler.sample(
                self._logits,
                settings,
                lambda i: self.rows.known(rows[i]),
                [int(self.rows.length[row]) for row in rows],
            )
            results = iter(zip(drawn.ids.tolist(), drawn.logprobs, strict=True))
            for i, work in enumerate(plan.work):
                if work.samples:
                    token, logprob = next(results)
                    sampled[i] = (token,)
                    logprobs[i] = () if logprob is None else (logprob,)
                    self.rows.append(work.row, max(token, 0))  # a failed sample ends its row
        return StepResult(plan.number, tuple(sampled), tuple(logprobs))
