"""Scheduler: what it promises, one promise a test. The fuzz looks for what nobody thought of."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from host.fake_device import FakeDevice, continuation
from nanoserve.core.errors import ConfigError, ContextLengthError, RequestError
from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import FAILED_SAMPLE, StepPlan, StepResult, TokenLogprobs
from nanoserve.core.request import FinishReason, Request, Sequence, State
from nanoserve.schedule import blocks as blocks_module
from nanoserve.schedule.audit import audit
from nanoserve.schedule.blocks import BlockPool
from nanoserve.schedule.scheduler import Scheduler, SchedulerConfig

VOCAB = 50


class World:
    """A scheduler, a fake device, and what the sequences were told."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **config: Any):
        defaults = {"max_rows": 4, "max_step_tokens": 64, "max_len": 128}
        self.scheduler = Scheduler(SchedulerConfig(**(defaults | config)), BlockPool(num_blocks, block_size))
        self.device = FakeDevice(num_blocks, block_size, VOCAB, Random(0), lookahead=self.scheduler.config.lookahead)
        self.told: dict[Sequence, list[int]] = {}
        self.plans: list[StepPlan] = []
        self.ahead: deque[StepResult] = deque()  # computed, not yet committed

    def add(self, prompt: Iterable[int], max_tokens: int = 8, index: int = 0, seed: int = 0,
            gates: Iterable[str] = (), **fields: Any) -> Sequence:  # fmt: skip
        fields.setdefault("sampling", SamplingParams())
        request = Request(id=f"r{len(self.told)}", prompt=tuple(prompt), max_tokens=max_tokens, **fields)
        sequence = self.scheduler.add(request, index, seed, frozenset(gates))
        self.told[sequence] = []
        return sequence

    def launch(self) -> bool:
        """Plan a step and compute it. False: there was nothing to plan."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self.plans.append(plan)
        result = self.device.run(
            plan, {s.row: s.request.cache_salt for s in self.scheduler.running if s.row is not None}
        )
        assert result is not None
        self.ahead.append(result)
        return True

    def land(self) -> None:
        for sequence, tokens, _ in self.scheduler.commit(self.ahead.popleft()):
            self.told[sequence] += tokens
        audit(self.scheduler)

    def step(self, count: int = 1) -> StepPlan:
        for _ in range(count):
            assert self.launch()
            self.land()
        return self.plans[-1]

    def drain(self, depth: int = 0) -> None:
        """Run until nothing is left to do, `depth` steps ahead."""
        for _ in range(1000):
            planned = self.launch()
            if not planned and not self.ahead:
                break
            while len(self.ahead) > (depth if planned else 0):
                self.land()
        assert self.scheduler.idle, "livelock"
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks

    def is_right(self, sequence: Sequence) -> bool:
        return (self.told[sequence], sequence.finish) == continuation(sequence.request, sequence.seed, VOCAB)


def answer(plan: StepPlan, *tokens: int) -> StepResult:
    """Every row that samples gets `tokens`, each with its logprobs."""
    logprobs = tuple(TokenLogprobs(-float(i), (t,), (-float(i),)) for i, t in enumerate(tokens))
    return StepResult(
        plan.number,
        tuple(tokens if work.samples else () for work in plan.work),
        tuple(logprobs if work.samples else () for work in plan.work),
    )


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    return plan


# ---- the door


def test_A17_too_long_is_refused_with_the_real_numbers() -> None:
    world = World(max_len=64)
    for prompt, wanted in [(8, 60), (70, 1), (64, 1), (1, 10**12)]:
        with pytest.raises(ContextLengthError) as caught:
            world.add(range(prompt), wanted)
        assert caught.value.param == ("max_tokens" if prompt < 64 else "prompt")
        assert caught.value.code == "context_length_exceeded"
        for number in (64, prompt, wanted, prompt + wanted):
            assert str(number) in caught.value.message
    assert world.scheduler.idle
    exact = world.add(range(8), 56)
    world.drain()
    assert world.is_right(exact)
    assert len(world.told[exact]) == 56


@pytest.mark.parametrize(
    ("prompt", "wanted", "param"), [([], 1, "prompt"), ([1], 0, "max_tokens"), ([1], -5, "max_tokens")]
)
def test_nothing_to_do_is_refused(prompt: list[int], wanted: int, param: str) -> None:
    world = World()
    with pytest.raises(RequestError) as caught:
        world.add(prompt, wanted)
    assert caught.value.param == param


def test_A48_what_can_never_fit_is_refused_with_numbers_and_the_queue_goes_on() -> None:
    world = World(num_blocks=5, block_size=4, max_len=128)
    before = world.add(range(10))
    with pytest.raises(
        ContextLengthError, match=r"29 tokens; this one holds 20 \(5 blocks of 4\).*max_tokens 11 would fit"
    ):
        world.add(range(10), 20)
    with pytest.raises(ContextLengthError, match="a prompt of 20 tokens would fit"):
        world.add(range(30), 1)
    largest = world.add(range(10), 11)
    world.drain()
    assert world.is_right(before)
    assert world.is_right(largest)
    world.add(range(20), 1)
    world.drain()


def test_a_step_must_hold_a_decode_of_every_row() -> None:
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 7 .* --max-num-seqs 4 .*at least 8"):
        SchedulerConfig(max_rows=4, max_step_tokens=7, max_len=8, lookahead=1)


# ---- the order of work


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 36, 37, 64])
def test_A35_chunks_cover_the_prompt_once_and_sample_at_its_end_alone(chunk: int) -> None:
    world = World(block_size=16, max_rows=1, max_step_tokens=chunk)
    sequence = world.add(range(37), 3)
    world.drain()
    work = [work for plan in world.plans for work in plan.work]
    assert [w.start for w in work] == [sum(v.num_tokens for v in work[:i]) for i in range(len(work))]
    assert [w.samples for w in work] == [w.start + w.num_tokens >= 37 for w in work]
    assert all(w.num_tokens <= chunk for w in work)
    assert world.is_right(
        sequence
    )  # the device has checked that all before a chunk was written, and nothing is past it


def test_a_long_prompt_never_stalls_a_stream() -> None:
    world = World(max_step_tokens=8)
    streams = [world.add([i], 40) for i in range(2)]
    world.step()
    long = world.add(range(100), 4)
    while long.generated == 0:
        plan = world.step()
        assert [work.num_tokens for work in plan.work] in ([1, 1, 6], [1, 1, 4])
    assert all(stream.generated == 18 for stream in streams)


def test_a_decode_behind_a_long_prompt_gets_its_share() -> None:
    world = World(max_step_tokens=8)
    stream = world.add([1], 40, priority=1)
    world.step()
    first = world.add(range(100), 4)
    plan = world.step(2)
    assert world.scheduler.running == [first, stream]
    assert [work.num_tokens for work in plan.work] == [7, 1]


def test_what_decodes_leave_goes_to_running_prompts_in_order_then_to_newcomers() -> None:
    world = World(max_step_tokens=10)
    world.add([1, 2, 3], 30)
    world.step()
    world.add(range(12))
    world.add(range(20, 32))
    assert [work.num_tokens for work in world.step().work] == [1, 9]
    assert [work.num_tokens for work in world.step().work] == [1, 3, 6]


def test_blocks_come_with_the_chunk_that_needs_them() -> None:
    world = World(block_size=4, max_rows=1, max_step_tokens=6)
    sequence = world.add(range(13))
    for blocks in (2, 3, 4):
        world.step()
        assert len(sequence.blocks) == blocks


def test_smaller_priority_values_go_first_then_who_came_first() -> None:
    world = World(max_rows=1)
    order = [world.add([1, 2, 3], 1, priority=p) for p in (5, 0, -5, 0)]
    ends = []
    while not world.scheduler.idle:
        world.step()
        ends += [s for s in order if s.finish is not None and s not in ends]
    assert ends == [order[2], order[1], order[3], order[0]]


def test_the_small_do_not_starve_the_large() -> None:
    world = World(num_blocks=8, block_size=4, max_rows=4)
    first = world.add(range(4), 13)
    world.step()
    large = world.add(range(20, 48), 2)
    small = [world.add([i], 2) for i in range(20)]
    while large.state is State.WAITING:
        world.step()
        assert all(s.state is State.WAITING for s in small)
    world.drain()
    assert all(world.is_right(s) for s in (first, large, *small))


@pytest.mark.parametrize(("length", "starts"), [(6, True), (7, False)])
def test_nobody_starts_who_would_be_preempted_at_once(length: int, starts: bool) -> None:
    world = World(num_blocks=6, block_size=2)
    old = world.add([1, 2, 3], 9)
    world.step()  # 2 blocks of 6; one more is kept free for it
    newcomer = world.add(range(10, 10 + length), 2)
    world.step()
    assert (newcomer.state is State.RUNNING) == starts
    world.drain()
    assert world.is_right(old)
    assert world.is_right(newcomer)


# ---- preemption


@pytest.mark.parametrize("lookahead", [0, 2])
def test_A34_preempted_sequences_get_the_same_text_and_the_oldest_is_no_victim(lookahead: int) -> None:
    sampling = SamplingParams(min_tokens=10, logprobs=1, frequency_penalty=0.5)
    prompts = [range(10 * i, 10 * i + 12) for i in range(4)]

    def run(num_blocks: int) -> tuple[World, list[Sequence]]:
        world = World(num_blocks=num_blocks, block_size=4, lookahead=lookahead)
        sequences = [
            world.add(p, 24, seed=i, sampling=sampling, stop_ids=frozenset({7})) for i, p in enumerate(prompts)
        ]
        while not world.scheduler.idle:
            oldest = next(s for s in sequences if s.finish is None)
            had = oldest.generated
            world.step()
            assert not oldest.preemptions or oldest is not sequences[0]
            assert oldest.generated > had, "the oldest gets on in every step"
        return world, sequences

    tight, preempted = run(num_blocks=14)
    roomy, undisturbed = run(num_blocks=100)
    assert tight.scheduler.num_preemptions == sum(s.preemptions for s in preempted) > 0
    assert roomy.scheduler.num_preemptions == 0
    assert [tight.told[s] for s in preempted] == [roomy.told[s] for s in undisturbed]
    assert all(tight.is_right(s) for s in preempted)


def test_the_least_important_is_preempted_first() -> None:
    world = World(num_blocks=8, block_size=4)
    middle, last, first = (world.add([i] * 7, 20, priority=p) for i, p in enumerate((0, 1, -1)))
    while not world.scheduler.num_preemptions:
        world.step()
    assert (first.preemptions, middle.preemptions, last.preemptions) == (0, 0, 1)
    world.drain()
    assert all(world.is_right(s) for s in (first, middle, last))


def test_a_preempted_sequence_finds_its_own_kv_and_its_cached_count_stays() -> None:
    world = World(num_blocks=12, block_size=2)
    old, young = world.add([1, 2, 3], 16), world.add([4, 5, 6, 7, 8], 12)
    while not young.preemptions:
        world.step()
    known = len(young.tokens)
    world.scheduler.abort(old)
    opening = world.step().opens[0]
    assert opening.tokens[:5] == (4, 5, 6, 7, 8)
    assert len(opening.tokens) == known
    assert opening.prompt_length == 5
    assert opening.computed >= known - 2
    assert young.cached == 0
    assert (world.scheduler.prefix_queries, world.scheduler.prefix_hits) == (8, 0)
    world.drain()
    assert world.is_right(young)


# ---- the prefix cache


def test_a_prompt_found_whole_still_computes_its_last_token() -> None:
    world = World(block_size=4)
    sequences = [world.add(range(16), 2)]
    world.drain()
    for _ in range(2):
        sequences.append(world.add(range(16), 2))
        world.drain()
    assert [s.cached for s in sequences] == [0, 12, 12]
    assert [plan.opens[0].computed for plan in world.plans if plan.opens] == [0, 12, 12]
    assert (world.scheduler.prefix_queries, world.scheduler.prefix_hits) == (48, 24)
    assert all(world.is_right(s) for s in sequences)


def test_A37_a_block_is_found_only_once_its_kv_is_computed() -> None:
    world = World(block_size=4, max_step_tokens=8)
    first, second = world.add(range(12), 4), world.add(range(12), 4)
    world.launch()
    assert [work.num_tokens for work in world.plans[-1].work] == [8]
    world.scheduler.abort(first)  # while its chunk is on its way: nothing of it was published, nor will be
    world.land()
    assert world.step().opens[0].computed == 0
    world.drain()
    third = world.add(range(12), 4)
    assert world.step().opens[0].computed == 8
    world.drain()
    assert first.finish is FinishReason.ABORT
    assert all(world.is_right(s) for s in (second, third))


def test_A37_two_equal_prompts_in_one_step_share_nothing_unwritten() -> None:
    world = World(block_size=4)
    pair = [world.add(range(12), 4) for _ in range(2)]
    assert [opening.computed for opening in world.step().opens] == [0, 0]
    world.drain()
    assert all(world.is_right(s) for s in pair)


def test_A37_nothing_is_found_of_a_step_that_is_still_on_its_way() -> None:
    world = World(block_size=4, max_step_tokens=48)
    first = world.add(range(12), 3)
    world.launch()
    second = world.add(range(12), 3)
    world.launch()
    world.land()
    third = world.add(range(12), 3)
    world.drain()
    assert [s.cached for s in (first, second, third)] == [0, 0, 8]
    assert all(world.is_right(s) for s in (first, second, third))


@pytest.mark.parametrize(("steps", "in_flight", "found"), [(0, False, 0), (0, True, 0), (1, False, 4), (3, False, 8)])
def test_A37_the_first_of_two_equal_prompts_is_aborted(steps: int, in_flight: bool, found: int) -> None:
    """Before, during or after its prefill: the second finds what was computed, and no more."""
    world = World(block_size=4, max_step_tokens=5)
    first, second = world.add(range(12), 3), world.add(range(12), 3)
    for _ in range(steps):
        world.step()
    if in_flight:
        world.launch()
    world.scheduler.abort(first)
    world.drain()
    third = world.add(range(12), 3)
    world.drain()
    assert (second.cached, third.cached) == (found, 8)
    assert world.is_right(second)
    assert world.is_right(third)


def test_A37_nothing_is_found_of_a_failed_step() -> None:
    world = World(block_size=4)
    first = world.add(range(12), 3)
    world.launch()
    world.ahead.clear()
    world.device.kv = [-1] * len(world.device.kv)
    assert world.scheduler.fail(0) == [first]
    second = world.add(range(12), 3)
    world.drain()
    assert second.cached == 0
    assert world.is_right(second)


def test_A37_an_evicted_block_is_not_found() -> None:
    world = World(num_blocks=4, block_size=4, max_len=16)
    world.add(range(12), 4)
    world.drain()
    other = world.add(range(20, 33), 3)  # takes every block
    world.drain()
    again = world.add(range(12), 4)
    world.drain()
    assert again.cached == 0
    assert world.is_right(other)
    assert world.is_right(again)


def test_A36_A38_salts_share_nothing_and_equal_salts_do() -> None:
    world = World(block_size=4)
    cached = []
    for salt in ("a", "b", "", "a", "b", ""):
        sequence = world.add(range(12), 2, cache_salt=salt)
        world.drain()
        assert world.is_right(sequence)
        cached.append(sequence.cached)
    assert cached == [0, 0, 0, 8, 8, 8]


def test_generated_text_is_found_by_the_next_turn() -> None:
    world = World(block_size=4)
    turn = world.add(range(6), 8)
    world.drain()
    following = world.add([*turn.tokens, 1, 2], 2)
    world.drain()
    assert following.cached == 12  # of 14 tokens; the KV of the last one was never computed
    assert world.is_right(following)


def test_without_prefix_caching_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(blocks_module, "blake2b")
    world = World(prefix_caching=False)
    sequences = [world.add(range(16), 9) for _ in range(2)]
    world.drain()
    assert [s.cached for s in sequences] == [0, 0]
    assert world.is_right(sequences[1])


def test_waiting_costs_no_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the first in the queue, which is looked at in every step, nor for those behind it."""
    hashed = []
    blake2b = blocks_module.blake2b
    monkeypatch.setattr(blocks_module, "blake2b", lambda data, **kw: hashed.append(data) or blake2b(data, **kw))
    world = World(num_blocks=16, block_size=4, max_rows=2)
    world.add([1], 60)
    world.step(24)
    hashed.clear()
    waiting = [world.add(range(i, i + 40), 2) for i in range(20)]
    world.step(20)
    assert all(s.state is State.WAITING for s in waiting)
    assert [len(s.keys) for s in waiting] == [10] + [0] * 19
    assert len(hashed) == 11 + 5  # the salt and 10 blocks once; 5 blocks that the running one filled


