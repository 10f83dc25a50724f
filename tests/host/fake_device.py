"""FakeDevice: computes step plans without tensors, and knows for every KV slot which prefix it encodes.

A prefix is a number, hashed along the tokens and begun with the salt. The next token is a pure function of the prefix
and the seed. So stale, foreign or missing KV, a wrong position, a lost seed or stop id is either an AssertionError here
or another text than `continuation` predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random

from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import FAILED_SAMPLE, RowOpen, StepPlan, StepResult, TokenLogprobs
from nanoserve.core.request import FinishReason, Request

GARBAGE = -1


def root(salt: str) -> int:
    return hash(tuple(map(ord, salt)))


def prefixes(start: int, tokens: Iterable[int]) -> list[int]:
    """One a token: what the KV of its position encodes."""
    found = []
    for token in tokens:
        start = hash((start, token))
        found.append(start)
    return found


def next_token(prefix: int, seed: int, vocab: int, masked: frozenset[int]) -> int:
    token = hash((prefix, seed)) % vocab
    while token in masked:
        token = (token + 1) % vocab
    return token


def continuation(request: Request, seed: int, vocab: int) -> tuple[list[int], FinishReason]:
    """What a sequence generates when nothing disturbs it, and why it ends."""
    prefix = prefixes(root(request.cache_salt), request.prompt)[-1]
    output: list[int] = []
    while True:
        masked = request.stop_ids if len(output) < request.sampling.min_tokens else frozenset[int]()
        token = next_token(prefix, seed, vocab, masked)
        output.append(token)
        prefix = hash((prefix, token))
        if token in request.stop_ids:
            return output, FinishReason.STOP
        if len(output) == request.max_tokens:
            return output, FinishReason.LENGTH


def logprob_of(position: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(-float(position), (token,), (-float(position),))


class _Row:
    __slots__ = ("blocks", "broken", "opening", "prefixes", "root", "tokens")

    def __init__(self, opening: RowOpen, salt: str):
        self.opening = opening
        self.root = root(salt)
        self.tokens = list(opening.tokens)
        self.blocks = list(opening.blocks)
        self.prefixes = prefixes(self.root, opening.tokens)
        self.broken = False  # a step of it failed: what it computes since is garbage, and nobody may use it

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.prefixes.append(hash((self.prefixes[-1], token)))


class FakeDevice:
    """`failing_samples` and `failing_steps` are probabilities; `guess` is that of a draft being right."""

    def __init__(
        self, num_blocks: int, block_size: int, vocab: int, random: Random, *,
        lookahead: int = 0, guess: float = 0.6, failing_samples: float = 0.0, failing_steps: float = 0.0,
    ):  # fmt: skip
        self.block_size = block_size
        self.vocab = vocab
        self.lookahead = lookahead
        self.kv: list[int] = [GARBAGE] * (num_blocks * block_size)
        self.rows: dict[int, _Row] = {}
        self.num_computed = 0
        self._random = random.random
        self._guess = guess
        self._failing_samples = failing_samples
        self._failing_steps = failing_steps

    def run(self, plan: StepPlan, salts: Mapping[int, str]) -> StepResult | None:
        """None: the step failed. `salts` of the rows that the plan opens, which a real device needs not know."""
        for row in plan.closes:
            del self.rows[row]
        for opening in plan.opens:
            assert opening.row not in self.rows, f"row {opening.row} is open already"
            assert opening.computed < len(opening.tokens), "a row is opened, and nothing is left to compute"
            self.rows[opening.row] = _Row(opening, salts[opening.row])
        for index, blocks in plan.grows:
            self.rows[index].blocks += blocks
        assert len({work.row for work in plan.work}) == len(plan.work), "a row has work twice in one step"
        drafted = []  # all reads come before all writes: rows of one step see nothing of each other
        for index, start, count, samples in plan.work:
            row = self.rows[index]
            drafts = start + count - len(row.tokens)
            assert count > 0, f"row {index} has nothing to do"
            if samples:
                assert 0 <= drafts <= self.lookahead, f"row {index}: {start}+{count} of {len(row.tokens)} known tokens"
            else:
                assert drafts < 0, f"row {index} computes its last known token and does not sample"
            assert start + count <= len(row.blocks) * self.block_size, f"row {index} lacks a block for {start}+{count}"
            if not row.broken:
                self.check(row.blocks, row.prefixes[:start])
            drafted.append(self._drafts(row, drafts) if samples and drafts else [])
        if self._failing_steps and self._random() < self._failing_steps:
            for index, start, count, samples in plan.work:
                self.rows[index].broken = True
                self._write(self.rows[index], start, [GARBAGE] * count)
                if samples:
                    self.rows[index].append(0)
            return None
        sampled: list[tuple[int, ...]] = []
        logprobs: list[tuple[TokenLogprobs, ...]] = []
        for (index, start, count, samples), drafts in zip(plan.work, drafted, strict=True):
            row = self.rows[index]
            encoded = row.prefixes[start : start + count]
            encoded += prefixes(row.prefixes[-1], drafts) if drafts else []
            self._write(row, start, [GARBAGE] * count if row.broken else encoded)
            self.num_computed += count
            tokens = self._sample(row, drafts, start) if samples else ()
            sampled.append(tokens)
            asked = row.opening.sampling.logprobs is not None
            first = len(row.tokens) - len(tokens)
            logprobs.append(tuple(logprob_of(first + i, t) for i, t in enumerate(tokens) if t >= 0) if asked else ())
        return StepResult(plan.number, tuple(sampled), tuple(logprobs))

    def check(self, blocks: list[int], expected: list[int]) -> None:
        """The KV in `blocks` encodes `expected`, from position 0."""
        size = self.block_size
        for i in range(0, len(expected), size):
            part = expected[i : i + size]
            slot = blocks[i // size] * size
            assert self.kv[slot : slot + len(part)] == part, f"block {blocks[i // size]} holds stale or foreign KV"

    def _write(self, row: _Row, start: int, encoded: list[int]) -> None:
        size = self.block_size
        for position, prefix in enumerate(encoded, start):
            self.kv[row.blocks[position // size] * size + position % size] = prefix

    def _next(self, row: _Row, prefix: int, length: int) -> int:
        opening, sampling = row.opening, row.opening.sampling
        masked = opening.stop_ids if length - opening.prompt_length < sampling.min_tokens else frozenset[int]()
        return next_token(prefix, opening.seed, self.vocab, masked)

    def _drafts(self, row: _Row, count: int) -> list[int]:
        drafts: list[int] = []
        prefix = row.prefixes[-1]
        for i in range(count):
            right = self._next(row, prefix, len(row.tokens) + i)
            drafts.append(right if self._random() < self._guess else (right + 1) % self.vocab)
            prefix = hash((prefix, drafts[-1]))
        return drafts

    def _sample(self, row: _Row, drafts: list[int], start: int) -> tuple[int, ...]:
        """Accept drafts as long as they are right, then one token more. `start`: where the work of this step began."""
        tokens = []
        end = len(row.tokens) + len(drafts)
        for draft in (*drafts, None):
            if self._failing_samples and self._random() < self._failing_samples:
                doubtful = len(row.tokens) - 1 if tokens else start  # nobody knows where it began to be not finite
                self._write(row, doubtful, [GARBAGE] * (end - doubtful))
                tokens.append(FAILED_SAMPLE)
                row.append(0)
                row.broken = True
                break
            tokens.append(self._next(row, row.prefixes[-1], len(row.tokens)))
            row.append(tokens[-1])
            if draft != tokens[-1]:
                break
        return tuple(tokens)


def make_request(name: str, prompt: Iterable[int], max_tokens: int, **fields: object) -> Request:
    fields.setdefault("sampling", SamplingParams())
    return Request(id=name, prompt=tuple(prompt), max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
