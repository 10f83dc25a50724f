"""audit: what must hold of a scheduler and its pool between steps. Slow; for tests and for hunting faults."""

from __future__ import annotations

from collections import Counter

from nanoserve.core.request import State
from nanoserve.schedule.scheduler import Scheduler


def audit(scheduler: Scheduler) -> None:
    """Raises AssertionError that names the broken fact."""
    _blocks(scheduler)
    _rows(scheduler)
    for sequence in scheduler.waiting:
        assert sequence.state is State.WAITING, f"{sequence.order} waits in state {sequence.state}"
        assert not sequence.blocks, f"{sequence.order} waits and holds blocks"
        assert sequence.row is None, f"{sequence.order} waits and holds row {sequence.row}"
    for queue in (scheduler.waiting, scheduler.running):
        orders = [sequence.order for sequence in queue]
        assert orders == sorted(set(orders)), "a queue is out of order or holds a sequence twice"


def _blocks(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    held = Counter(block for sequence in scheduler.running for block in sequence.blocks)
    for block in range(pool.num_blocks):
        assert held[block] == pool.holders[block], f"block {block}: {held[block]} hold it, {pool.holders[block]} noted"
        assert (block in pool.free) == (held[block] == 0), f"block {block}: free and held, or neither"
    for sequence in scheduler.running:
        assert len(set(sequence.blocks)) == len(sequence.blocks), f"{sequence.order} holds a block twice"
        room = len(sequence.blocks) * pool.block_size
        assert sequence.planned + scheduler.config.lookahead * sequence.in_flight <= room, f"{sequence.order}: no room"
        assert sequence.published <= len(sequence.keys), f"{sequence.order} published without keys"
    for block, key in enumerate(pool.key_of):
        assert key is None or pool.block_of[key] == block, f"block {block}: its key names another"
    assert len(pool.block_of) == sum(key is not None for key in pool.key_of), "a key names a block that lacks it"


def _rows(scheduler: Scheduler) -> None:
    rows = [-1 if sequence.row is None else sequence.row for sequence in scheduler.running]
    assert all(sequence.state is State.RUNNING for sequence in scheduler.running), "a running sequence is not"
    once = sorted([*rows, *scheduler.free_rows]) == list(range(scheduler.config.max_rows))
    assert once, f"rows {rows} held and {scheduler.free_rows} free are not each row once"