def test_the_prompt_of_n_continuations_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    blake2b = blocks_module.blake2b
    monkeypatch.setattr(blocks_module, "blake2b", lambda data, **kw: hashed.append(data) or blake2b(data, **kw))
    scheduler = World(num_blocks=200, max_rows=8, max_step_tokens=1000).scheduler
    request = Request(id="n", prompt=tuple(range(40)), sampling=SamplingParams(n=8), max_tokens=2)
    sequences = [scheduler.add(request, index, index) for index in range(8)]
    planned(scheduler)
    assert len(hashed) == 11  # the salt and ten blocks
    assert len({tuple(s.keys) for s in sequences}) == 1
    assert len({id(s.keys) for s in sequences}) == 8


def test_continuations_share_the_blocks_of_their_prompt() -> None:
    world = World(num_blocks=8, block_size=4)
    request = Request(id="n", prompt=tuple(range(13)), sampling=SamplingParams(n=3), max_tokens=3)
    first, *others = (world.scheduler.add(request, i, i, frozenset(["sibling"] if i else [])) for i in range(3))
    world.told |= {s: [] for s in (first, *others)}
    world.step()
    for sequence in others:
        world.scheduler.open_gate(sequence, "sibling")
    assert [work.num_tokens for work in world.step().work] == [1, 1, 1]
    assert first.blocks[:3] == others[0].blocks[:3] == others[1].blocks[:3]
    assert world.scheduler.pool.num_free == 8 - 3 - 3
    world.drain()
    assert all(world.is_right(s) for s in (first, *others))
    assert len({tuple(s.tokens) for s in (first, *others)}) == 3


