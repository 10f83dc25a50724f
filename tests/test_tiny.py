"""The one test before every commit: a toy checkpoint, one request, end to end in this process."""

from __future__ import annotations

from pathlib import Path

from nanoserve import LLM, SamplingParams
from nanoserve.bench.toy import make_toy


def test_one_request_end_to_end(tmp_path: Path) -> None:
    llm = LLM(str(make_toy(tmp_path / "toy")), num_gpu_blocks_override=16, max_model_len=64)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (first,) = llm.generate("hello", greedy, use_tqdm=False)
    assert first.prompt_token_ids == list(b"hello")
    assert len(first.outputs[0].token_ids) == 8
    assert first.outputs[0].finish_reason == "length"
    (again,) = llm.generate("hello", greedy, use_tqdm=False)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert "".join(delta.text for delta in llm.stream("hello", greedy)) == first.outputs[0].text
