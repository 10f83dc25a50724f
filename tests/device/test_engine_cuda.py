"""The whole engine on a GPU gives what it gives on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.bench.toy import FAMILIES, make_toy

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROMPTS = ["hello", "a longer prompt, of more than one block of the cache", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True, repetition_penalty=1.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_cpus(family: str, tmp_path: Path) -> None:
    folder = str(make_toy(tmp_path / family, family))
    outputs = {}
    for device in ("cpu", "cuda"):
        settings = {"dtype": "float32", "num_gpu_blocks_override": 32, "max_model_len": 128, "backend": "torch"}
        llm = LLM(folder, device=device, **settings)
        params = [GREEDY, SEEDED, GREEDY]
        outputs[device] = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert outputs["cuda"] == outputs["cpu"]


def test_the_pool_is_sized_from_free_memory_and_bfloat16_is_the_default(tmp_path: Path) -> None:
    llm = LLM(str(make_toy(tmp_path / "toy")), gpu_memory_utilization=0.5)
    reasons = {decision.name: decision for decision in llm.info.decisions}
    assert reasons["dtype"].value == "bfloat16"
    assert reasons["device"].value == "cuda"
    assert llm.info.num_blocks > 1000
    assert len(llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24
