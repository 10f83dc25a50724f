"""The engine as a whole on a toy checkpoint: what a request gets does not depend on what else runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from nanoserve.bench.toy import make_toy
from nanoserve.core.config import EngineConfig
from nanoserve.core.errors import ConfigError, ContextLengthError, OverloadedError, RequestError
from nanoserve.core.params import SamplingParams
from nanoserve.core.request import FinishReason
from nanoserve.engine import choices
from nanoserve.engine.admission import make_request
from nanoserve.engine.build import build_engine
from nanoserve.engine.engine import Engine
from nanoserve.schedule.audit import audit

Key = tuple[str, int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("engine") / "toy")


def build(checkpoint: Path, **settings: Any) -> Engine:
    defaults = {"max_model_len": 128, "num_gpu_blocks_override": 64, "block_size": 4, "max_num_seqs": 8}
    return build_engine(EngineConfig(model=str(checkpoint), **(defaults | settings)))


def drain(engine: Engine, check: bool = True) -> tuple[dict[Key, list[int]], dict[Key, FinishReason]]:
    """Step until idle; each sequence's tokens and end."""
    tokens: dict[Key, list[int]] = {}
    ends: dict[Key, FinishReason] = {}
    for _ in range(5000):
        if engine.idle:
            break
        for update in engine.step():
            key = (update.request_id, update.index)
            assert key not in ends, "news after the end"
            tokens.setdefault(key, []).extend(update.tokens)
            if update.finish is not None:
                ends[key] = update.finish
        if check:
            audit(engine._scheduler)
    assert engine.idle, "livelock"
    assert engine.stats.kv_cache_usage == 0.0, "blocks leaked"
    return tokens, ends


def ask(engine: Engine, name: str, prompt: bytes, **sampling: Any) -> None:
    params = SamplingParams(**({"temperature": 0, "max_tokens": 12, "ignore_eos": True} | sampling))
    engine.add(make_request(engine.info, list(prompt), params, id=name))


PROMPTS = {f"r{i}": bytes((7 * i + 3 * j * j) % 97 + 32 for j in range(3 + 9 * i)) for i in range(6)}
MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9},
    {"repetition_penalty": 1.8},
    {"temperature": 1.0, "seed": 3, "frequency_penalty": 1.5, "top_k": 20},
    {"logprobs": 2},
]


def alone(checkpoint: Path, name: str, **settings: Any) -> list[int]:
    engine = build(checkpoint, **settings)
    ask(engine, name, PROMPTS[name], **MIXED[int(name[1:])])
    return drain(engine)[0][name, 0]


@pytest.fixture(scope="module")
def lonely(checkpoint: Path) -> dict[str, list[int]]:
    return {name: alone(checkpoint, name) for name in PROMPTS}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"max_num_seqs": 2},
        {"num_gpu_blocks_override": 20, "max_model_len": 72},
        {"num_gpu_blocks_override": 16, "max_model_len": 62, "max_num_batched_tokens": 9},
        {"enable_prefix_caching": False},
        {"block_size": 16},
    ],
    ids=["plain", "chunked", "two rows", "preempting", "preempting chunks", "no prefix cache", "block 16"],
)
def test_A34_neighbours_and_scheduling_change_nothing(
    checkpoint: Path, lonely: dict[str, list[int]], settings: dict[str, Any]
) -> None:
    engine = build(checkpoint, **settings)
    for name, prompt in PROMPTS.items():
        ask(engine, name, prompt, **MIXED[int(name[1:])])
    tokens, ends = drain(engine)
    assert {name: tokens[name, 0] for name in PROMPTS} == lonely
    assert set(ends.values()) == {FinishReason.LENGTH}
    if "num_gpu_blocks_override" in settings:
        assert engine.stats.num_preemptions > 0


def test_A34_logprobs_survive_a_preemption(checkpoint: Path) -> None:
    """One for each token, none twice, and those of an undisturbed run."""

    def run(**settings: Any) -> tuple[Engine, dict[Key, list[float]], dict[Key, int]]:
        engine = build(checkpoint, **settings)
        for name, prompt in PROMPTS.items():
            ask(engine, name, prompt, **{**MIXED[int(name[1:])], "logprobs": 1})
        found: dict[Key, list[float]] = {}
        counts: dict[Key, int] = {}
        while not engine.idle:
            for update in engine.step():
                key = (update.request_id, update.index)
                found.setdefault(key, []).extend(entry.logprob for entry in update.logprobs)
                counts[key] = counts.get(key, 0) + len(update.tokens)
        return engine, found, counts

    engine, found, counts = run(num_gpu_blocks_override=16, max_model_len=62, max_num_batched_tokens=9)
    _, undisturbed, _ = run()
    assert engine.stats.num_preemptions > 0
    assert {key: len(values) for key, values in found.items()} == counts == dict.fromkeys(found, 12)
    for key, values in found.items():
        assert values == pytest.approx(undisturbed[key], abs=1e-4)


