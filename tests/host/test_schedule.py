"""Scheduler and BlockPool, one promise at a time. Texts come from the fake device, which checks the KV it reads."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from host.fake_device import FakeDevice, continuation
from nanoserve.core.errors import ConfigError, ContextLengthError, RequestError
from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import FAILED_SAMPLE, StepPlan, StepResult
from nanoserve.core.request import FinishReason, Request, Sequence, State
from nanoserve.schedule.audit import audit
from nanoserve.schedule.blocks import BlockPool
from nanoserve.schedule.scheduler import Scheduler, SchedulerConfig

VOCAB = 1000
GATE = frozenset({"gate"})
Work = tuple[Sequence, int, int, bool]  # start, count, samples


def prompt(length: int, first: int = 100) -> tuple[int, ...]:
    return tuple(range(first, first + length))


class Place:
    """A scheduler over a fake device. `plan` and `land` are halves of `step`."""

    def __init__(
        self, num_blocks: int = 16, block_size: int = 4, *, rows: int = 4, budget: int = 64, max_len: int = 1000,
        lookahead: int = 0, prefix_caching: bool = True,
    ):  # fmt: skip
        self.pool = BlockPool(num_blocks, block_size)
        config = SchedulerConfig(rows, budget, max_len, lookahead, prefix_caching)
        self.scheduler = Scheduler(config, self.pool)
        self.device = FakeDevice(num_blocks, block_size, VOCAB, Random(0), lookahead=lookahead)
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        self.added = 0

    def add(
        self, tokens: tuple[int, ...], max_tokens: int = 4, gates: frozenset[str] = frozenset(), **fields: Any
    ) -> Sequence:
        self.added += 1
        fields.setdefault("sampling", SamplingParams())
        request = Request(id=str(self.added), prompt=tokens, max_tokens=max_tokens, **fields)
        return self.scheduler.add(request, 0, self.added, gates)

    def plan(self) -> list[Work]:
        """Work of the next step, on its way from now on; none where nothing can be computed."""
        plan = self.scheduler.plan()
        audit(self.scheduler)
        if plan is None:
            return []
        owners = {sequence.row: sequence for sequence in self.scheduler.running}
        salts = {opening.row: owners[opening.row].request.cache_salt for opening in plan.opens}
        result = self.device.run(plan, salts)
        assert result is not None
        self.plans.append(plan)
        self.results.append(result)
        return [(owners[work.row], work.start, work.num_tokens, work.samples) for work in plan.work]

    def land(self) -> dict[Sequence, tuple[int, ...]]:
        """Commit the oldest step on its way. Returns the news."""
        news = self.scheduler.commit(self.results.pop(0))
        audit(self.scheduler)
        return {sequence: tokens for sequence, tokens, _ in news}

    def step(self) -> list[Work]:
        work = self.plan()
        if work:
            self.land()
        return work

    def finish(self) -> None:
        for _ in range(1000):
            if not self.step():
                break
        while self.results:
            self.land()
        assert self.scheduler.idle
        assert self.pool.num_free == self.pool.num_blocks, "blocks leaked"


def alone(sequence: Sequence) -> tuple[list[int], FinishReason]:
    return continuation(sequence.request, sequence.seed, VOCAB)


def assert_as_alone(*sequences: Sequence) -> None:
    for sequence in sequences:
        output = sequence.tokens[len(sequence.request.prompt) :]
        assert (output, sequence.finish) == alone(sequence)


# ---- the pool


def keys_of(pool: BlockPool, tokens: tuple[int, ...], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    pool.chain(keys, tokens, salt)
    return keys


def known(pool: BlockPool, tokens: tuple[int, ...], salt: str = "") -> int:
    return len(pool.match(keys_of(pool, tokens, salt), len(tokens)))


def fill(pool: BlockPool, tokens: tuple[int, ...], salt: str = "") -> list[int]:
    blocks = pool.take(pool.blocks_for(len(tokens)))
    keys = keys_of(pool, tokens, salt)
    pool.publish(blocks[: len(keys)], keys)
    return blocks


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert BlockPool(8, 4).blocks_for(tokens) == blocks


def test_a_block_is_free_when_its_last_holder_leaves() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.take(3)
    assert len(set(blocks)) == 3
    pool.share(blocks[:2])
    pool.release(blocks)
    assert pool.num_free == 2
    pool.release(blocks[:2])
    assert pool.num_free == 4


def test_the_pool_gives_no_more_than_it_has_and_takes_back_no_more_than_it_gave() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.take(4)
    with pytest.raises(AssertionError):
        pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks[:1])


def test_blocks_without_a_prefix_are_given_away_first_then_the_longest_free_and_tails_before_heads() -> None:
    pool = BlockPool(6, 2)
    old, new, bare = fill(pool, (1, 2, 3, 4)), fill(pool, (5, 6, 7, 8)), pool.take(2)
    for blocks in (old, new, bare):
        pool.release(blocks)
    assert set(pool.take(2)) == set(bare)
    assert pool.take(4) == [old[1], old[0], new[1], new[0]]


def test_a_block_that_is_shared_again_is_not_given_away() -> None:
    pool = BlockPool(3, 2)
    blocks = fill(pool, (1, 2, 3, 4))
    pool.release(blocks)
    pool.share(pool.match(keys_of(pool, (1, 2)), 1))
    assert blocks[0] not in pool.take(2)


def test_keys_name_whole_blocks_and_all_before_them() -> None:
    pool = BlockPool(8, 4)
    assert len(keys_of(pool, prompt(3))) == 0
    assert len(keys_of(pool, prompt(11))) == 2
    assert keys_of(pool, prompt(11)) == keys_of(pool, prompt(12))[:2]
    first, other = keys_of(pool, (1, 2, 3, 4, 9, 9, 9, 9)), keys_of(pool, (1, 2, 3, 5, 9, 9, 9, 9))
    assert not set(first) & set(other)
    growing: list[bytes] = []
    for length in range(13):
        pool.chain(growing, prompt(length), "")
    assert growing == keys_of(pool, prompt(12))


def test_A38_salts_part_keys_and_cannot_pretend_to_be_tokens() -> None:
    pool = BlockPool(8, 1)
    salts = ["", "a", "b", "aa", "\0", "\ud800", "é", "a\0\0\0"]
    first_keys = {keys_of(pool, (97, 97), salt)[0] for salt in salts}
    assert len(first_keys) == len(salts)
    # key(salt "", tokens (97, 97)) must not be key(salt "a...", tokens (97,)), nor the other way round
    assert len({key for salt in salts for key in keys_of(pool, (97, 97, 97), salt)}) == 3 * len(salts)


def test_match_finds_the_longest_known_prefix_up_to_a_limit() -> None:
    pool = BlockPool(8, 2)
    blocks = fill(pool, (1, 2, 3, 4, 5, 6))
    assert pool.match(keys_of(pool, (1, 2, 3, 4, 9, 9)), 3) == blocks[:2]
    assert pool.match(keys_of(pool, (1, 2, 3, 4, 5, 6)), 1) == blocks[:1]
    assert pool.match(keys_of(pool, (9, 9, 3, 4, 5, 6)), 3) == []


def test_a_hole_ends_a_match() -> None:
    pool = BlockPool(4, 2)
    blocks = fill(pool, (1, 2, 3, 4, 5, 6))
    pool.withdraw(blocks[1:2])
    assert pool.match(keys_of(pool, (1, 2, 3, 4, 5, 6)), 3) == blocks[:1]


def test_of_two_blocks_with_the_same_contents_the_first_is_found() -> None:
    pool = BlockPool(4, 2)
    first, second = fill(pool, (1, 2)), fill(pool, (1, 2))
    assert pool.match(keys_of(pool, (1, 2)), 1) == first
    pool.release(second)
    pool.take(3)  # the second is given away: the first is known still
    assert pool.match(keys_of(pool, (1, 2)), 1) == first


def test_A37_a_block_that_was_given_away_never_matches_what_it_contained() -> None:
    pool = BlockPool(2, 2)
    pool.release(fill(pool, (1, 2, 3, 4)))
    assert known(pool, (1, 2, 3, 4)) == 2
    pool.take(1)
    assert known(pool, (1, 2, 3, 4)) == 1
    pool.take(1)
    assert known(pool, (1, 2, 3, 4)) == 0


def test_cost_is_what_free_blocks_fall_by() -> None:
    pool = BlockPool(8, 2)
    held, free = fill(pool, (1, 2)), fill(pool, (3, 4))
    pool.release(free)
    for hits, total in (([], 3), (held, 3), (free, 3), (held + free, 4), (held, 1)):
        before, cost = pool.num_free, pool.cost(hits, total)
        pool.share(hits)
        fresh = pool.take(total - len(hits))
        assert before - pool.num_free == cost
        pool.release(fresh)
        pool.release(hits)


# ---- one budget


def test_every_row_must_be_able_to_decode_in_one_step() -> None:
    assert SchedulerConfig(4, 4, 10)
    assert SchedulerConfig(4, 8, 10, lookahead=1)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 7"):
        SchedulerConfig(4, 7, 10, lookahead=1)


@pytest.mark.parametrize("budget", [1, 5, 16, 17, 36, 37, 64])
def test_A35_a_prompt_comes_in_chunks_and_samples_after_the_last(budget: int) -> None:
    place = Place(num_blocks=4, block_size=16, rows=1, budget=budget)
    sequence = place.add(prompt(37), 2)
    start = 0
    while start < 37:
        [(_, first, count, samples)] = place.step()
        assert first == start
        assert samples == (start + count == 37)
        # all that the budget allows, but the last token is computed only where the sample is
        assert count == min(budget, 37 - start)
        start += count
        assert sequence.generated == samples
    place.finish()
    assert_as_alone(sequence)


def test_blocks_come_with_the_chunk_that_needs_them() -> None:
    place = Place(block_size=4, rows=1, budget=6)
    sequence = place.add(prompt(13))
    for blocks in (2, 3, 4):
        place.step()
        assert len(sequence.blocks) == blocks


@pytest.mark.parametrize("priority", [-1, 1])
def test_a_long_prompt_never_stalls_a_stream(priority: int) -> None:
    """Not one that stands before the streams either: what they need is kept back."""
    place = Place(num_blocks=64, rows=3, budget=8)
    streams = [place.add(prompt(3, first), 30) for first in (200, 300)]
    place.step()
    long = place.add(prompt(60), priority=priority)
    chunks = []
    while not long.generated:
        work = {sequence: count for sequence, _, count, _ in place.step()}
        assert [work[stream] for stream in streams] == [1, 1]
        chunks.append(work[long])
    assert chunks == [6] * 10
    place.finish()
    assert_as_alone(long, *streams)


def test_what_decodes_leave_goes_to_running_prompts_in_order_then_to_newcomers() -> None:
    place = Place(num_blocks=64, rows=4, budget=10)
    stream = place.add(prompt(3, 200), 30)
    place.step()
    first, second = place.add(prompt(12, 300)), place.add(prompt(12, 400))
    assert [(s, count) for s, _, count, _ in place.step()] == [(stream, 1), (first, 9)]
    assert [(s, count) for s, _, count, _ in place.step()] == [(stream, 1), (first, 3), (second, 6)]


def test_a_step_has_no_more_rows_than_there_are() -> None:
    place = Place(rows=2)
    sequences = [place.add(prompt(2, 100 * i), 2) for i in range(1, 5)]
    assert [s for s, *_ in place.step()] == sequences[:2]
    assert len(place.scheduler.waiting) == 2
    place.finish()
    assert_as_alone(*sequences)


# ---- who is admitted


def test_who_starts_needs_room_for_all_its_tokens_though_a_chunk_comes_first() -> None:
    place = Place(num_blocks=8, block_size=4, budget=4)
    place.add(prompt(16, 500), 8)
    for _ in range(4):
        place.step()
    late = place.add(prompt(16), 2)  # 4 blocks; 4 are free, and one of them the first may need soon
    place.step()
    assert late.state is State.WAITING
    place.finish()
    assert not place.scheduler.num_preemptions
    assert_as_alone(late)


def test_small_ones_do_not_overtake_a_large_one() -> None:
    place = Place(num_blocks=8, block_size=4)
    place.add(prompt(16, 500), 3)
    place.step()
    large, small = place.add(prompt(20)), place.add(prompt(1))
    while large.state is State.WAITING:
        place.step()
        assert small.state is State.WAITING or large.state is not State.WAITING
    place.finish()


def test_a_gated_one_is_passed_over_until_its_last_gate_opens() -> None:
    place = Place()
    gated, other = place.add(prompt(3), gates=frozenset({"a", "b"})), place.add(prompt(3, 200))
    assert [s for s, *_ in place.step()] == [other]
    for gate in ("b", "c"):
        place.scheduler.open_gate(gated, gate)
        place.step()
        assert gated.state is State.WAITING
    place.scheduler.open_gate(gated, "a")
    place.scheduler.open_gate(gated, "a")
    assert gated in [s for s, *_ in place.step()]
    place.finish()
    assert_as_alone(gated, other)


def test_nothing_to_compute_is_no_step() -> None:
    place = Place()
    assert place.scheduler.plan() is None
    place.add(prompt(3), gates=GATE)
    assert place.scheduler.plan() is None
    assert not place.scheduler.idle


def test_smaller_priority_goes_first_and_of_equals_the_earlier() -> None:
    place = Place(rows=1)
    late, first, second, early = (place.add(prompt(2), 1, priority=p) for p in (5, 0, 0, -5))
    order = []
    while work := place.step():
        order += [sequence for sequence, *_ in work]
    assert order == [early, first, second, late]


# ---- who is preempted


def contested() -> tuple[Place, list[Sequence]]:
    """KV for about one and a half of four greedy requests."""
    place = Place(num_blocks=9, block_size=4, rows=4)
    return place, [place.add(prompt(8, 100 * i), 20) for i in range(1, 5)]


def test_A34_the_oldest_is_never_the_victim_and_all_texts_are_as_alone() -> None:
    place, sequences = contested()
    ends: list[Sequence] = []
    while len(ends) < 4:
        oldest = next(sequence for sequence in sequences if sequence.state is not State.FINISHED)
        preemptions = oldest.preemptions
        assert oldest in [sequence for sequence, *_ in place.step()]
        assert oldest.preemptions == preemptions
        ends += [sequence for sequence in sequences if sequence.state is State.FINISHED and sequence not in ends]
    assert ends == sequences
    assert place.scheduler.num_preemptions > 0
    assert_as_alone(*sequences)


def test_A34_min_tokens_and_seed_survive_a_preemption() -> None:
    place = Place(num_blocks=6, block_size=4, rows=2)
    first = place.add(prompt(6), 16)
    odd = frozenset(range(1, VOCAB, 2))
    second = place.add(prompt(6, 300), 14, sampling=SamplingParams(min_tokens=10), stop_ids=odd)
    place.finish()
    assert second.preemptions > 0
    assert second.generated >= 10
    assert_as_alone(first, second)


def test_who_came_last_goes_first_and_a_higher_priority_stays() -> None:
    place = Place(num_blocks=6, block_size=4, rows=3)
    low = place.add(prompt(7), 12, priority=1)
    place.step()
    high = place.add(prompt(7, 300), 12)
    place.finish()
    assert low.preemptions > 0
    assert high.preemptions == 0
    assert_as_alone(low, high)


def test_a_resumption_computes_what_it_generated_and_finds_its_own_kv_again() -> None:
    place, sequences = contested()
    place.finish()
    reopened = [opening for plan in place.plans for opening in plan.opens if len(opening.tokens) > 8]
    assert reopened
    assert all(opening.prompt_length == 8 for opening in reopened)
    assert any(opening.computed > 0 for opening in reopened)
    assert all(s.cached == 0 for s in sequences)  # it is no merit of the cache, and no news to the caller
    assert place.scheduler.prefix_queries == 8 * 4
    assert place.scheduler.prefix_hits == 0


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    place, _ = contested()
    preemptions = 0
    while place.step():
        if place.scheduler.num_preemptions > preemptions:
            assert not place.plans[-1].opens
            preemptions = place.scheduler.num_preemptions


# ---- the prefix cache


def test_an_equal_prompt_is_found_but_for_its_last_token() -> None:
    place = Place(block_size=4)
    place.add(prompt(12), 1)
    place.finish()
    again = place.add(prompt(12), 1)
    assert place.step() == [(again, 8, 4, True)]
    assert again.cached == 8
    longer = place.add(prompt(13), 1)
    assert place.step() == [(longer, 12, 1, True)]
    assert longer.cached == 12
    assert (place.scheduler.prefix_queries, place.scheduler.prefix_hits) == (12 + 12 + 13, 20)
    assert_as_alone(again, longer)


def test_what_was_generated_is_found_by_the_next_turn_of_a_chat() -> None:
    place = Place(block_size=4)
    first = place.add(prompt(6), 8)
    place.finish()
    second = place.add((*first.tokens, 1, 2, 3), 2)
    place.finish()
    assert second.cached == 12  # 13 of the first one's 14 tokens were computed
    assert_as_alone(first, second)


def test_A36_A38_another_salt_shares_nothing() -> None:
    place = Place(num_blocks=64, block_size=4)
    cached = []
    for salt in ("a", "b", "", "a", "b", "", "ab", "\ud800"):
        sequence = place.add(prompt(12), 2, cache_salt=salt)
        place.finish()
        cached.append(sequence.cached)
        assert_as_alone(sequence)
    assert cached == [0, 0, 0, 8, 8, 8, 0, 0]


def test_A37_a_block_is_found_only_once_it_is_computed() -> None:
    place = Place(block_size=4)
    first, second = place.add(prompt(12), 3), place.add(prompt(12), 3)
    assert [(s, start) for s, start, *_ in place.plan()] == [(first, 0), (second, 0)]
    third = place.add(prompt(12), 3)
    assert (third, 0, 12, True) in place.plan()  # the step that computes the first two is still on its way
    place.land()
    fourth = place.add(prompt(12), 3)
    place.plan()
    assert [s.cached for s in (first, second, third, fourth)] == [0, 0, 0, 8]
    place.land()
    place.land()
    place.finish()
    assert_as_alone(first, second, third, fourth)


@pytest.mark.parametrize("when", ["before", "during", "in flight", "after"])
def test_A37_the_first_of_two_equal_prompts_is_aborted(when: str) -> None:
    place = Place(block_size=4, budget=5)
    first, second = place.add(prompt(12), 3), place.add(prompt(12), 3)
    if when == "in flight":
        place.plan()
    elif when != "before":
        for _ in range(1 if when == "during" else 3):
            place.step()
    place.scheduler.abort(first)
    place.finish()
    third = place.add(prompt(12), 3)
    place.finish()
    assert third.cached == 8
    assert second.cached == {"before": 0, "during": 4, "in flight": 0, "after": 8}[when]
    assert_as_alone(second, third)


def test_A37_what_a_failed_step_was_to_compute_is_not_found() -> None:
    place = Place(block_size=4)
    first = place.add(prompt(12), 3)
    place.plan()
    place.results.clear()
    place.device.kv = [-1] * len(place.device.kv)
    assert place.scheduler.fail(0) == [first]
    assert first.finish is FinishReason.ERROR
    second = place.add(prompt(12), 3)
    place.finish()
    assert second.cached == 0
    assert_as_alone(second)


def test_a_cache_that_is_off_finds_nothing() -> None:
    place = Place(prefix_caching=False)
    for _ in range(2):
        sequence = place.add(prompt(12), 2)
        place.finish()
        assert sequence.cached == 0
        assert_as_alone(sequence)
    assert place.scheduler.prefix_queries >= place.scheduler.prefix_hits == 0


def test_continuations_of_one_prompt_share_its_blocks() -> None:
    place = Place(num_blocks=8, block_size=4)
    request = Request(id="r", prompt=prompt(13), sampling=SamplingParams(n=3), max_tokens=3)
    first, *others = (place.scheduler.add(request, i, i, GATE if i else frozenset()) for i in range(3))
    place.step()
    for sequence in others:
        place.scheduler.open_gate(sequence, "gate")
    assert [count for _, _, count, _ in place.step()] == [1, 1, 1]
    assert first.blocks[:3] == others[0].blocks[:3] == others[1].blocks[:3]
    assert place.pool.num_free == 8 - 3 - 3
    place.finish()
    assert_as_alone(first, *others)
    assert len({tuple(s.tokens) for s in (first, *others)}) == 3


# ---- the door


def test_A48_what_can_never_fit_is_refused_with_numbers_and_the_queue_goes_on() -> None:
    place = Place(num_blocks=4, block_size=4)
    running = place.add(prompt(3), 3)
    place.step()
    waiting = place.add(prompt(4, 200), 3)
    with pytest.raises(ContextLengthError) as caught:
        place.add(prompt(10), 8)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "context_length_exceeded"
    assert all(number in caught.value.message for number in ("10", "8", "17", "16", "4 blocks of 4", "max_tokens 7"))
    with pytest.raises(ContextLengthError) as caught:
        place.add(prompt(17), 1)
    assert caught.value.param == "prompt"
    place.finish()
    assert_as_alone(running, waiting)


def test_A48_what_fits_to_the_last_slot_is_served() -> None:
    place = Place(num_blocks=4, block_size=4)
    sequences = [place.add(prompt(10), 7), place.add(prompt(16), 1), place.add(prompt(1), 16)]
    place.finish()
    assert_as_alone(*sequences)


def test_A17_longer_than_the_context_is_refused_with_the_real_limit() -> None:
    place = Place(num_blocks=64, max_len=20)
    for tokens, max_tokens, param in ((15, 6, "max_tokens"), (20, 1, "prompt"), (30, 1, "prompt")):
        with pytest.raises(ContextLengthError) as caught:
            place.add(prompt(tokens), max_tokens)
        assert caught.value.param == param
        assert all(str(n) in caught.value.message for n in (20, tokens, max_tokens, tokens + max_tokens))
    assert place.add(prompt(15), 5)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "param"), [(0, 1, "prompt"), (1, 0, "max_tokens"), (1, -1, "max_tokens")]
)
def test_A19_nothing_to_compute_or_nothing_to_generate_is_refused(tokens: int, max_tokens: int, param: str) -> None:
    place = Place()
    with pytest.raises(RequestError) as caught:
        place.add(prompt(tokens), max_tokens)
    assert caught.value.param == param
    assert place.scheduler.idle


# ---- the end of a sequence


def test_A05_each_stops_at_its_own_ids() -> None:
    a, _, b, *_ = alone(Place().add(prompt(4), 8))[0]
    place = Place()
    first, second, third = (
        place.scheduler.add(
            Request(id=name, prompt=prompt(4), sampling=SamplingParams(), max_tokens=8, stop_ids=frozenset(ends)), 0, 1
        )
        for name, ends in (("ab", (a, b)), ("b", (b,)), ("none", ()))
    )
    place.finish()
    assert (first.generated, first.finish) == (1, FinishReason.STOP)
    assert (second.generated, second.finish) == (3, FinishReason.STOP)
    assert (third.generated, third.finish) == (8, FinishReason.LENGTH)


def test_a_failed_sample_ends_its_sequence_alone_and_its_kv_is_nobodys() -> None:
    place = Place(block_size=4)
    bad, good = place.add(prompt(12), 4), place.add(prompt(12, 300), 4)
    place.plan()
    result = place.results.pop()
    place.results.append(StepResult(result.number, ((FAILED_SAMPLE,), result.sampled[1]), result.logprobs))
    assert place.land() == {bad: (), good: result.sampled[1]}
    assert (bad.state, bad.finish, bad.generated) == (State.FINISHED, FinishReason.ERROR, 0)
    again = place.add(prompt(12), 4)
    place.finish()
    assert again.cached == 0
    assert_as_alone(good, again)


def test_a_failed_step_ends_all_in_it_and_nobody_else() -> None:
    place = Place(rows=2)
    ended = [place.add(prompt(4, 100 * i)) for i in (1, 2)]
    waiting = place.add(prompt(4, 300))
    place.plan()
    place.scheduler.abort(ended[0])
    place.results.clear()
    assert place.scheduler.fail(0) == ended[1:]
    assert [s.finish for s in ended] == [FinishReason.ABORT, FinishReason.ERROR]
    place.finish()
    assert_as_alone(waiting)


@pytest.mark.parametrize("when", ["waiting", "gated", "prefill", "decode", "in flight", "preempted", "finished"])
def test_abort_in_every_state(when: str) -> None:
    place = Place(num_blocks=6, block_size=4, rows=2, budget=9)
    other = place.add(prompt(6, 300), 14)
    victim = place.add(prompt(6), 4 if when == "finished" else 12, GATE if when == "gated" else frozenset())
    match when:
        case "gated" | "prefill":
            place.step()  # 6 tokens of the other, 3 of the victim
        case "decode":
            place.step()
            place.step()
        case "in flight":
            place.step()
            place.plan()
        case "preempted":
            while not victim.preemptions:
                place.step()
        case "finished":
            while victim.finish is None:
                place.step()
    before = list(victim.tokens)
    place.scheduler.abort(victim)
    audit(place.scheduler)
    assert (victim.state, victim.blocks, victim.row) == (State.FINISHED, [], None)
    assert victim.finish is (FinishReason.LENGTH if when == "finished" else FinishReason.ABORT)
    place.scheduler.abort(victim)  # twice is no error
    if when == "in flight":
        assert victim not in place.land()
    place.finish()
    assert victim.tokens == before
    assert before[6:] == alone(victim)[0][: len(before) - 6]
    assert_as_alone(other)


def test_what_a_hold_keeps_is_kept_until_it_is_released() -> None:
    place = Place(num_blocks=4, block_size=4)
    sequence = place.add(prompt(6), 3)
    place.scheduler.hold(sequence)
    while not place.scheduler.idle:
        place.step()
    assert sequence.finish is FinishReason.LENGTH
    assert len(sequence.blocks) == 2
    assert place.pool.num_free == 2
    place.scheduler.release_hold(sequence)
    assert (sequence.blocks, place.pool.num_free) == ([], 4)


def test_an_abort_keeps_nothing_though_a_hold_was_asked_for() -> None:
    place = Place(num_blocks=4, block_size=4)
    sequence = place.add(prompt(6), 3)
    place.scheduler.hold(sequence)
    place.step()
    place.scheduler.abort(sequence)
    assert (sequence.blocks, place.pool.num_free) == ([], 4)
    place.scheduler.release_hold(sequence)
    assert place.pool.num_free == 4


# ---- plans


def test_a_row_is_opened_with_all_the_device_must_know_and_closed_in_the_next_step() -> None:
    place = Place(num_blocks=8, block_size=4)
    sampling = SamplingParams(temperature=0.5, min_tokens=1)
    sequence = place.add(prompt(6), 1, sampling=sampling, stop_ids=frozenset({7}))
    place.step()
    [opening] = place.plans[0].opens
    assert opening.tokens == sequence.request.prompt
    assert (opening.row, opening.prompt_length, len(opening.blocks), opening.computed) == (0, 6, 2, 0)
    assert (opening.sampling, opening.seed, opening.stop_ids) == (sampling, sequence.seed, frozenset({7}))
    assert place.scheduler.plan() is None  # no step, so nothing tells the device yet
    place.add(prompt(6, 200), 1)
    place.step()
    assert (place.plans[0].closes, place.plans[1].closes) == ([], [0])
    assert [plan.number for plan in place.plans] == [0, 1]


def test_a_plan_may_run_ahead_of_what_the_host_knows() -> None:
    place = Place()
    sequence = place.add(prompt(3), 3)
    assert place.plan() == [(sequence, 0, 3, True)]
    assert place.plan() == [(sequence, 3, 1, True)]
    assert (sequence.generated, sequence.in_flight) == (0, 2)
    assert place.plan() == [(sequence, 4, 1, True)]
    assert place.plan() == []  # its last sample is on its way; the last token is never computed
    for _ in range(3):
        place.land()
    assert_as_alone(sequence)


def test_a_sample_after_the_end_is_dropped() -> None:
    place = Place()
    end = alone(place.add(prompt(3), 8))[0][0]
    place = Place()
    sequence = place.add(prompt(3), 8, stop_ids=frozenset({end}))
    place.plan()
    place.plan()
    assert place.land() == {sequence: (end,)}
    assert place.land() == {}
    assert sequence.finish is FinishReason.STOP
    place.finish()


def test_steps_land_in_the_order_of_their_numbers() -> None:
    place = Place()
    place.add(prompt(3), 8)
    place.plan()
    place.plan()
    with pytest.raises(AssertionError, match="step 1"):
        place.scheduler.commit(place.results[1])
    place = Place()
    place.add(prompt(3), 8)
    place.plan()
    with pytest.raises(AssertionError, match="step 1"):
        place.scheduler.fail(1)


# ---- lookahead


def test_drafts_have_room_but_never_past_the_last_token_that_is_fed() -> None:
    place = Place(block_size=1, rows=1, budget=64, lookahead=3)
    sequence = place.add(prompt(5), 6)
    ends = []
    while work := place.plan():
        [(_, start, count, samples)] = work
        assert samples
        remaining = 6 - sequence.generated
        pending = len(sequence.tokens) - start
        assert count == pending + min(3, remaining - 1)
        ends.append(start + count)
        assert len(sequence.blocks) >= start + count
        place.land()
    assert max(ends) <= 5 + 6 - 1
    assert_as_alone(sequence)


def test_drafts_wait_for_the_commit_before_them() -> None:
    place = Place(lookahead=1)
    place.add(prompt(5), 6)
    place.plan()
    with pytest.raises(AssertionError, match="drafts"):
        place.scheduler.plan()


def test_A50_drafts_that_hold_are_not_computed_again_and_an_end_among_them_cuts() -> None:
    place = Place(rows=1, lookahead=3)
    whole = alone(place.add(prompt(5), 12))[0]
    place = Place(rows=1, lookahead=3)
    sequence = place.add(prompt(5), 12, stop_ids=frozenset({whole[7]}))
    told: list[int] = []
    while work := place.plan():
        [(_, start, _, _)] = work
        assert start == max(len(sequence.tokens) - 1, 0) or not told
        told += place.land()[sequence]
    assert len(place.plans) < 8
    assert told == whole[:8] == sequence.tokens[5:]
    assert sequence.finish is FinishReason.STOP
