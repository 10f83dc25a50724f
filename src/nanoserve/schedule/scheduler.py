"""Scheduler: which tokens are computed next, and in whose blocks. It knows no tensors, no text and no clock.

There is one kind of work: compute tokens [start, start + count) of a sequence, and sample where the last known token
is among them. A first prefill, a chunk of one, a decode, drafts to verify and a resumption after a preemption differ
in start and count alone.

The books it keeps of a sequence, in tokens, always in this order:

    published blocks <= planned <= known = len(tokens) + in_flight <= prompt + max_tokens

`plan` may run ahead of `commit`: a sample that is on its way counts as a known token, which the device has and the
host has not. The device computes steps in the order of their numbers. So a block that is released while a step
that still reads or writes it is on its way may be given away at once: only a later step can be told of its new owner.

Other parts reach in through three neutral hooks: gates (reasons not to start a sequence yet), holds (keep its blocks
after the end) and lookahead (room for drafts).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from nanoserve.core.errors import ConfigError, ContextLengthError, RequestError
from nanoserve.core.plan import RowOpen, SeqWork, StepPlan, StepResult, TokenLogprobs
from nanoserve.core.request import FinishReason, Request, Sequence, State
from nanoserve.schedule.blocks import BlockPool

News = tuple[Sequence, tuple[int, ...], tuple[TokenLogprobs, ...]]

ORDER = attrgetter("order")


@dataclass(frozen=True)
class SchedulerConfig:
    max_rows: int  # sequences that run at the same time
    max_step_tokens: int  # tokens computed in one step
    max_len: int  # prompt and output of one sequence, in tokens
    lookahead: int = 0  # drafts that may follow a row's last known token
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_rows * (1 + self.lookahead):
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_step_tokens} must let every one of --max-num-seqs {self.max_rows} "
                f"decode in one step: at least {self.max_rows * (1 + self.lookahead)}"
            )


@dataclass(slots=True)
class _Flight:
    """A step that is being planned, or is on its way."""

    plan: StepPlan
    budget: int  # tokens left
    owners: list[tuple[Sequence, int]] = field(default_factory=list)  # beside plan.work; with `preemptions` of then


class Scheduler:
    """The only writer of its sequences. `plan` and `commit` alternate; `plan` may be called again before the commit of
    the step before, or of several, except with lookahead: whether drafts held is known to the host alone."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool):
        self.config = config
        self.pool = pool
        self.running: list[Sequence] = []  # in order
        self.waiting: set[Sequence] = set()
        self.num_preemptions = 0
        self.prefix_queries = 0  # prompt tokens of sequences, looked up when first admitted; resumptions do not count
        self.prefix_hits = 0  # those of them that were found
        self._ready: list[Sequence] = []  # in order: the waiting that no gate keeps
        self._holds: set[Sequence] = set()
        self._rows = list(range(config.max_rows))  # a heap of free rows
        self._closes: list[int] = []  # rows to close in the next step
        self._flights: deque[_Flight] = deque()
        self._arrivals = 0
        self._steps = 0
        self._hashed: Sequence | None = None  # the last one whose prompt was hashed

    # ---- the door

    def add(self, request: Request, index: int, seed: int, gates: frozenset[str] = frozenset()) -> Sequence:
        """Queue one continuation. Raises RequestError where it can never be served here, whatever else ends."""
        self._check(request)
        sequence = Sequence(
            request=request,
            index=index,
            seed=seed,
            order=(request.priority, self._arrivals),
            tokens=list(request.prompt),
            gates=set(gates),
        )
        self._arrivals += 1
        self._enqueue(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """At any time, also with steps of it on their way: what they sample is dropped. It is no news of `commit`."""
        if sequence.state is not State.FINISHED:
            self._end(sequence, FinishReason.ABORT)

    def open_gate(self, sequence: Sequence, gate: str) -> None:
        if gate in sequence.gates:
            sequence.gates.remove(gate)
            if not sequence.gates and sequence.state is State.WAITING:
                insort(self._ready, sequence, key=ORDER)

    def hold(self, sequence: Sequence) -> None:
        """Let it keep its blocks when it ends by itself, until `release_hold`. One that is preempted when its last
        token arrives has none to keep, and ends with `blocks` empty."""
        assert sequence.state is not State.FINISHED
        self._holds.add(sequence)

    def release_hold(self, sequence: Sequence) -> None:
        self._holds.discard(sequence)
        if sequence.state is State.FINISHED:
            self.pool.release(sequence.blocks)
            sequence.blocks = []

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    def _check(self, request: Request) -> None:
        prompt, wanted = len(request.prompt), request.max_tokens
        if not prompt:
            raise RequestError("the prompt has no tokens", param="prompt", code="invalid_value")
        if wanted < 1:
            raise RequestError(f"max_tokens must be at least 1, not {wanted}", param="max_tokens", code="invalid_value")
        if prompt + wanted > self.config.max_len:
            raise ContextLengthError(
                f"The context length is {self.config.max_len} tokens. The prompt has {prompt} tokens and {wanted} "
                f"were requested: {prompt + wanted} in all.",
                param="max_tokens" if prompt < self.config.max_len else "prompt",
            )
        # The last token is never computed, so its KV needs no room.
        capacity = self.pool.num_blocks * self.pool.block_size
        if prompt + wanted - 1 > capacity:
            fits = capacity + 1 - prompt
            advice = f"max_tokens {fits} would fit" if fits > 0 else f"a prompt of {capacity} tokens would fit"
            raise ContextLengthError(
                f"The prompt has {prompt} tokens and {wanted} were requested, which needs a KV cache of "
                f"{prompt + wanted - 1} tokens; this one holds {capacity} ({self.pool.num_blocks} blocks of "
                f"{self.pool.block_size}). With this engine, {advice}.",
                param="max_tokens" if fits > 0 else "prompt",
            )

    # ---- one step

    def plan(self) -> StepPlan | None:
        """The next step, or None where nothing can be computed now.

        Running sequences go first, in order. What the decodes among them need is kept back, so that a long prompt
        in front of them never stalls them; what is left goes to prompts, in chunks if need be, then to newcomers.
        Whoever finds no free block preempts the last in order, which is itself at the latest: nobody preempts a
        sequence before it in order, so the first always gets on.
        """
        assert not (self._flights and self.config.lookahead), "drafts: commit a step before the next is planned"
        flight = _Flight(StepPlan(self._steps, self._closes), self.config.max_step_tokens)
        pending = [len(s.tokens) + s.in_flight - s.planned for s in self.running]
        share = 1 + self.config.lookahead
        kept_back = share * pending.count(1)
        for sequence, tokens in zip(self.running, pending, strict=False):  # preemption shortens `running` at its end
            if tokens == 1:
                kept_back -= share
            count, samples = self._portion(sequence, tokens, flight.budget - kept_back)
            if count and self._grow(sequence, sequence.planned + count, flight.plan):
                self._launch(sequence, count, samples, flight)
        self._admit(flight)
        if not flight.owners:
            return None
        self._closes = []
        self._steps += 1
        self._flights.append(flight)
        return flight.plan

    def commit(self, result: StepResult) -> list[News]:
        """Take in what the oldest step on its way has sampled. Returns the sequences that sampled, in the plan's order,
        each with the tokens that it keeps and their logprobs; `finish` is set where it ended."""
        flight = self._land(result.number)
        size, caching = self.pool.block_size, self.config.prefix_caching
        news = []
        for (sequence, preemptions), (_, start, count, samples), sampled, logprobs in zip(
            flight.owners, flight.plan.work, result.sampled, result.logprobs, strict=True
        ):
            sequence.in_flight -= samples
            if sequence.finish is not None:  # by an abort, or by the step before
                continue
            computed = start + count
            if samples:
                kept = self._append(sequence, sampled)
                news.append((sequence, kept, logprobs[: len(kept)]))
                computed = len(sequence.tokens) - 1  # the last token was sampled, and no more; drafts that held count
            if sequence.preemptions == preemptions:  # otherwise its blocks are no longer those of the step
                if samples and self.config.lookahead:
                    sequence.planned = computed
                if caching and computed >= (sequence.published + 1) * size:
                    self._publish(sequence, computed // size)
            if sequence.finish is not None:
                self._end(sequence, sequence.finish)
        return news

    def fail(self, number: int) -> list[Sequence]:
        """The oldest step on its way, `number`, could not be computed: its sequences end with an error.
        Returns those that had not ended before."""
        flight = self._land(number)
        ended = []
        for (sequence, _), work in zip(flight.owners, flight.plan.work, strict=True):
            sequence.in_flight -= work.samples
            if sequence.finish is None:
                self._end(sequence, FinishReason.ERROR)
                ended.append(sequence)
        return ended

    # ---- parts of plan

    def _portion(self, sequence: Sequence, pending: int, budget: int) -> tuple[int, bool]:
        """How many of a sequence's `pending` tokens to compute now, and whether a sample follows. Where one does, the
        count includes drafts, never more than can be kept: no position lies past the last token but one."""
        request = sequence.request
        remaining = len(request.prompt) + request.max_tokens - len(sequence.tokens) - sequence.in_flight
        if remaining <= 0:
            return 0, False  # the samples on their way are its last
        count = pending
        if self.config.lookahead:
            count += min(self.config.lookahead, remaining - 1)
        if count <= budget:
            return count, True
        return max(min(pending - 1, budget), 0), False

    def _grow(self, sequence: Sequence, length: int, plan: StepPlan) -> bool:
        """See to blocks for `length` tokens. False: it had to preempt itself. Victims have no work in this step yet,
        since work is given out in order and they are taken from the end."""
        if length <= len(sequence.blocks) * self.pool.block_size:
            return True
        need = self.pool.blocks_for(length) - len(sequence.blocks)
        while need > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        blocks = self.pool.take(need)
        sequence.blocks += blocks
        assert sequence.row is not None
        plan.grows.append((sequence.row, tuple(blocks)))
        return True

    def _admit(self, flight: _Flight) -> None:
        """Start waiting sequences, in order. One that does not fit yet stops those behind it, so that small ones do
        not starve a large one. To start, there must be room for all tokens it has, though it may take a chunk's
        blocks alone now, and for a block more of each running row: else it would soon be preempted."""
        while self._ready and self._rows and flight.budget and self.pool.num_free > len(self.running):
            sequence = self._ready[0]
            if sequence.in_flight:  # preempted in a step not long ago; its last token is not known here yet
                return
            hits = self._match(sequence)
            cached = len(hits) * self.pool.block_size
            known = len(sequence.tokens)
            count, samples = self._portion(sequence, known - cached, flight.budget)
            whole = self.pool.blocks_for(max(known, cached + count))
            if not count or self.pool.cost(hits, whole) + len(self.running) > self.pool.num_free:
                return
            self._dequeue(sequence)
            if not sequence.preemptions:
                sequence.cached = cached
                self.prefix_queries += known
                self.prefix_hits += cached
            self.pool.share(hits)
            sequence.blocks = hits + self.pool.take(self.pool.blocks_for(cached + count) - len(hits))
            sequence.planned, sequence.published = cached, len(hits)
            sequence.state = State.RUNNING
            sequence.row = heappop(self._rows)
            insort(self.running, sequence, key=ORDER)
            flight.plan.opens.append(_opening(sequence, sequence.row))
            self._launch(sequence, count, samples, flight)

    def _match(self, sequence: Sequence) -> list[int]:
        """Blocks that contain its beginning already. At least one token is left to compute: its logits are needed."""
        if not self.config.prefix_caching:
            return []
        if not sequence.keys:  # keys are kept from try to try, and the continuations of one prompt share them
            if self._hashed is not None and self._hashed.request is sequence.request:
                sequence.keys = self._hashed.keys[: len(sequence.request.prompt) // self.pool.block_size]
            self._hashed = sequence
        self.pool.chain(sequence.keys, sequence.tokens, sequence.request.cache_salt)
        return self.pool.match(sequence.keys, (len(sequence.tokens) - 1) // self.pool.block_size)

    def _launch(self, sequence: Sequence, count: int, samples: bool, flight: _Flight) -> None:
        assert sequence.row is not None
        flight.plan.work.append(SeqWork(sequence.row, sequence.planned, count, samples))
        flight.owners.append((sequence, sequence.preemptions))
        flight.budget -= count
        if samples:
            sequence.planned = len(sequence.tokens) + sequence.in_flight  # without the drafts
            sequence.in_flight += 1
        else:
            sequence.planned += count

    # ---- parts of commit

    def _land(self, number: int) -> _Flight:
        flight = self._flights.popleft()
        assert flight.plan.number == number, f"step {number} ends before step {flight.plan.number}"
        return flight

    def _append(self, sequence: Sequence, sampled: tuple[int, ...]) -> tuple[int, ...]:
        """Keep tokens up to the one that ends the sequence, and note why it ends."""
        request, tokens = sequence.request, sequence.tokens
        longest = len(request.prompt) + request.max_tokens
        for i, token in enumerate(sampled):
            if token < 0:  # FAILED_SAMPLE
                sequence.finish = FinishReason.ERROR
                return sampled[:i]
            tokens.append(token)
            if token in request.stop_ids:
                sequence.finish = FinishReason.STOP
                return sampled[: i + 1]
            if len(tokens) == longest:
                sequence.finish = FinishReason.LENGTH
                return sampled[: i + 1]
        return sampled

    def _publish(self, sequence: Sequence, last: int) -> None:
        """Offer its first `last` blocks to others. A committed step has computed them: not before, since whoever
        matches a block reads it, perhaps in the very step that was to write it, or after that step failed."""
        self.pool.chain(sequence.keys, sequence.tokens, sequence.request.cache_salt)
        first, sequence.published = sequence.published, last
        self.pool.publish(sequence.blocks[first:last], sequence.keys[first:last])

    # ---- coming and going

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self.waiting.add(sequence)
        if not sequence.gates:
            insort(self._ready, sequence, key=ORDER)

    def _dequeue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        if not sequence.gates:
            _remove(self._ready, sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to waiting. Its tokens stay; its KV goes, though the prefix cache may still have most of it later."""
        self._leave_row(sequence)
        self._enqueue(sequence)
        sequence.preemptions += 1
        self.num_preemptions += 1

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            self._holds.discard(sequence)
        if sequence.state is State.WAITING:
            self._dequeue(sequence)
        else:
            if reason is FinishReason.ERROR:  # its KV may be the cause: nobody is to inherit it
                self.pool.withdraw(sequence.blocks)
            self._leave_row(sequence, keep_blocks=sequence in self._holds)
        sequence.state, sequence.finish = State.FINISHED, reason

    def _leave_row(self, sequence: Sequence, keep_blocks: bool = False) -> None:
        assert sequence.row is not None
        _remove(self.running, sequence)
        self._closes.append(sequence.row)
        heappush(self._rows, sequence.row)
        sequence.row = None
        if not keep_blocks:
            self.pool.release(sequence.blocks)
            sequence.blocks = []
        sequence.planned = sequence.published = 0


def _opening(sequence: Sequence, row: int) -> RowOpen:
    return RowOpen(
        row=row,
        tokens=tuple(sequence.tokens),
        prompt_length=len(sequence.request.prompt),
        blocks=tuple(sequence.blocks),
        computed=sequence.planned,
        sampling=sequence.request.sampling,
        seed=sequence.seed,
        stop_ids=sequence.request.stop_ids,
    )


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    """From a list in order; orders are unique."""
    position = bisect_left(sequences, sequence.order, key=ORDER)
    assert sequences[position] is sequence
    del sequences[position]
