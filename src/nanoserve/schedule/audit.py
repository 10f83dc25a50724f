"""audit: what is true of the scheduler's books between any two calls. For tests and debugging; it changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from nanoserve.core.request import Sequence, State
from nanoserve.schedule.blocks import BlockPool
from nanoserve.schedule.scheduler import Scheduler


def audit(scheduler: Scheduler) -> None:
    """Raises AssertionError with the facts."""
    kept = [sequence for sequence in scheduler._holds if sequence.state is State.FINISHED]
    _pool(scheduler.pool, (sequence.blocks for sequence in [*scheduler.running, *kept]))
    _rows(scheduler)
    _queues(scheduler)
    in_flight: Counter[Sequence] = Counter()
    computed = {sequence: sequence.planned for sequence in scheduler.running}  # by steps that were committed
    for flight in reversed(scheduler._flights):
        for (sequence, preemptions), work in zip(flight.owners, flight.plan.work, strict=True):
            in_flight[sequence] += work.samples
            if sequence in computed and sequence.preemptions == preemptions:
                computed[sequence] = work.start
    for sequence in (*scheduler.running, *scheduler.waiting):
        name, due = f"{sequence.request.id}/{sequence.index}", in_flight[sequence]
        assert sequence.finish is None, f"{name} ended and is {sequence.state}"
        assert sequence.in_flight == due, f"{name}: {sequence.in_flight} samples in its book, {due} on their way"
    for sequence in scheduler.running:
        _running(scheduler, sequence, computed[sequence])


def _pool(pool: BlockPool, held: Iterable[list[int]]) -> None:
    holders = Counter(block for blocks in held for block in blocks)
    for block, count in enumerate(pool._holders):
        assert count == holders[block], f"block {block} has {holders[block]} holders, and its book says {count}"
        assert (block in pool._free) == (count == 0), f"block {block} has {count} holders; free: {block in pool._free}"
        key = pool._key_of[block]
        assert key is None or pool._block_of.get(key) == block, f"the key of block {block} leads elsewhere"
    assert len(pool._free) + len(holders) == pool.num_blocks, f"{len(pool._free)} free, {len(holders)} held blocks"
    known = sum(key is not None for key in pool._key_of)
    assert known == len(pool._block_of), f"{len(pool._block_of)} keys lead to {known} blocks"


def _rows(scheduler: Scheduler) -> None:
    rows = [sequence.row for sequence in scheduler.running]
    assert sorted([*rows, *scheduler._rows], key=str) == sorted(range(scheduler.config.max_rows), key=str), (
        f"rows {rows} run, {scheduler._rows} are free, of {scheduler.config.max_rows}"
    )
    closes = scheduler._closes
    assert len(set(closes)) == len(closes), f"rows {closes} close, one of them twice"
    assert set(closes) <= set(scheduler._rows), f"rows {closes} close, of which not all are free: {scheduler._rows}"


def _queues(scheduler: Scheduler) -> None:
    for queue in (scheduler.running, scheduler._ready):
        for one, other in pairwise(queue):
            assert one.order < other.order, f"{one.order} stands before {other.order}"
    ready = {sequence for sequence in scheduler.waiting if not sequence.gates}
    assert ready == set(scheduler._ready), f"{len(ready)} wait with no gate, {len(scheduler._ready)} are in the queue"
    for sequence in scheduler.waiting:
        state = (sequence.state, sequence.row, sequence.blocks, sequence.planned, sequence.published)
        assert state == (State.WAITING, None, [], 0, 0), f"{sequence.request.id}/{sequence.index} waits with {state}"


def _running(scheduler: Scheduler, sequence: Sequence, computed: int) -> None:
    name, pool = f"{sequence.request.id}/{sequence.index}", scheduler.pool
    assert sequence.state is State.RUNNING, f"{name} is {sequence.state} and runs"
    assert not sequence.gates, f"{name} runs behind gates {sequence.gates}"
    assert len(set(sequence.blocks)) == len(sequence.blocks), f"{name} has a block twice: {sequence.blocks}"
    known = len(sequence.tokens) + sequence.in_flight
    assert sequence.planned <= known, f"{name}: {sequence.planned} tokens planned of {known}"
    longest = len(sequence.request.prompt) + sequence.request.max_tokens
    assert known <= longest, f"{name} is to have {known} tokens of {longest}"
    least, most = (pool.blocks_for(n) for n in (sequence.planned, sequence.planned + scheduler.config.lookahead))
    assert least <= len(sequence.blocks) <= most, f"{name} has {len(sequence.blocks)} blocks, for {least} to {most}"
    published = sequence.published
    assert published <= len(sequence.keys), f"{name}: {published} blocks published, {len(sequence.keys)} keys"
    assert published * pool.block_size <= computed, f"{name}: {published} blocks published, {computed} tokens computed"
    for i, block in enumerate(sequence.blocks):
        key = pool._key_of[block]
        assert key is None or (i < published and key == sequence.keys[i]), f"{name}: block {i} has another's key"