# ---- one step ahead, drafts


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_may_be_planned_before_the_last_one_is_known(depth: int) -> None:
    world = World(block_size=4)
    sequences = [world.add(range(i, i + 5), 9, stop_ids=frozenset({3, 11})) for i in range(6)]
    world.drain(depth)
    assert all(world.is_right(s) for s in sequences)
    assert all(work.start + work.num_tokens < 5 + 9 for plan in world.plans for work in plan.work)


def test_a_commit_leaves_the_new_blocks_of_a_sequence_alone_that_was_preempted_since() -> None:
    scheduler = Scheduler(SchedulerConfig(2, 6, 32), BlockPool(12, 2))
    old = scheduler.add(Request(id="old", prompt=(1, 2, 3), sampling=SamplingParams(), max_tokens=8), 0, 0)
    scheduler.commit(answer(planned(scheduler), 9))
    young = scheduler.add(
        Request(id="young", prompt=tuple(range(10, 22)), sampling=SamplingParams(), max_tokens=2), 0, 0
    )
    chunk = planned(scheduler)
    assert [work.num_tokens for work in chunk.work] == [1, 5]
    scheduler._preempt(young)
    again = planned(scheduler)
    assert young.state is State.RUNNING
    scheduler.commit(answer(chunk, 9))
    assert young.published == 0, "that step wrote to the blocks it had before"
    scheduler.commit(answer(again, 9))
    assert young.published == 2
    audit(scheduler)
    assert old.generated == 3


