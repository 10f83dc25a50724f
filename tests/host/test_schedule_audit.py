"""audit: it is content with a sound scheduler, and names what is wrong with every damaged one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import StepResult
from nanoserve.core.request import FinishReason, Request, State
from nanoserve.schedule.audit import audit
from nanoserve.schedule.blocks import BlockPool
from nanoserve.schedule.scheduler import Scheduler, SchedulerConfig


def busy() -> Scheduler:
    """Two sequences run, one waits, one waits behind a gate; a step is on its way."""
    scheduler = Scheduler(SchedulerConfig(max_rows=2, max_step_tokens=32, max_len=32), BlockPool(16, 2))
    for i, gates in enumerate([(), (), (), ("gate",)]):
        request = Request(id=f"r{i}", prompt=(i, 1, 2, 3, 4), sampling=SamplingParams(), max_tokens=8)
        scheduler.add(request, 0, 0, frozenset(gates))
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(StepResult(plan.number, ((7,), (7,)), ((), ())))
    assert scheduler.plan() is not None
    return scheduler


DAMAGES: dict[str, Callable[[Scheduler], object]] = {
    "a holder too many": lambda s: s.pool.share(s.running[0].blocks[:1]),
    "a held block in the free list": lambda s: s.pool._free.setdefault(s.running[0].blocks[0]),
    "a free block lost": lambda s: s.pool._free.popitem(),
    "a block in two hands": lambda s: s.running[0].blocks.append(s.running[1].blocks[0]),
    "a block twice in one hand": lambda s: s.running[0].blocks.append(s.running[0].blocks[0]),
    "a key that leads elsewhere": lambda s: s.pool._block_of.update({s.running[0].keys[0]: 15}),
    "a key without a block": lambda s: s.pool._block_of.update({b"x" * 16: 15}),
    "a block of another's key": lambda s: s.running[0].keys.reverse(),
    "a row in two hands": lambda s: setattr(s.running[0], "row", s.running[1].row),
    "a running row that is free": lambda s: s._rows.append(0),
    "a row closed twice": lambda s: s._closes.extend([1, 1]),
    "a running row that closes": lambda s: s._closes.append(s.running[0].row or 0),
    "running out of order": lambda s: s.running.reverse(),
    "one missing in the queue": lambda s: s._ready.pop(),
    "a gated one in the queue": lambda s: next(q for q in s.waiting if not q.gates).gates.add("gate"),
    "a waiting one with blocks": lambda s: s._ready[0].blocks.extend(s.pool.take(1)),
    "a running one that waits": lambda s: setattr(s.running[0], "state", State.WAITING),
    "a running one that ended": lambda s: setattr(s.running[0], "finish", FinishReason.STOP),
    "a running one behind a gate": lambda s: s.running[0].gates.add("gate"),
    "a sample that is not on its way": lambda s: setattr(s.running[0], "in_flight", 2),
    "planned beyond what is known": lambda s: setattr(s.running[0], "planned", 9),
    "too few blocks": lambda s: s.pool.release([s.running[0].blocks.pop()]),
    "a block for nothing": lambda s: s.running[0].blocks.extend(s.pool.take(1)),
    "published before its time": lambda s: setattr(s.running[0], "published", 3),
    "too many tokens": lambda s: s.running[0].tokens.extend([1] * 9),
}


def test_a_sound_scheduler_passes() -> None:
    audit(busy())


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str) -> None:
    scheduler = busy()
    DAMAGES[damage](scheduler)
    with pytest.raises(AssertionError, match=r"\w+ \w+"):
        audit(scheduler)
