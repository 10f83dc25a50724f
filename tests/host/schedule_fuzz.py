"""One fuzz trial of a scheduler: random limits, requests and events on a fake device, with everything checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from host.fake_device import FakeDevice, continuation, logprob_of, prefixes, root
from nanoserve.core.errors import ContextLengthError
from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import StepPlan, StepResult
from nanoserve.core.request import FinishReason, Request, Sequence, State

SAMPLING = [SamplingParams(min_tokens=m, logprobs=p) for m in (0, 0, 3) for p in (None, 2)]
ZERO: frozenset[int] = frozenset({0})
NONE: frozenset[int] = frozenset()
SIBLING = frozenset({"sibling"})
GRAMMAR = frozenset({"grammar"})


class Subject(NamedTuple):
    """The scheduler under test: the package's own, or a copy with a planted fault."""

    Scheduler: Any
    SchedulerConfig: Any
    BlockPool: Any
    audit: Callable[[Any], None]


class Tally(NamedTuple):
    """What happened, so that a run can show that it tried what it claims to try."""

    requests: int
    steps: int
    preemptions: int
    cached: int
    aborts: int
    errors: int
    holds: int


def run_trial(seed: int, subject: Subject) -> Tally:
    return _Trial(Random(seed), subject).run()


class _Trial:
    def __init__(self, random: Random, subject: Subject):
        self.chance = random.random
        self.audit = subject.audit
        lookahead = self.pick(0, 0, 0, 1, 3)
        self.depth = 0 if lookahead else self.pick(0, 1, 1, 2)
        self.vocab = self.pick(2, 5, 50)
        block_size = self.below(1, 9)
        self.num_blocks = self.below(14, 40) // block_size + 1
        rows = self.below(1, 6)
        self.config = subject.SchedulerConfig(
            max_rows=rows,
            max_step_tokens=rows * (1 + lookahead) + self.pick(0, 2, 30),
            max_len=self.pick(16, 30),
            lookahead=lookahead,
            prefix_caching=self.chance() < 0.9,
        )
        self.scheduler = subject.Scheduler(self.config, subject.BlockPool(self.num_blocks, block_size))
        failing = 0.02 if self.chance() < 0.3 else 0.0
        self.device = FakeDevice(
            self.num_blocks, block_size, self.vocab, random,
            lookahead=lookahead, failing_samples=failing, failing_steps=failing,
        )  # fmt: skip
        self.shared = [self.below(0, self.vocab) for _ in range(8)]
        self.sequences: list[Sequence] = []
        self.told: dict[Sequence, list[int]] = {}
        self.struck: set[Sequence] = set()  # those for which the device has failed
        self.gated: list[Sequence] = []
        self.held: list[Sequence] = []
        self.num_holds = 0
        self.flying: deque[tuple[StepPlan, StepResult | None, list[Sequence]]] = deque()

    def below(self, low: int, high: int) -> int:
        return low + int(self.chance() * (high - low))

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.chance() * len(choices))]

    def run(self) -> Tally:
        left, steps = self.below(1, 8), 0
        while left or not self.scheduler.idle or self.flying:
            steps += 1
            assert steps < 2000, "livelock"
            if left and self.chance() < 0.6:
                left -= 1
                self.add(left)
            if self.gated and self.chance() < 0.4:
                self.open_gate(self.gated.pop(self.below(0, len(self.gated))))
            if self.held and self.chance() < 0.2:
                self.release_hold(self.held.pop(self.below(0, len(self.held))))
            if self.sequences and self.chance() < 0.03:
                self.scheduler.abort(self.pick(*self.sequences))
            planned = self.plan()
            while len(self.flying) > self.depth or (self.flying and not planned):
                self.commit()
                planned = True
            self.audit(self.scheduler)
        return self.finish(steps)

    # ---- events

    def add(self, number: int) -> None:
        prompt = self.shared[: self.below(0, 9)] + [self.below(0, self.vocab) for _ in range(self.below(1, 6))]
        request = Request(
            id=f"r{number}",
            prompt=tuple(prompt),
            sampling=self.pick(*SAMPLING),
            max_tokens=self.below(1, 17),
            stop_ids=self.pick(NONE, ZERO),
            priority=self.pick(0, 0, 0, 0, 5, -5),
            cache_salt=self.pick("", "", "", "a", "b"),
        )
        length = len(prompt) + request.max_tokens
        fits = length <= self.config.max_len and length - 1 <= len(self.device.kv)
        for index in range(self.pick(1, 1, 1, 1, 3)):
            gates = SIBLING if index else GRAMMAR if self.chance() < 0.15 else NONE
            try:
                sequence = self.scheduler.add(request, index, seed=number + 100 * index, gates=gates)
            except ContextLengthError:
                assert not fits, "a request was refused that fits"
                return
            assert fits, "a request was taken that never fits"
            self.sequences.append(sequence)
            self.told[sequence] = []
            if gates:
                self.gated.append(sequence)
            if self.chance() < 0.1:
                self.scheduler.hold(sequence)
                self.held.append(sequence)
                self.num_holds += 1

    def open_gate(self, sequence: Sequence) -> None:
        assert sequence.row is None, "a gated sequence was started"
        self.scheduler.open_gate(sequence, next(iter(sequence.gates)))

    def release_hold(self, sequence: Sequence) -> None:
        if sequence.state is State.FINISHED and sequence.blocks:
            assert sequence.finish in (FinishReason.STOP, FinishReason.LENGTH), f"{sequence.finish} keeps blocks"
            encoded = prefixes(root(sequence.request.cache_salt), sequence.tokens[:-1])
            self.device.check(sequence.blocks, encoded)
        self.scheduler.release_hold(sequence)

    # ---- one step

    def plan(self) -> bool:
        scheduler = self.scheduler
        before = list(scheduler.running)
        due = [self.may_sample(s) for s in before]
        owed = [s for s, more in zip(before, due, strict=True) if more and s.pending == 1]
        plan = scheduler.plan()
        stayed = [s.state is State.RUNNING for s in before]
        assert stayed == sorted(stayed, reverse=True), "somebody was preempted before one of lower rank"
        by_row = {s.row: s for s in scheduler.running}
        owners = [by_row[work.row] for work in plan.work] if plan else []
        assert all(s in owners for s in owed if s.state is State.RUNNING), "a decode was passed over"
        if before and not self.held:
            assert stayed[0], "the first in order was preempted"
            assert before[0] in owners or not due[0], "the first in order does not get on"
        if plan is None:
            return False
        assert plan.num_tokens <= self.config.max_step_tokens, "over the budget of a step"
        for sequence, work in zip(owners, plan.work, strict=True):
            longest = len(sequence.request.prompt) + sequence.request.max_tokens
            assert work.start + work.num_tokens < longest, "work beyond the last token"
        opened = [by_row[opening.row] for opening in plan.opens]
        if opened:
            last = max(s.order for s in opened)
            assert all(s.gates or s.order > last for s in scheduler.waiting), "somebody jumped the queue"
        result = self.device.run(plan, {s.row: s.request.cache_salt for s in opened if s.row is not None})
        self.flying.append((plan, result, owners))
        return True

    def may_sample(self, sequence: Sequence) -> bool:
        """Whether samples on their way do not reach its limit yet."""
        return sequence.generated + sequence.in_flight < sequence.request.max_tokens

    def commit(self) -> None:
        plan, result, owners = self.flying.popleft()
        alive = [s for s in owners if s.finish is None]
        if result is None:
            self.struck.update(alive)
            assert self.scheduler.fail(plan.number) == alive, "the wrong sequences fail"
            assert all(s.finish is FinishReason.ERROR for s in alive), "a failed step leaves sequences as they were"
            return
        sampling = [s for s, work in zip(owners, plan.work, strict=True) if work.samples and s.finish is None]
        held = [s for s in sampling if s in self.held and s.state is State.RUNNING]
        self.struck.update(s for s, tokens in zip(owners, result.sampled, strict=True) if tokens and tokens[-1] < 0)
        news = self.scheduler.commit(result)
        assert [s for s, _, _ in news] == sampling, "news of the wrong sequences"
        assert all(s.finish is not None for s in self.struck), "a failed sample does not end its sequence"
        assert all(s.blocks or s.finish is FinishReason.ERROR for s in held), "a held sequence lost its blocks"
        for sequence, tokens, logprobs in news:
            asked = sequence.request.sampling.logprobs is not None
            first = len(sequence.tokens) - len(tokens)
            wanted = tuple(logprob_of(first + i, t) for i, t in enumerate(tokens)) if asked else ()
            assert logprobs == wanted, "logprobs of other tokens"
            self.told[sequence] += tokens

    # ---- the end

    def finish(self, steps: int) -> Tally:
        for sequence in self.held:
            self.release_hold(sequence)
        self.audit(self.scheduler)
        assert self.scheduler.pool.num_free == self.num_blocks, "blocks leaked"
        assert set(self.scheduler._closes) == set(self.device.rows), "rows stay open on the device"
        assert self.scheduler.prefix_hits == sum(s.cached for s in self.sequences), "a wrong count of hits"
        assert self.scheduler.num_preemptions == sum(s.preemptions for s in self.sequences), "a wrong count"
        for sequence in self.sequences:
            output = sequence.tokens[len(sequence.request.prompt) :]
            assert self.told[sequence] == output, "the news differ from the book"
            assert sequence.cached < len(sequence.request.prompt), "nothing was left to compute"
            wanted, reason = continuation(sequence.request, sequence.seed, self.vocab)
            if sequence.finish in (FinishReason.ABORT, FinishReason.ERROR):
                wanted, reason = wanted[: len(output)], sequence.finish
            assert (output, sequence.finish) == (wanted, reason), "a wrong text or end"
            assert sequence.finish is not FinishReason.ERROR or sequence in self.struck, "an error out of nothing"
        ends = [s.finish for s in self.sequences]
        return Tally(
            requests=len(ends),
            steps=steps,
            preemptions=self.scheduler.num_preemptions,
            cached=self.scheduler.prefix_hits,
            aborts=ends.count(FinishReason.ABORT),
            errors=ends.count(FinishReason.ERROR),
            holds=self.num_holds,
        )