def test_drafts_wait_for_the_commit() -> None:
    world = World(lookahead=2)
    world.add([1, 2], 8)
    world.launch()
    with pytest.raises(AssertionError, match="commit"):
        world.scheduler.plan()


@pytest.mark.parametrize("lookahead", [1, 3, 5])
def test_A50_drafts_never_pass_the_last_token_and_their_kv_is_cached_only_where_they_held(lookahead: int) -> None:
    world = World(block_size=2, lookahead=lookahead, num_blocks=40)
    sequences = [world.add([i, 3, 5], 1 + 2 * i, stop_ids=frozenset({8 * i})) for i in range(6)]
    world.drain()
    again = [world.add(s.tokens, 4, cache_salt=s.request.cache_salt) for s in sequences]
    world.drain()
    assert all(world.is_right(s) for s in (*sequences, *again))
    assert any(s.cached > len(s.request.prompt) // 2 for s in again)
    assert len(world.plans) < sum(s.generated for s in (*sequences, *again))


# ---- ends


@pytest.mark.parametrize(
    ("sampled", "kept", "finish"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 9, 3), (1, 9), FinishReason.STOP),
        ((9, 1, 9), (9,), FinishReason.STOP),
        ((1, 2, FAILED_SAMPLE), (1, 2), FinishReason.ERROR),
        ((FAILED_SAMPLE,), (), FinishReason.ERROR),
        ((1, 2, 3, 4), (1, 2, 3, 4), FinishReason.LENGTH),
        ((1, 2, 3, 9), (1, 2, 3, 9), FinishReason.STOP),
    ],
)
def test_tokens_and_logprobs_are_cut_at_the_same_place(
    sampled: tuple[int, ...], kept: tuple[int, ...], finish: FinishReason | None
) -> None:
    scheduler = World(lookahead=3).scheduler
    request = Request(id="r", prompt=(5, 6), sampling=SamplingParams(logprobs=0), max_tokens=4, stop_ids=frozenset({9}))
    sequence = scheduler.add(request, 0, 0)
    ((told, tokens, logprobs),) = scheduler.commit(answer(planned(scheduler), *sampled))
    assert told is sequence
    assert tokens == kept
    assert tuple(p.top_ids[0] for p in logprobs) == kept
    assert sequence.tokens == [5, 6, *kept]
    assert sequence.finish is finish
    assert (sequence.state is State.FINISHED) == (finish is not None)
    audit(scheduler)


