"""Fuzz: thousands of small random worlds, each of which must produce exactly the texts it would without a scheduler."""

from __future__ import annotations

import pytest

from host.schedule_fuzz import Subject, Tally, run_trial
from nanoserve.schedule.audit import audit
from nanoserve.schedule.blocks import BlockPool
from nanoserve.schedule.scheduler import Scheduler, SchedulerConfig

OURS = Subject(Scheduler, SchedulerConfig, BlockPool, audit)


def run_trials(first: int, count: int) -> Tally:
    tallies = []
    for seed in range(first, first + count):
        try:
            tallies.append(run_trial(seed, OURS))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return Tally(*map(sum, zip(*tallies, strict=True)))


@pytest.mark.parametrize("first", range(0, 10_000, 1_000))
def test_any_schedule_gives_the_same_texts(first: int) -> None:
    tally = run_trials(first, 1_000)
    assert min(tally) > 0, f"something was never tried: {tally}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(10_000, 200_000, 10_000))
def test_any_schedule_gives_the_same_texts_long(first: int) -> None:
    run_trials(first, 10_000)
