"""Every family and variant against transformers: logits, and greedy tokens, through a paged cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import transformers as hf

from nanoserve.attention.interface import AttentionBackend
from nanoserve.attention.native import NativeAttention
from nanoserve.attention.reference import ReferenceAttention
from nanoserve.attention.sdpa import SdpaAttention
from nanoserve.models.families import model_config
from nanoserve.models.parameters import num_parameters, parameters
from nanoserve.models.transformer import Transformer
from nanoserve.ops.native.library import load
from reference.harness import Run, config_json, error, greedy, ours, prefill, random_model, reference_logits
from reference.variants import SIZES, VARIANTS

LIMIT = 1e-5
PROMPT = torch.randint(0, 97, (23,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pair(
    config: hf.PretrainedConfig, max_len: int, attention: AttentionBackend | None = None
) -> tuple[hf.PreTrainedModel, Transformer]:
    theirs = random_model(config)
    return theirs, ours(model_config(config_json(config)), theirs.state_dict(), max_len, attention)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens(name: str) -> None:
    """The prompt in odd chunks, then 64 tokens. One pass of the reference over prompt and output then says of each
    token whether it is the reference's own next one; the length served is that of the whole, since `dynamic` and
    `longrope` depend on it."""
    total = len(PROMPT) + 64
    theirs, model = pair(VARIANTS[name](), max_len=total)
    tokens, logits = greedy(Run(model, total), PROMPT, 64, chunks=[3, 1, 7, 5])
    expected = reference_logits(theirs, PROMPT + tokens)
    assert error(logits, expected) <= LIMIT
    assert tokens == expected.argmax(-1)[len(PROMPT) - 1 : -1].tolist()
    assert len(set(tokens)) > 8, "an output this monotonous would show little"


@pytest.mark.parametrize("name", ["llama-tied-biases", "smollm3-window", "qwen3-window-bias"])
def test_the_reference_backend_agrees(name: str) -> None:
    theirs, model = pair(VARIANTS[name](), 32, ReferenceAttention())
    assert error(prefill(Run(model, 32), PROMPT, [5]), reference_logits(theirs, PROMPT)) <= LIMIT


def native_attention() -> NativeAttention:
    return NativeAttention(load(threads=1))


@pytest.mark.parametrize("backend", [SdpaAttention, ReferenceAttention, native_attention])
@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 36, 64])
def test_A35_chunks_never_see_what_is_not_written(chunk: int, backend: Callable[[], AttentionBackend]) -> None:
    ids = (PROMPT * 2)[:37]
    theirs, model = pair(VARIANTS["llama"](), 64, backend())
    assert error(prefill(Run(model, 64, block_size=16), ids, [chunk]), reference_logits(theirs, ids)) <= LIMIT


WINDOWED = {
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=8),
    "qwen2-mixed-layers": lambda: hf.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=2
    ),
    "qwen3-switched-off": lambda: hf.Qwen3Config(**SIZES, head_dim=12, use_sliding_window=False, sliding_window=8),
}


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("length", [7, 8, 9, 20])
@pytest.mark.parametrize("backend", [SdpaAttention, native_attention])
def test_A40_sliding_window_at_its_edges(name: str, length: int, backend: Callable[[], AttentionBackend]) -> None:
    theirs, model = pair(WINDOWED[name](), 64, backend())
    for chunks in ([length], [3], [8, 1]):
        tokens, logits = greedy(Run(model, 64), PROMPT[:length], 40 - length, chunks)
        expected = reference_logits(theirs, PROMPT[:length] + tokens)
        assert error(logits, expected) <= LIMIT
        assert tokens == expected.argmax(-1)[length - 1 : -1].tolist()


def test_A40_use_sliding_window_false_means_full_attention() -> None:
    for family in ("qwen2", "qwen3"):
        raw = {**SIZES, "model_type": family, "head_dim": 12, "use_sliding_window": False, "sliding_window": 8,
               "layer_types": ["sliding_attention"] * 4}  # fmt: skip
        assert {layer.window for layer in model_config(raw).layers} == {None}


def test_rows_of_a_step_do_not_disturb_each_other() -> None:
    """Three rows of different ages, decoding and prefilling in the same steps, equal each row alone."""
    _, model = pair(VARIANTS["qwen3-window-bias"](), 64)
    texts = [PROMPT[:20], PROMPT[3:18], PROMPT[::-1][:17]]
    alone = [prefill(Run(model, 64), ids, [64]) for ids in texts]
    run = Run(model, 64, rows=3)
    found: list[list[torch.Tensor]] = [[], [], []]
    at = [0, 0, 0]
    for counts in [(4, 0, 0), (1, 9, 0), (1, 1, 6), (5, 1, 1), (9, 4, 10)]:
        work = [(row, texts[row][at[row] : at[row] + n]) for row, n in enumerate(counts) if n][::-1]
        for (row, ids), logits in zip(work, run.step(work), strict=True):
            found[row].append(logits)
            at[row] += len(ids)
    assert at == [len(ids) for ids in texts]
    for row in range(3):
        assert error(torch.cat(found[row]), alone[row]) <= LIMIT


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_the_reference_models(name: str) -> None:
    """Names, shapes and number: nothing missing, nothing left over."""
    config = VARIANTS[name]()
    theirs = random_model(config)
    facts = model_config(config_json(config))
    expected = {n: tuple(weight.shape) for n, weight in theirs.named_parameters()}
    assert {part.name: part.shape for parameter in parameters(facts) for part in parameter.parts} == expected
    assert num_parameters(facts) == sum(weight.numel() for weight in theirs.parameters())


def test_a_tied_head_is_the_embedding_itself() -> None:
    _, model = pair(VARIANTS["llama-tied-biases"](), 32)
    assert model.head is model.embed


def test_bfloat16_strays_no_further_than_the_reference_does() -> None:
    config = VARIANTS["qwen3"]()
    theirs = random_model(config)
    exact = reference_logits(theirs, PROMPT)
    theirs.bfloat16()
    model = ours(model_config(config_json(config)), theirs.state_dict(), 32, dtype=torch.bfloat16)
    actual, reference = prefill(Run(model, 32), PROMPT, [5]), reference_logits(theirs, PROMPT).float()
    assert (actual - exact).norm() < 1.2 * (reference - exact).norm() < 0.1 * exact.norm()