def test_a_row_that_asked_for_no_logprobs_has_none() -> None:
    scheduler = World().scheduler
    scheduler.add(Request(id="r", prompt=(5, 6), sampling=SamplingParams(), max_tokens=4), 0, 0)
    plan = planned(scheduler)
    assert scheduler.commit(StepResult(plan.number, ((1,),), ((),)))[0][1:] == ((1,), ())


def test_A44_nobody_inherits_the_kv_behind_a_failed_sample() -> None:
    world = World(block_size=4, max_step_tokens=8)
    bad = world.add(range(12), 4)
    world.step()
    scheduler = world.scheduler
    keys = bad.keys[:2]
    assert len(scheduler.pool.match(keys, 2)) == 2
    scheduler.commit(answer(planned(scheduler), FAILED_SAMPLE))
    assert bad.finish is FinishReason.ERROR
    assert bad.generated == 0
    assert scheduler.pool.match(keys, 2) == []
    assert scheduler.pool.num_free == 64


def test_a_failed_step_ends_its_own_sequences_alone() -> None:
    world = World(max_rows=2)
    struck, gone = world.add(range(5)), world.add(range(5, 11))
    waiting = world.add(range(20, 30))
    world.step()
    plan = planned(world.scheduler)
    world.scheduler.abort(gone)
    assert world.scheduler.fail(plan.number) == [struck]
    assert (struck.finish, gone.finish) == (FinishReason.ERROR, FinishReason.ABORT)
    audit(world.scheduler)
    world.device.rows.clear()  # the device learns of the closed rows with the next plan
    closed = planned(world.scheduler)
    assert sorted(closed.closes) == [0, 1]
    assert [opening.tokens[0] for opening in closed.opens] == [20]
    assert waiting.state is State.RUNNING