def test_A13_penalties_are_a_requests_own(checkpoint: Path) -> None:
    prompts = {"plain": b"short one", "repeats": b"another one", "frequent": bytes(range(32, 112))}
    penalties: dict[str, dict[str, float]] = {
        "plain": {}, "repeats": {"repetition_penalty": 2.0}, "frequent": {"frequency_penalty": 1.5}
    }  # fmt: skip

    def run(*names: str) -> dict[str, list[int]]:
        engine = build(checkpoint)
        for name in names:
            # Few tokens to choose from, so that the same ones would come again and again.
            ask(engine, name, prompts[name], logit_bias=dict.fromkeys(range(97, 105), 30.0), **penalties[name])
        tokens, _ = drain(engine)
        return {name: tokens[name, 0] for name in names}

    alone = {name: run(name)[name] for name in prompts}
    for order in itertools.permutations(prompts):
        assert run(*order) == alone
    for name in ("repeats", "frequent"):
        saved, penalties[name] = penalties[name], {}
        assert run(name)[name] != alone[name], "the penalty made no difference"
        penalties[name] = saved


def test_A15_no_end_token_of_any_kind_before_min_tokens(tmp_path: Path) -> None:
    engine = build(make_toy(tmp_path / "toy", eos_token_id=[2, 7]))
    assert set(engine.info.eos_token_ids) == {2, 7}
    want = {"logit_bias": {7: 100.0, 9: 90.0, 2: 80.0}, "min_tokens": 5, "max_tokens": 8, "ignore_eos": False}
    ask(engine, "ends", b"prompt with 2 and 7: \2\7\7", **want)
    ask(engine, "stops", b"prompt", **{**want, "ignore_eos": True}, stop_token_ids=(7, 9))
    ask(engine, "neither", b"prompt", **{**want, "ignore_eos": True})
    tokens, ends = drain(engine)
    for name, never in (("ends", {2, 7}), ("stops", {7, 9})):
        assert not never & set(tokens[name, 0][:5])
        assert tokens[name, 0][5:] == [7]
        assert ends[name, 0] is FinishReason.STOP
    assert tokens["neither", 0] == [7] * 8


