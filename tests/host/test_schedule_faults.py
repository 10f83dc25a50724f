"""The fuzz can see: each fault, planted into a copy of the package's source, is caught within a few hundred trials."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from host.schedule_fuzz import Subject, run_trial
from nanoserve import schedule

TRIALS = 400


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    new: str


BLOCKS = [
    Fault("a block that is given away keeps its key", "blocks.py",
          "            self._forget(block)  # its contents are about to be written over\n", ""),
    Fault("a shared block stays in the free list", "blocks.py",
          "            if self._holders[block] == 0:\n                del self._free[block]\n", ""),
    Fault("the first to let go frees a shared block", "blocks.py",
          "            if self._holders[block] == 0:\n                self._free[block] = None",
          "            if True:\n                self._free[block] = None"),
    Fault("keys are not chained", "blocks.py", "blake2b(key + data[", "blake2b(data["),
    Fault("keys are not salted", "blocks.py", 'salt.encode("utf-8", "surrogatepass")', 'b""'),
    Fault("the last to publish takes the key over", "blocks.py", "if key not in self._block_of:", "if True:"),
    Fault("free hits cost nothing", "blocks.py", "sum(self._holders[block] > 0 for block in hits)", "len(hits)"),
    Fault("a match skips what is missing", "blocks.py", "                break\n", "                continue\n"),
]  # fmt: skip
SCHEDULER = [
    Fault("a prompt found whole leaves nothing to compute", "scheduler.py",
          "(len(sequence.tokens) - 1) // self.pool.block_size", "len(sequence.tokens) // self.pool.block_size"),
    Fault("found blocks count as not published", "scheduler.py", "= cached, len(hits)", "= cached, 0"),
    Fault("hits are given away before they are held", "scheduler.py",
          "            self.pool.share(hits)\n"
          "            sequence.blocks = hits + self.pool.take(self.pool.blocks_for(cached + count) - len(hits))\n",
          "            sequence.blocks = hits + self.pool.take(self.pool.blocks_for(cached + count) - len(hits))\n"
          "            self.pool.share(hits)\n"),
    Fault("a chunk publishes the whole prompt", "scheduler.py",
          "self._publish(sequence, computed // size)", "self._publish(sequence, len(sequence.tokens) // size)"),
    Fault("blocks are published when planned", "scheduler.py",
          "            sequence.in_flight += 1\n",
          "            sequence.in_flight += 1\n"
          "            self._publish(sequence, len(sequence.tokens) // self.pool.block_size)\n"),
    Fault("drafts that failed count as computed", "scheduler.py",
          "computed = len(sequence.tokens) - 1", "computed = start + count"),
    Fault("a commit touches the blocks of a preempted sequence", "scheduler.py",
          "if sequence.preemptions == preemptions:", "if True:"),
    Fault("a sequence is back before its last token is known", "scheduler.py", "if sequence.in_flight:", "if False:"),
    Fault("continuations share keys beyond their prompt", "scheduler.py",
          "[: len(sequence.request.prompt) // self.pool.block_size]", "[:]"),
    Fault("keys are taken from another request", "scheduler.py", "self._hashed.request is sequence.request", "True"),
    Fault("gates stand open", "scheduler.py",
          "        self.waiting.add(sequence)\n        if not sequence.gates:\n",
          "        self.waiting.add(sequence)\n        if True:\n"),
    Fault("a gate opens and nobody looks", "scheduler.py",
          "if not sequence.gates and sequence.state is State.WAITING:", "if False:"),
    Fault("rows are not closed", "scheduler.py", "        self._closes.append(sequence.row)\n", ""),
    Fault("rows are closed again and again", "scheduler.py",
          "        self._closes = []\n        self._steps", "        self._steps"),
    Fault("rows are not given back", "scheduler.py", "        heappush(self._rows, sequence.row)\n", ""),
    Fault("work beyond the last token", "scheduler.py", "if remaining <= 0:", "if False:"),
    Fault("drafts beyond the last token", "scheduler.py",
          "min(self.config.lookahead, remaining - 1)", "self.config.lookahead"),
    Fault("new blocks are not told", "scheduler.py", "        plan.grows.append((sequence.row, tuple(blocks)))\n", ""),
    Fault("the oldest is the victim", "scheduler.py", "victim = self.running[-1]", "victim = self.running[0]"),
    Fault("blocks leak", "scheduler.py",
          "            self.pool.release(sequence.blocks)\n            sequence.blocks = []\n        sequence.planned",
          "            sequence.blocks = []\n        sequence.planned"),
    Fault("held blocks are let go", "scheduler.py", "if not keep_blocks:", "if True:"),
    Fault("an abort keeps held blocks", "scheduler.py",
          "if reason in (FinishReason.ABORT, FinishReason.ERROR):", "if False:"),
    Fault("prompts eat the decodes' share", "scheduler.py", "flight.budget - kept_back", "flight.budget"),
    Fault("work costs no budget", "scheduler.py", "        flight.budget -= count\n", ""),
    Fault("the last in the queue goes first", "scheduler.py",
          "sequence = self._ready[0]", "sequence = self._ready[-1]"),
    Fault("a resumption forgets what was generated", "scheduler.py",
          "tokens=tuple(sequence.tokens)", "tokens=tuple(sequence.request.prompt)"),
    Fault("a resumption counts output as prompt", "scheduler.py",
          "prompt_length=len(sequence.request.prompt)", "prompt_length=len(sequence.tokens)"),
    Fault("a resumption overwrites the cached tokens", "scheduler.py", "if not sequence.preemptions:", "if True:"),
    Fault("seeds are lost", "scheduler.py", "seed=sequence.seed", "seed=0"),
    Fault("stop ids do not stop", "scheduler.py", "if token in request.stop_ids:", "if False:"),
    Fault("one token too many", "scheduler.py", "if len(tokens) == longest:", "if len(tokens) > longest:"),
    Fault("tokens after the stop are told", "scheduler.py",
          "sequence.finish = FinishReason.STOP\n                return sampled[: i + 1]",
          "sequence.finish = FinishReason.STOP\n                return sampled"),
    Fault("logprobs are not cut with the tokens", "scheduler.py", "logprobs[: len(kept)]", "logprobs"),
    Fault("a failed sample is a token", "scheduler.py", "if token < 0:", "if False:"),
    Fault("KV that gave no sample is inherited", "scheduler.py",
          "                self.pool.withdraw(sequence.blocks)\n", "                pass\n"),
    Fault("a failed step ends nobody", "scheduler.py", "                self._end(sequence, FinishReason.ERROR)\n", ""),
    Fault("an aborted sequence still makes news", "scheduler.py",
          "if sequence.finish is not None:  # by an abort", "if False:  # by an abort"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that imports look into; what came from it is forgotten at the end."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
        del sys.modules[name]


def copy_of_ours(folder: Path, fault: Fault | None) -> Subject:
    package = folder / "planted"
    package.mkdir()
    for path in Path(schedule.__path__[0]).glob("*.py"):
        source = path.read_text()
        if fault is not None and path.name == fault.file:
            assert source.count(fault.old) == 1, f"{fault.old!r} is no place to plant a fault: edit this test"
            source = source.replace(fault.old, fault.new)
        (package / path.name).write_text(source.replace("nanoserve.schedule", "planted"))
    scheduler, blocks = import_module("planted.scheduler"), import_module("planted.blocks")
    audit = import_module("planted.audit").audit
    return Subject(scheduler.Scheduler, scheduler.SchedulerConfig, blocks.BlockPool, audit)


def run_trials(subject: Subject) -> None:
    for seed in range(TRIALS):
        run_trial(seed, subject)


def test_a_faithful_copy_passes(folder: Path) -> None:
    subject = copy_of_ours(folder, None)
    assert Path(sys.modules[subject.Scheduler.__module__].__file__ or "").is_relative_to(folder)
    run_trials(subject)


@pytest.mark.parametrize("fault", BLOCKS + SCHEDULER, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(folder: Path, fault: Fault) -> None:
    subject = copy_of_ours(folder, fault)
    with pytest.raises((AssertionError, LookupError, TypeError, ValueError)):
        run_trials(subject)