def test_a_failed_step_also_ends_those_that_were_preempted_meanwhile() -> None:
    scheduler = World(max_rows=2).scheduler
    sequence = scheduler.add(Request(id="r", prompt=(1, 2), sampling=SamplingParams(), max_tokens=4), 0, 0)
    plan = planned(scheduler)
    scheduler._preempt(sequence)
    assert scheduler.fail(plan.number) == [sequence]
    assert scheduler.idle
    assert scheduler.plan() is None
    audit(scheduler)


def test_steps_come_back_in_order() -> None:
    world = World()
    world.add([1, 2], 8)
    world.launch()
    world.launch()
    with pytest.raises(AssertionError, match="step 1 ends before step 0"):
        world.scheduler.commit(world.ahead[1])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("moment", range(10))
def test_A33_abort_at_any_time_frees_everything_and_is_no_news(moment: int, depth: int) -> None:
    world = World(num_blocks=16, block_size=2, max_step_tokens=6)
    kept, gone = world.add([1, 2, 3], 16), world.add(range(10, 20), 6)
    for _ in range(moment):
        world.launch()
        if len(world.ahead) > depth:
            world.land()
    told, ended = list(world.told[gone]), gone.finish
    world.scheduler.abort(gone)
    world.scheduler.abort(gone)
    audit(world.scheduler)
    newcomer = world.add(range(30, 40), 3)  # gets the freed blocks while the old step is on its way
    world.drain(depth)
    assert world.told[gone] == told
    assert gone.finish is (ended or FinishReason.ABORT)
    assert world.is_right(kept)
    assert world.is_right(newcomer)