def test_A39_a_step_writes_the_slots_of_its_own_tokens_and_no_other(checkpoint: Path) -> None:
    """Batches of 3, 5 and fewer rows, in a pool whose last block is in use: as many slots have changed as tokens were
    computed, and nobody reads one that was not written."""
    prompts = [bytes(range(33 + 9 * i, 40 + 12 * i)) for i in range(5)]
    expected = []
    for prompt in prompts:
        engine = build(checkpoint)
        ask(engine, "alone", prompt)
        expected.append(drain(engine)[0]["alone", 0])
    blocks = sum(-(-(len(prompt) + 11) // 4) for prompt in prompts)
    engine = build(checkpoint, num_gpu_blocks_override=blocks, max_model_len=40, enable_prefix_caching=False)
    pool = engine._runner.pool
    for cache in (pool.keys, pool.values):
        cache.fill_(float("nan"))
    for i in range(3):
        ask(engine, str(i), prompts[i])
    updates = engine.step()
    for i in range(3, 5):
        ask(engine, str(i), prompts[i])
    updates += engine.step()
    tokens, _ = drain(engine)
    for i in range(5):
        before = [token for update in updates if update.request_id == str(i) for token in update.tokens]
        assert before + tokens[str(i), 0] == expected[i]
    assert engine.stats.num_preemptions == 0
    for cache in (pool.keys, pool.values):
        for layer in cache:
            written = ~layer.isnan()  # [blocks, heads, slots, channels]
            assert written[blocks - 1].any()
            assert not written[blocks:].any(), "nothing was padded"
            assert int(written.sum()) == sum(len(prompt) + 11 for prompt in prompts) * layer[0, :, 0].numel()


def test_A12_a_seed_gives_the_same_text_in_any_company(checkpoint: Path) -> None:
    outcomes = set()
    for company in (0, 1, 7):
        engine = build(checkpoint)
        for i in range(company):
            ask(engine, f"other{i}", bytes(range(40, 45 + i)), temperature=1.0)
        ask(engine, "own", b"seeded", temperature=1.0, seed=42)
        outcomes.add(tuple(drain(engine)[0]["own", 0]))
    assert len(outcomes) == 1


def test_unseeded_requests_vary_and_n_differ(checkpoint: Path) -> None:
    engine = build(checkpoint)
    ask(engine, "a", b"same prompt", temperature=1.5)
    ask(engine, "b", b"same prompt", temperature=1.5)
    ask(engine, "c", b"same prompt", temperature=1.5, seed=5, n=3)
    tokens, _ = drain(engine)
    assert len({tuple(t) for t in tokens.values()}) == 5


def test_A11_n_shares_the_prompt_and_greedy_texts_are_equal(checkpoint: Path) -> None:
    engine = build(checkpoint)
    ask(engine, "n", bytes(range(48, 88)), n=4)
    tokens, ends = drain(engine)
    assert len(ends) == 4
    assert len({tuple(t) for t in tokens.values()}) == 1
    assert engine.stats.prefix_cache_hits >= 3 * 36, "the siblings found the first one's prompt"
    assert engine.stats.prompt_tokens == 40


def test_prefix_cache_is_hit_and_changes_nothing(checkpoint: Path) -> None:
    engine = build(checkpoint)
    ask(engine, "cold", b"a shared beginning of some length, then this")
    cold = drain(engine)[0]["cold", 0]
    assert engine.stats.prefix_cache_hits == 0
    ask(engine, "warm", b"a shared beginning of some length, then this")
    assert drain(engine)[0]["warm", 0] == cold
    assert engine.stats.prefix_cache_hits == 40  # all whole blocks but the last token's


def test_A38_salts_share_nothing(checkpoint: Path) -> None:
    engine = build(checkpoint)
    for salt, hits in [("a", 0), ("b", 0), ("", 0), ("a", 20)]:
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        name = f"{salt}{hits}"
        engine.add(make_request(engine.info, list(b"twenty-one characters"), params, id=name, cache_salt=salt))
        before = engine.stats.prefix_cache_hits
        drain(engine)
        assert engine.stats.prefix_cache_hits - before == hits


def test_A05_stop_ids_end_their_own_request_alone(checkpoint: Path) -> None:
    engine = build(checkpoint)
    script = {97: 1, 99: 1, 98: 1, 100: 1}
    for name, stops in {"r1": (97, 98), "r2": (98,), "r3": ()}.items():
        ask(engine, name, b"prompt", temperature=1.0, seed=1, max_tokens=40, stop_token_ids=stops,
            logit_bias=dict.fromkeys(script, 100.0))  # fmt: skip
    tokens, ends = drain(engine)
    full = tokens["r3", 0]
    first = {stop: full.index(stop) for stop in (97, 98)}
    assert tokens["r1", 0] == full[: min(first.values()) + 1]
    assert tokens["r2", 0] == full[: first[98] + 1]
    assert ends == {("r1", 0): FinishReason.STOP, ("r2", 0): FinishReason.STOP, ("r3", 0): FinishReason.LENGTH}


def test_A33_abort_at_every_moment_frees_everything(checkpoint: Path) -> None:
    for moment in range(12):
        engine = build(checkpoint, max_num_batched_tokens=8)
        ask(engine, "kept", b"kept")
        ask(engine, "gone", bytes(range(40, 80)), n=3)
        updates = []
        for _ in range(moment):
            updates += engine.step()
        engine.abort("gone", 1)
        updates += engine.step()
        engine.abort("gone")
        _, ends = drain(engine)
        seen = {(u.request_id, u.index): u.finish for u in updates if u.finish} | ends
        assert len(seen) == 4
        assert all(seen["gone", i] in (FinishReason.ABORT, FinishReason.LENGTH) for i in range(3))
        assert seen["kept", 0] is FinishReason.LENGTH


def test_abort_of_the_first_continuation_lets_its_siblings_go_on(checkpoint: Path) -> None:
    engine = build(checkpoint, max_num_batched_tokens=8)
    ask(engine, "n", bytes(range(40, 80)), n=3)
    engine.step()
    engine.abort("n", 0)
    _, ends = drain(engine)
    assert ends == {("n", 0): FinishReason.ABORT, ("n", 1): FinishReason.LENGTH, ("n", 2): FinishReason.LENGTH}


def test_a_step_that_raises_ends_its_own_requests_and_the_loop_goes_on(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(checkpoint)
    ask(engine, "struck", b"struck", n=2)
    engine.step()
    forward = engine._runner.forward

    def broken(plan: Any) -> None:
        raise RuntimeError("out of memory, say")

    monkeypatch.setattr(engine._runner, "forward", broken)
    ends = {(u.request_id, u.index): u.finish for u in engine.step()}
    monkeypatch.setattr(engine._runner, "forward", forward)
    _, later = drain(engine)
    assert FinishReason.ERROR in (ends | later).values()
    ask(engine, "next", b"struck")
    reference = build(checkpoint)
    ask(reference, "next", b"struck")
    assert drain(engine)[0]["next", 0] == drain(reference)[0]["next", 0]


def test_A44_logits_that_are_not_finite_end_one_request_with_an_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(checkpoint)
    ask(engine, "bad", b"bad")
    ask(engine, "good", b"good", max_tokens=3)
    logits = engine._runner.model.logits

    def poisoned(hidden: Any) -> Any:
        values = logits(hidden)
        values[0] = float("nan")
        return values

    monkeypatch.setattr(engine._runner.model, "logits", poisoned)
    tokens, ends = drain(engine)
    assert ends["bad", 0] is FinishReason.ERROR
    assert tokens["bad", 0] == []
    assert ("good", 0) in ends


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("auto", "auto"), ("float32", "bfloat16"), ("bfloat16", "auto")])
def test_A44_hidden_states_over_65504_are_served(tmp_path: Path, dtype: str, kv_cache_dtype: str) -> None:
    """As Gemma's are: float16 ends there."""
    folder = make_toy(tmp_path / "toy")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 1e6
    save_file({name: weight.half() if "norm" in name else weight for name, weight in weights.items()},
              folder / "model.safetensors")  # fmt: skip
    engine = build(folder, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    ask(engine, "loud", b"loud", logprobs=1)
    tokens, ends = drain(engine)
    assert len(tokens["loud", 0]) == 12
    assert ends["loud", 0] is FinishReason.LENGTH
    with pytest.raises(ConfigError, match="--dtype float16 is not served on a CPU"):
        build(folder, dtype="float16")


def test_A48_a_model_larger_than_the_memory_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "available_bytes", lambda device: 100_000)
    with pytest.raises(ConfigError, match=r"room for 0 blocks; one takes [\d,]+ bytes.*--kv-cache-memory-bytes"):
        build(checkpoint, num_gpu_blocks_override=None)


def test_A48_what_cannot_fit_is_refused_with_numbers(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="max-model-len 128"):
        build(checkpoint, num_gpu_blocks_override=8)
    with pytest.raises(ConfigError, match="kv-cache-memory-bytes"):
        build(checkpoint, num_gpu_blocks_override=None, kv_cache_memory_bytes=1)
    capped = build(checkpoint, num_gpu_blocks_override=8, max_model_len=None)
    assert capped.info.max_model_len == 32
    assert any(decision.name == "max_model_len" for decision in capped.info.decisions)


def test_A17_context_errors_carry_the_real_numbers(checkpoint: Path) -> None:
    engine = build(checkpoint, max_model_len=64)
    for prompt, limit in [(8, 60), (70, 1), (64, 1)]:
        with pytest.raises(ContextLengthError, match="64") as caught:
            ask(engine, "long", b"x" * prompt, max_tokens=limit)
        assert str(prompt) in caught.value.message
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ContextLengthError, match=str(10**12)):
        ask(engine, "huge", b"x", max_tokens=10**12)
    ask(engine, "exact", b"x" * 8, max_tokens=56)
    assert len(drain(engine)[0]["exact", 0]) == 56


