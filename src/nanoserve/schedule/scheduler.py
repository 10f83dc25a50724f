"""Scheduler: which tokens are computed next, and in whose blocks.

There is one kind of work: compute tokens [start, start + num_tokens) of a sequence. A first prefill, a chunk, a
decode, a draft to verify and a resumption after preemption differ only in these numbers.

`plan` may run ahead of `commit`: a sample that is still on the device counts as a token that exists. Grammars and
drafters reach in through two neutral hooks alone: gates (do not admit yet) and lookahead (token room for drafts).
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from dataclasses import dataclass

from nanoserve.core.errors import ContextLengthError, RequestError
from nanoserve.core.plan import FAILED_SAMPLE, RowOpen, SeqWork, StepPlan, StepResult, TokenLogprobs
from nanoserve.core.request import FinishReason, Request, Sequence, State
from nanoserve.schedule.blocks import BlockPool

News = tuple[Sequence, tuple[int, ...], tuple[TokenLogprobs, ...]]
Flight = list[tuple[Sequence, SeqWork]]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_rows: int  # sequences that run at the same time
    max_step_tokens: int  # tokens computed in one step
    max_len: int  # prompt plus output of a sequence
    lookahead: int = 0  # drafts computed beside each sampled token
    prefix_caching: bool = True


class Scheduler:
    """One thread drives it: `add` and `abort` at any time between `plan` and `commit`, which take turns."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool):
        assert config.max_step_tokens >= config.max_rows * (1 + config.lookahead), "every row must decode in one step"
        self.config = config
        self.pool = pool
        self.waiting: list[Sequence] = []  # both in order: the first is served first, the last preempted first
        self.running: list[Sequence] = []
        self.free_rows = list(range(config.max_rows))
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens looked up at first admissions
        self.prefix_hits = 0  # and found
        self._closes: list[int] = []
        self._flights: deque[tuple[int, Flight]] = deque()
        self._arrivals = 0
        self._steps = 0

    # ---- the door

    def add(self, request: Request, index: int, seed: int, gates: frozenset[str] = frozenset()) -> Sequence:
        """Raises RequestError for what can never be served here."""
        prompt, longest = len(request.prompt), len(request.prompt) + request.max_tokens
        if not prompt or request.max_tokens < 1:
            raise RequestError("a request needs a prompt and at least one token to generate", param="prompt")
        if longest > self.config.max_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {request.max_tokens} were requested: {longest} in all; "
                f"this engine serves {self.config.max_len}",
                param="max_tokens",
            )
        need = self.pool.blocks_for(longest + self.config.lookahead)
        if need > self.pool.num_blocks:
            room = self.pool.num_blocks * self.pool.block_size - self.config.lookahead
            raise ContextLengthError(
                f"{longest} tokens need {need} KV blocks and there are {self.pool.num_blocks}: {room} tokens fit",
                param="max_tokens",
            )
        sequence = Sequence(
            request=request,
            index=index,
            seed=seed,
            order=(request.priority, self._arrivals),
            tokens=list(request.prompt),
            gates=set(gates),
        )
        self._arrivals += 1
        insort(self.waiting, sequence, key=_order)
        return sequence

    def open_gate(self, sequence: Sequence, gate: str) -> None:
        sequence.gates.discard(gate)

    def abort(self, sequence: Sequence) -> None:
        """End it now, also with a step in flight: that step may still write to its blocks, but any step that gives
        them to another is planned later and so runs later."""
        if sequence.state is not State.FINISHED:
            self._end(sequence, FinishReason.ABORT)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    # ---- one step

    def plan(self) -> StepPlan | None:
        """Running sequences in order, the share of every decode after them kept back; then newcomers while rows,
        tokens and blocks last. None: nothing can be computed now."""
        plan = StepPlan(self._steps, closes=self._closes)
        flight: Flight = []
        budget = self.config.max_step_tokens
        share = 1 + self.config.lookahead
        kept_back = share * sum(sequence.pending == 1 for sequence in self.running)
        preemptions = self.num_preemptions
        for sequence in list(self.running):
            kept_back -= share * (sequence.pending == 1)
            if sequence.state is State.RUNNING:  # else one before it took its blocks
                budget -= self._continue(sequence, budget - kept_back, plan, flight)
        if self.num_preemptions == preemptions:  # after a preemption, let the pool settle
            self._admit(budget, plan, flight)
        if not flight:
            return None
        plan.work = [work for _, work in flight]
        self._closes = []
        self._steps += 1
        self._flights.append((plan.number, flight))
        return plan

    def commit(self, result: StepResult) -> list[News]:
        """Take in what a step sampled, in the order of plans. Returns each sequence that sampled with its new tokens
        and their logprobs, both cut at its end."""
        number, flight = self._flights.popleft()
        assert number == result.number, f"step {result.number} committed before {number}"
        news: list[News] = []
        for (sequence, work), sampled, logprobs in zip(flight, result.sampled, result.logprobs, strict=True):
            sequence.in_flight -= work.samples
            if sequence.state is State.FINISHED:
                continue
            computed = work.start + work.num_tokens
            if work.samples:
                kept = self._append(sequence, sampled)
                news.append((sequence, sampled[:kept], logprobs[:kept]))
                computed += len(sampled) - 1 - self.config.lookahead  # KV of refuted drafts is none
            if sequence.row == work.row:  # else it was preempted meanwhile, and what it wrote is gone
                if work.samples and self.config.lookahead:
                    sequence.planned = computed  # drafts that held need no second look
                self._publish(sequence, computed)
            if sequence.finish is not None:
                self._end(sequence, sequence.finish)
        return news

    def fail(self, number: int) -> list[Sequence]:
        """The step could not be computed: its sequences end with an error. Returns them."""
        planned, flight = self._flights.popleft()
        assert planned == number, f"step {number} failed before {planned}"
        failed = []
        for sequence, work in flight:
            sequence.in_flight -= work.samples
            if sequence.state is not State.FINISHED:
                self._end(sequence, FinishReason.ERROR)
                failed.append(sequence)
        return failed

    # ---- parts of plan

    def _continue(self, sequence: Sequence, budget: int, plan: StepPlan, flight: Flight) -> int:
        """Plan as much of a running sequence as budget and blocks allow; returns the tokens spent."""
        if sequence.generated + sequence.in_flight >= sequence.request.max_tokens:
            return 0  # the samples on their way will end it
        num_tokens, samples = self._portion(sequence.pending, budget)
        if num_tokens == 0 or not self._grow(sequence, sequence.planned + num_tokens, plan):
            return 0
        self._fly(sequence, num_tokens, samples, flight)
        return num_tokens

    def _admit(self, budget: int, plan: StepPlan, flight: Flight) -> None:
        """Bring in waiting sequences in order. A gated one is passed over; one that does not fit stops the queue, so
        that the large are not starved by the small."""
        for sequence in [waiting for waiting in self.waiting if not waiting.gates]:
            if not self.free_rows or budget <= 0:
                return
            assert not sequence.in_flight, "commit lags plan by more than one step"
            hits = self._match(sequence)
            cached = len(hits) * self.pool.block_size
            num_tokens, samples = self._portion(len(sequence.tokens) - cached, budget)
            # Room for all known tokens, though it takes one chunk now; and for each running row a block, soon.
            full = self.pool.blocks_for(len(sequence.tokens) + self.config.lookahead)
            if num_tokens == 0 or self.pool.cost(hits, full) + len(self.running) > self.pool.num_free:
                return
            self.pool.share(hits)
            fresh = self.pool.take(self.pool.blocks_for(cached + num_tokens) - len(hits))
            self._enter_row(sequence, hits + fresh, cached)
            sequence.published = len(hits)
            plan.opens.append(
                RowOpen(
                    row=_row(sequence),
                    tokens=tuple(sequence.tokens),
                    prompt_length=len(sequence.request.prompt),
                    blocks=tuple(sequence.blocks),
                    computed=cached,
                    sampling=sequence.request.sampling,
                    seed=sequence.seed,
                    stop_ids=sequence.request.stop_ids,
                )
            )
            self._fly(sequence, num_tokens, samples, flight)
            budget -= num_tokens

    def _match(self, sequence: Sequence) -> list[int]:
        if not self.config.prefix_caching:
            return []
        self.pool.chain(sequence.keys, sequence.tokens, sequence.request.cache_salt)
        whole = (len(sequence.tokens) - 1) // self.pool.block_size  # the last token is always computed
        return self.pool.match(sequence.keys[:whole])

    def _enter_row(self, sequence: Sequence, blocks: list[int], cached: int) -> None:
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)
        sequence.state = State.RUNNING
        sequence.row = heapq.heappop(self.free_rows)
        sequence.blocks = blocks
        sequence.planned = cached
        if not sequence.preemptions:  # a resumption finds its own KV: no merit of the prefix cache
            sequence.cached = cached
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += cached

    def _portion(self, pending: int, budget: int) -> tuple[int, bool]:
        """How many tokens to compute now, drafts included, and whether a sample follows."""
        if pending + self.config.lookahead <= budget:
            return pending + self.config.lookahead, True
        return max(min(pending - 1, budget), 0), False

    def _fly(self, sequence: Sequence, num_tokens: int, samples: bool, flight: Flight) -> None:
        flight.append((sequence, SeqWork(_row(sequence), sequence.planned, num_tokens, samples)))
        sequence.planned += num_tokens - self.config.lookahead * samples
        sequence.in_flight += samples

    def _grow(self, sequence: Sequence, length: int, plan: StepPlan) -> bool:
        """Give `sequence` blocks for `length` tokens, preempting the last in order while the pool is dry; those have
        no work in this plan yet. False: it had to preempt itself."""
        need = self.pool.blocks_for(length) - len(sequence.blocks)
        while need > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        if need > 0:
            new = self.pool.take(need)
            sequence.blocks += new
            plan.grows.append((_row(sequence), tuple(new)))
        return True

    # ---- parts of commit

    def _append(self, sequence: Sequence, sampled: tuple[int, ...]) -> int:
        """Keep sampled tokens up to the one that ends the sequence, and note why it ends. Returns how many."""
        for i, token in enumerate(sampled):
            if token == FAILED_SAMPLE:
                sequence.finish = FinishReason.ERROR
                return i
            sequence.tokens.append(token)
            if token in sequence.request.stop_ids:
                sequence.finish = FinishReason.STOP
            elif sequence.generated >= sequence.request.max_tokens:
                sequence.finish = FinishReason.LENGTH
            if sequence.finish is not None:
                return i + 1
        return len(sampled)

    def _publish(self, sequence: Sequence, computed: int) -> None:
        """Offer whole blocks of known tokens whose KV a committed step has computed."""
        if not self.config.prefix_caching:
            return
        self.pool.chain(sequence.keys, sequence.tokens, sequence.request.cache_salt)
        first, last = sequence.published, min(computed // self.pool.block_size, len(sequence.keys))
        if last > first:
            self.pool.publish(sequence.blocks[first:last], sequence.keys[first:last])
            sequence.published = last

    # ---- leaving

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish = reason
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave_row(sequence)
        sequence.state = State.FINISHED

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting: tokens stay, KV goes, and the prefix cache may still have most of it."""
        self._leave_row(sequence)
        sequence.state = State.WAITING
        sequence.preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def _leave_row(self, sequence: Sequence) -> None:
        row = _row(sequence)
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.planned, sequence.row = [], 0, None
        self._closes.append(row)
        heapq.heappush(self.free_rows, row)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None, "no row"
    return sequence.row