def test_A33_abort_of_one_that_was_preempted() -> None:
    world = World(num_blocks=6, block_size=4)
    kept, gone = world.add(range(6), 14), world.add(range(10, 16), 12)
    while not gone.preemptions:
        world.step()
    told = list(world.told[gone])
    world.scheduler.abort(gone)
    audit(world.scheduler)
    world.drain()
    assert gone.finish is FinishReason.ABORT
    assert world.told[gone] == told
    assert world.is_right(kept)


def test_A05_each_stops_at_its_own_ids() -> None:
    world = World()
    a, _, b, *_ = tokens = continuation(world.add(range(4)).request, 0, VOCAB)[0]
    assert len({*tokens[:3]}) == 3
    stops = [{a, b}, {b}, {-1}]
    sequences = [world.add(range(4), stop_ids=frozenset(ids)) for ids in stops]
    world.drain()
    ends = [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert [(world.told[s], s.finish) for s in sequences] == list(
        zip([tokens[:1], tokens[:3], tokens], ends, strict=True)
    )


def test_a_row_is_opened_with_all_the_device_must_know_and_closed_in_the_next_step() -> None:
    world = World(block_size=4)
    sampling = SamplingParams(temperature=0.5, min_tokens=1)
    world.add(range(6), 1, sampling=sampling, stop_ids=frozenset({7}), seed=5)
    [opening] = world.step().opens
    assert (opening.row, opening.tokens, opening.prompt_length, opening.computed) == (0, tuple(range(6)), 6, 0)
    assert (opening.sampling, opening.seed, opening.stop_ids) == (sampling, 5, frozenset({7}))
    assert len(opening.blocks) == 2
    assert not world.launch(), "no step, so nothing tells the device yet"
    world.add(range(6), 1)
    world.step()
    assert [(plan.number, plan.closes) for plan in world.plans] == [(0, []), (1, [0])]


# ---- gates and holds


def test_gates_keep_a_sequence_waiting_and_others_pass() -> None:
    world = World()
    gated = world.add(range(5), 3, gates=["kv", "grammar"])
    other = world.add(range(5, 9), 3)
    world.step(3)
    assert other.finish is FinishReason.LENGTH
    assert world.scheduler.plan() is None
    assert not world.scheduler.idle
    world.scheduler.open_gate(gated, "kv")
    world.scheduler.open_gate(gated, "kv")
    world.scheduler.open_gate(gated, "unknown")
    assert world.scheduler.plan() is None
    world.scheduler.open_gate(gated, "grammar")
    world.scheduler.open_gate(gated, "grammar")
    world.drain()
    assert world.is_right(gated)


def test_a_gated_sequence_may_be_aborted_and_its_gate_opened_after() -> None:
    world = World()
    gated = world.add(range(5), 3, gates=["kv"])
    world.scheduler.abort(gated)
    world.scheduler.open_gate(gated, "kv")
    audit(world.scheduler)
    assert world.scheduler.idle
    assert world.scheduler.plan() is None


def test_a_hold_keeps_the_blocks_after_the_end() -> None:
    world = World(num_blocks=8, block_size=2, max_len=16)
    held = world.add([1, 2, 3], 3)
    world.scheduler.hold(held)
    world.step(3)
    assert held.finish is FinishReason.LENGTH
    assert world.scheduler.idle
    assert world.scheduler.pool.num_free == 5
    large = world.add(range(20, 32), 3)
    assert world.scheduler.plan() is None, "it waits for the held blocks"
    world.scheduler.release_hold(held)
    world.scheduler.release_hold(held)
    world.drain()
    assert world.is_right(large)


def test_a_hold_may_be_given_up_early_and_ends_with_an_abort() -> None:
    world = World()
    early, aborted = world.add([1, 2, 3], 3), world.add([4, 5, 6], 9)
    for sequence in (early, aborted):
        world.scheduler.hold(sequence)
    world.step()
    world.scheduler.release_hold(early)
    world.scheduler.abort(aborted)
    world.drain()
    world.scheduler.release_hold(aborted)
    assert world.is_right(early)