def test_A14_ids_that_do_not_exist_are_refused_by_name(checkpoint: Path) -> None:
    engine = build(checkpoint)
    vocab = engine.info.vocab_size
    for field, value in [("logit_bias", {vocab: 5.0}), ("stop_token_ids", (vocab,))]:
        with pytest.raises(RequestError) as caught:
            ask(engine, "bad", b"x", **{field: value})
        assert caught.value.param == field
    with pytest.raises(RequestError) as caught:
        engine.add(make_request(engine.info, [0, vocab], SamplingParams(), id="bad"))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="no tokens"):
        engine.add(make_request(engine.info, [], SamplingParams(), id="empty"))


def test_the_queue_has_a_bound(checkpoint: Path) -> None:
    engine = build(checkpoint, max_num_queued_reqs=2)
    ask(engine, "a", b"a")
    ask(engine, "b", b"b")
    with pytest.raises(OverloadedError):
        ask(engine, "c", b"c")
    drain(engine)
    ask(engine, "c", b"c")
    assert ("c", 0) in drain(engine)[1]


def test_one_id_runs_once_at_a_time(checkpoint: Path) -> None:
    engine = build(checkpoint)
    ask(engine, "a", b"a")
    with pytest.raises(RequestError, match="running already"):
        ask(engine, "a", b"a")
    drain(engine)
