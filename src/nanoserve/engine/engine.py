"""Engine: the one loop. It moves plans down to the runner and results up to the scheduler, a step at a time."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass

from nanoserve.core.errors import OverloadedError, RequestError
from nanoserve.core.plan import StepPlan, StepResult, TokenLogprobs
from nanoserve.core.request import FinishReason, Request, Sequence, State
from nanoserve.engine.messages import EngineInfo, EngineStats, Update
from nanoserve.runner.runner import Runner
from nanoserve.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

SIBLING = "sibling"  # gate: wait until another continuation of the same prompt has computed it
MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the n seeds of a request


@dataclass(slots=True)
class _Tracked:
    """What the engine notes of a sequence beside the scheduler's book."""

    sequence: Sequence
    arrived: float
    queued: float | None = None  # seconds until its first admission
    told: bool = False  # its end was reported


class Engine:
    """Not thread-safe: one thread calls `add`, `abort` and `step`."""

    def __init__(self, scheduler: Scheduler, runner: Runner, info: EngineInfo, *, max_queued: int, seed: int):
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._max_queued = max_queued
        self._seeds = random.Random(seed)
        self._requests: dict[str, list[_Tracked]] = {}
        self._aborted: list[Sequence] = []
        self._prompt_tokens = self._generation_tokens = self._steps = self._step_tokens = 0

    # ---- the door

    def add(self, request: Request) -> None:
        """Raises RequestError where it cannot be served; then nothing of it is kept."""
        if request.id in self._requests:
            raise RequestError(f"request_id {request.id!r} is running already", param="request_id")
        n = request.sampling.n
        waiting = len(self._scheduler.waiting)
        if waiting + n > self._max_queued:
            raise OverloadedError(
                f"{waiting} sequences are waiting and at most {self._max_queued} may; try again later",
                code="queue_full",
            )
        seed = self._seeds.getrandbits(64) if request.sampling.seed is None else request.sampling.seed
        tracked = []
        for index in range(n):
            gates = frozenset({SIBLING} if index else ())
            sequence = self._scheduler.add(request, index, (seed + index * MIX) % 2**64, gates)
            tracked.append(_Tracked(sequence, time.perf_counter()))
        self._requests[request.id] = tracked
        self._prompt_tokens += len(request.prompt)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences. Unknown or finished ones are no error: ends may cross."""
        for tracked in self._requests.get(request_id, ()):
            sequence = tracked.sequence
            if index in (None, sequence.index) and sequence.state is not State.FINISHED:
                self._scheduler.abort(sequence)
                self._aborted.append(sequence)

    @property
    def idle(self) -> bool:
        return self._scheduler.idle and not self._aborted

    # ---- one step

    def step(self) -> list[Update]:
        """Plan, compute and commit one step. Returns what became known, a sequence at most once."""
        updates = [self._update(sequence, (), ()) for sequence in self._aborted]
        self._aborted.clear()
        plan = self._scheduler.plan()
        if plan is not None:
            self._note_admissions(plan)
            result = self._compute(plan)
            if result is None:
                failed = self._scheduler.fail(plan.number)
                return updates + [self._update(sequence, (), ()) for sequence in failed]
            for sequence, tokens, logprobs in self._scheduler.commit(result):
                updates.append(self._update(sequence, tokens, logprobs))
        return updates

    def _compute(self, plan: StepPlan) -> StepResult | None:
        """None: the step failed. Its sequences end with an error; the loop goes on."""
        self._steps += 1
        self._step_tokens += plan.num_tokens
        try:
            self._runner.forward(plan)
            return self._runner.sample(plan)
        except Exception:  # whatever a kernel or allocator raises must not end the others
            log.exception("step %d failed: %d rows, %d tokens", plan.number, len(plan.work), plan.num_tokens)
            return None

    def _update(self, sequence: Sequence, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> Update:
        tracked = self._requests[sequence.request.id]
        own = tracked[sequence.index]
        self._generation_tokens += len(tokens)
        first = bool(tokens) and sequence.generated == len(tokens)
        if len(tracked) > 1 and (first or sequence.finish is not None):
            self._open_siblings(tracked)
        if sequence.finish is not None:
            own.told = True
            if all(other.told for other in tracked):
                del self._requests[sequence.request.id]
        return Update(
            request_id=sequence.request.id,
            index=sequence.index,
            tokens=tokens,
            logprobs=logprobs,
            finish=sequence.finish,
            stop_id=tokens[-1] if tokens and sequence.finish is FinishReason.STOP else None,
            cached_tokens=sequence.cached,
            queued_seconds=own.queued or 0.0,
        )

    def _open_siblings(self, tracked: list[_Tracked]) -> None:
        for other in tracked:
            if SIBLING in other.sequence.gates:
                self._scheduler.open_gate(other.sequence, SIBLING)

    def _note_admissions(self, plan: StepPlan) -> None:
        if not plan.opens:
            return
        now = time.perf_counter()
        for tracked in self._requests.values():
            for own in tracked:
                if own.queued is None and own.sequence.state is State.RUNNING:
                    own.queued = now - own.arrived

    # ---- what is going on

    @property
    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        pool = scheduler.pool
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=1.0 - pool.num_free / pool.num_blocks,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=self._steps,
            step_tokens=self._step_tokens,
        )
