"""The offline face: what may be asked of it, the order of the answers, and that nothing of a request stays behind."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.bench.toy import IM_END, IM_START
from nanoserve.core.errors import CheckpointError, ConfigError, ContextLengthError, OverloadedError, RequestError
from nanoserve.engine import build

SETTINGS = {"num_gpu_blocks_override": 256, "max_model_len": 256, "block_size": 4, "max_num_seqs": 8}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def llm(toy: Path) -> LLM:
    return LLM(str(toy), **SETTINGS)


def greedy(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **fields})


def ids_of(llm: LLM, prompt: Any, params: SamplingParams) -> list[int]:
    (result,) = llm.generate(prompt, params, use_tqdm=False)
    return result.outputs[0].token_ids


def settled(llm: LLM) -> None:
    """Nothing runs, waits or holds blocks."""
    llm._engine.step()  # tells of what was aborted
    stats = llm._engine.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert llm._engine.idle
    assert not llm._engine._requests
    assert not llm._jobs


# ---- generate


def test_a_prompt_is_text_or_ids(llm: LLM) -> None:
    (text,) = llm.generate("hello", greedy(), use_tqdm=False)
    (ids,) = llm.generate(list(b"hello"), greedy(), use_tqdm=False)
    assert (text.prompt, ids.prompt) == ("hello", None)
    assert text.prompt_token_ids == ids.prompt_token_ids == list(b"hello")
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids
    assert text.outputs[0].text == ids.outputs[0].text
    assert text.finished


def test_text_is_the_decoding_of_all_ids(llm: LLM) -> None:
    (result,) = llm.generate("hello", greedy(40), use_tqdm=False)
    whole = llm.tokenizer.decode(result.prompt_token_ids + result.outputs[0].token_ids, skip_special=True)
    assert result.prompt + result.outputs[0].text == whole


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[Any] = [chr(97 + i) * (1 + 7 * i % 23) for i in range(20)]
    prompts[3] = list(prompts[3].encode())
    params = [greedy(1 + 11 * i % 17) for i in range(20)]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == [
        list(prompt.encode()) if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    assert [len(result.outputs[0].token_ids) for result in results] == [one.max_tokens for one in params]
    for i in (0, 3, 11, 19):
        assert results[i].outputs[0].token_ids == ids_of(llm, prompts[i], params[i])
    assert len({result.request_id for result in results}) == 20


def test_one_params_serves_all_and_none_is_the_default(llm: LLM) -> None:
    assert [len(r.outputs[0].token_ids) for r in llm.generate(["a", "b"], greedy(3), use_tqdm=False)] == [3, 3]
    (result,) = llm.generate(list(b"x" * 250), use_tqdm=False)
    assert 1 <= len(result.outputs[0].token_ids) <= 6  # until an end token, or the context is full


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], greedy(), use_tqdm=False) == []
    assert llm.chat([], greedy(), use_tqdm=False) == []


def test_params_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts came with 3 SamplingParams") as caught:
        llm.generate(["a", "b"], [greedy()] * 3, use_tqdm=False)
    assert caught.value.param == "sampling_params"
    with pytest.raises(RequestError, match="2 prompts came with 0 SamplingParams"):
        llm.generate(["a", "b"], [], use_tqdm=False)


@pytest.mark.parametrize("prompts", [None, 3, [None], [1.5], [["1"]], [{"prompt": "a"}], [[1], None]])
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="must be a text") as caught:
        llm.generate(prompts, greedy(), use_tqdm=False)
    assert caught.value.param == "prompt"
    if not isinstance(prompts, list):
        with pytest.raises(RequestError, match="must be a text"):
            list(llm.stream(prompts, greedy()))


@pytest.mark.parametrize("params", [3, "x", {"temperature": 0}, [None]])
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="must be SamplingParams"):
        llm.generate(["a"], params, use_tqdm=False)
    with pytest.raises(RequestError, match="must be SamplingParams"):
        list(llm.stream("a", params))


def test_ids_may_come_in_arrays(llm: LLM) -> None:
    ids = list(b"hello")
    expected = ids_of(llm, ids, greedy())
    for prompt in (np.array(ids), list(np.array(ids)), torch.tensor(ids), [np.array(ids)], (i for i in [ids])):
        (result,) = llm.generate(prompt, greedy(), use_tqdm=False)  # type: ignore[arg-type]
        assert result.outputs[0].token_ids == expected
        assert [type(token) for token in result.prompt_token_ids] == [int] * len(ids)


@pytest.mark.parametrize(
    ("prompts", "params", "param"),
    [
        (["fine", ""], greedy(), "prompt"),
        (["fine", "x" * 300], greedy(), "prompt"),
        (["fine", [1, 10**6]], greedy(), "prompt"),
        ("fine", greedy(10**6), "max_tokens"),
        ("fine", greedy(logit_bias={IM_END + 1: 1.0}), "logit_bias"),
        ("fine", greedy(stop_token_ids=(IM_END + 1,)), "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, params: SamplingParams, param: str
) -> None:
    steps = llm._engine.stats.num_steps
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, params, use_tqdm=False)
    assert caught.value.param == param
    assert llm._engine.stats.num_steps == steps
    settled(llm)


def test_A17_the_context_error_is_a_request_error(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="256"):
        llm.generate("x" * 256, greedy(), use_tqdm=False)


def test_cached_tokens_are_reported(llm: LLM) -> None:
    prompt = "a beginning that nobody else in this file has"
    cold, warm = (llm.generate(prompt, greedy(), use_tqdm=False)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 44)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids


@pytest.mark.parametrize("show", [True, False])
def test_the_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str], show: bool) -> None:
    llm.generate(["a", "b"], greedy(2), use_tqdm=show)
    shown = capsys.readouterr()
    assert ("2/2" in shown.err) == show
    assert not shown.out
    assert show or not shown.err
    llm.generate(["a", "b"], greedy(2, n=3), use_tqdm=show)  # ends of one prompt in one step
    assert ("2/2" in capsys.readouterr().err) == show


# ---- chat


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": {"role": "user", "content": "x"}}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"chat_template": 3}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ],
)
def test_arguments_of_a_chat_that_make_no_sense(llm: LLM, arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(**{"messages": [{"role": "user", "content": "x"}], **arguments}, use_tqdm=False)
    assert caught.value.param == param


TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <|im_end|>"}]


def test_chat_of_one_and_of_several(llm: LLM) -> None:
    (one,) = llm.chat(TURNS, greedy(), use_tqdm=False)
    assert one.prompt_token_ids == [
        IM_START, *b"system\nbe brief", IM_END, *b"\n", IM_START, *b"user\nhi <|im_end|>", IM_END, *b"\n",
        IM_START, *b"assistant\n",
    ]  # fmt: skip
    several = llm.chat([TURNS[1:], TURNS], [greedy(3), greedy()], use_tqdm=False)
    assert several[1].prompt_token_ids == one.prompt_token_ids
    assert several[1].outputs[0].token_ids == one.outputs[0].token_ids
    assert len(several[0].outputs[0].token_ids) == 3


def test_A24_chat_continues_the_final_message(llm: LLM) -> None:
    turns = [TURNS[1], {"role": "assistant", "content": "The answer is"}]
    (result,) = llm.chat(turns, greedy(), use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert bytes(result.prompt_token_ids[-13:]) == b"The answer is"


def test_chat_with_another_template(llm: LLM) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{% endfor %}{{ mood }}"
    (result,) = llm.chat(TURNS, greedy(), use_tqdm=False, chat_template=template, chat_template_kwargs={"mood": "glad"})
    assert bytes(result.prompt_token_ids) == b"[system][user]glad"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_A20_the_offline_chat_has_one_bos(toy: Path, tmp_path: Path, adds_bos: bool) -> None:
    """Written by the template; a raw text gets it by the tokenizer's rule, and the two share their beginning."""
    folder = tmp_path / "bos"
    shutil.copytree(toy, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{{ bos_token }}{{ messages[0].content }}"
    config |= {"bos_token": "<|endoftext|>", "add_bos_token": adds_bos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    llm = LLM(str(folder), **SETTINGS)
    text = "a text of thirty-two characters."
    (chat,) = llm.chat([{"role": "user", "content": text}], greedy(2), use_tqdm=False)
    assert chat.prompt_token_ids == [256, *text.encode()]
    (raw,) = llm.generate(text, greedy(2), use_tqdm=False)
    (marked,) = llm.generate("<|endoftext|>" + text, greedy(2), use_tqdm=False)
    assert marked.prompt_token_ids == chat.prompt_token_ids
    assert raw.prompt_token_ids == chat.prompt_token_ids[0 if adds_bos else 1 :]
    assert marked.num_cached_tokens == 32
    assert raw.num_cached_tokens == (32 if adds_bos else 0)


@pytest.mark.parametrize(
    "source", ["{{ lipsum.__globals__['os'].system('touch MARK') }}", "{{ ''.__class__.__mro__ }}"]
)
def test_A54_no_template_runs_code_offline(llm: LLM, toy: Path, tmp_path: Path, source: str) -> None:
    """Neither the caller's own nor one that a model's folder brings."""
    mark, folder = tmp_path / "mark", tmp_path / "model"
    source = source.replace("MARK", str(mark))
    with pytest.raises(RequestError):
        llm.chat(TURNS, greedy(), use_tqdm=False, chat_template=source)
    shutil.copytree(toy, folder)
    (folder / "chat_template.jinja").write_text(source)
    evil = LLM(str(folder), **SETTINGS)
    for ask in (lambda: evil.chat(TURNS, greedy(), use_tqdm=False), lambda: list(evil.stream(TURNS, greedy()))):
        with pytest.raises(RequestError):
            ask()
    assert not mark.exists()
    assert len(ids_of(evil, "hello", greedy(3))) == 3


# ---- stream


@pytest.mark.parametrize("prompt", ["hello", list(b"hello"), TURNS], ids=["text", "ids", "chat"])
def test_a_stream_says_what_generate_says(llm: LLM, prompt: Any) -> None:
    ask = llm.chat if prompt is TURNS else llm.generate
    (whole,) = ask(prompt, greedy(30), use_tqdm=False)
    deltas = list(llm.stream(prompt, greedy(30)))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert [token for delta in deltas for token in delta.tokens] == whole.outputs[0].token_ids
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_a_stream_ends_with_its_stop_string(llm: LLM) -> None:
    (whole,) = llm.generate("hello", greedy(60), use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[10:12]
    deltas = list(llm.stream("hello", greedy(60, stop=(stop,))))
    assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
    assert (deltas[-1].finish, deltas[-1].stop) == ("stop", stop)
    settled(llm)


def test_A33_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    for taken in range(4):
        stream = llm.stream("x" * 100, greedy(100))
        for _ in itertools.islice(stream, taken):
            assert llm._engine.stats.kv_cache_usage > 0
        stream.close()
        settled(llm)


def test_A33_a_loop_that_raises_frees_its_blocks(llm: LLM) -> None:
    def fails() -> None:
        for _ in llm.stream("x" * 100, greedy(100)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    settled(llm)


def test_streams_take_turns(llm: LLM) -> None:
    prompts = {"one": "hello", "two": "another prompt", "three": TURNS}
    alone = {name: [d.tokens for d in llm.stream(prompt, greedy(20))] for name, prompt in prompts.items()}
    streams = {name: llm.stream(prompt, greedy(20)) for name, prompt in prompts.items()}
    together: dict[str, list[Any]] = {name: [] for name in prompts}
    for name in itertools.islice(itertools.cycle(prompts), 60):
        together[name].append(next(streams[name]).tokens)
    assert together == alone
    assert all(next(stream, None) is None for stream in streams.values())
    settled(llm)


def test_one_stream_waits_while_another_ends_and_a_batch_runs(llm: LLM) -> None:
    slow = llm.stream("slow", greedy(20))
    first = next(slow)
    list(llm.stream("fast", greedy(30)))
    llm.generate(["a", "b", "c"], greedy(5), use_tqdm=False)
    tokens = [*first.tokens, *(token for delta in slow for token in delta.tokens)]
    assert tokens == ids_of(llm, "slow", greedy(20))
    settled(llm)


def test_a_stream_has_one_continuation(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n must be 1") as caught:
        list(llm.stream("a", greedy(n=2)))
    assert caught.value.param == "n"


# ---- fields of an answer


def test_A11_n_continuations(llm: LLM) -> None:
    (same,) = llm.generate("hello", greedy(n=3), use_tqdm=False)
    assert [output.index for output in same.outputs] == [0, 1, 2]
    assert len({output.text for output in same.outputs}) == 1
    drawn = SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=12, ignore_eos=True)
    (first,), (second,) = (llm.generate("hello", drawn, use_tqdm=False) for _ in range(2))
    assert len({output.text for output in first.outputs}) == 3
    assert [output.token_ids for output in first.outputs] == [output.token_ids for output in second.outputs]
    settled(llm)


def test_A07_logprobs(llm: LLM) -> None:
    params = [greedy(6, logprobs=3), greedy(6, logprobs=0), greedy(6)]
    full, chosen, none = (result.outputs[0] for result in llm.generate(["hello"] * 3, params, use_tqdm=False))
    assert none.logprobs is None
    assert none.cumulative_logprob is None
    assert full.logprobs is not None
    assert chosen.logprobs is not None
    assert full.token_ids == chosen.token_ids == none.token_ids
    for token, entry, short in zip(full.token_ids, full.logprobs, chosen.logprobs, strict=True):
        assert len(entry.top_ids) == len(entry.top_logprobs) == 3
        assert (entry.top_ids[0], entry.top_logprobs[0]) == (token, entry.logprob)
        assert 0 >= entry.top_logprobs[0] >= entry.top_logprobs[1] >= entry.top_logprobs[2]
        assert (short.top_ids, short.logprob) == ((), pytest.approx(entry.logprob, abs=1e-5))
    assert full.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in full.logprobs))


def test_A03_stop_strings(llm: LLM) -> None:
    (whole,) = llm.generate("hello", greedy(60), use_tqdm=False)
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    stop = text[15:18]  # over several tokens: one is a byte
    at = text.index(stop)
    params = [
        greedy(60, stop=("never", stop), logprobs=0),
        greedy(60, stop=(stop,), include_stop_str_in_output=True),
        greedy(60, stop=("never",)),
    ]
    without, included, never = (result.outputs[0] for result in llm.generate(["hello"] * 3, params, use_tqdm=False))
    assert without.text == text[:at]
    assert included.text == text[: at + len(stop)]
    for output in (without, included):
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == ids[: len(output.token_ids)]
    assert without.logprobs is not None
    assert len(without.logprobs) == len(without.token_ids) < 60
    assert (never.text, never.finish_reason, never.stop_reason) == (text, "length", None)
    settled(llm)


def test_A05_stop_ids(llm: LLM) -> None:
    ids = ids_of(llm, "hello", greedy(30))
    stop = ids[9]
    at = ids.index(stop)
    params = [greedy(30, stop_token_ids=(stop,)), greedy(30, stop_token_ids=(stop,), include_stop_str_in_output=True)]
    without, included = (result.outputs[0] for result in llm.generate(["hello"] * 2, params, use_tqdm=False))
    for output in (without, included):
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == ids[: at + 1]
    assert llm.tokenizer.decode(ids[:at], skip_special=True).startswith(without.text.rstrip("\ufffd"))
    assert len(included.text) > len(without.text.rstrip("\ufffd"))


def test_A10_the_end_token_is_no_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={IM_END: 100.0}, min_tokens=3)
    (result,) = llm.generate("hello", params, use_tqdm=False)
    (output,) = result.outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", IM_END)
    assert len(output.token_ids) == 4
    assert output.token_ids[-1] == IM_END
    assert "<|im_end|>" not in output.text


# ---- the queue, and being interrupted


def test_a_queue_shorter_than_the_batch(toy: Path, llm: LLM) -> None:
    small = LLM(str(toy), **{**SETTINGS, "max_num_queued_reqs": 2, "max_num_seqs": 3})
    prompts = [chr(97 + i) * 5 for i in range(10)]
    expected = [result.outputs[0].token_ids for result in llm.generate(prompts, greedy(9), use_tqdm=False)]
    results = small.generate(prompts, greedy(9), use_tqdm=False)
    assert [result.outputs[0].token_ids for result in results] == expected
    streams = [small.stream(prompt, greedy(9)) for prompt in prompts]  # more loops than rows and places together
    for stream in streams:
        next(stream)
    for stream, ids in zip(streams, expected, strict=True):
        assert [token for delta in stream for token in delta.tokens] == ids[1:]
    with pytest.raises(OverloadedError):
        small.generate("n is more than can ever wait", greedy(n=3), use_tqdm=False)
    settled(small)


@pytest.mark.parametrize("part", ["forward", "sample"])
def test_ctrl_c_in_a_step_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    expected = ids_of(llm, "hello", greedy(20))
    original, calls = getattr(llm._engine._runner, part), itertools.count()

    def pressed(plan: Any) -> Any:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(plan)

    monkeypatch.setattr(llm._engine._runner, part, pressed)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([chr(97 + i) * 30 for i in range(12)], greedy(20), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is before
    settled(llm)
    assert ids_of(llm, "hello", greedy(20)) == expected


def test_ctrl_c_in_the_loop_of_a_stream(llm: LLM) -> None:
    def interrupted() -> None:
        for _ in llm.stream("hello", greedy(20)):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    settled(llm)


def test_a_stream_collected_inside_a_step_is_ended_after_it(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(llm, "hello", greedy(20))
    streams, original = [llm.stream("x" * 100, greedy(100))], llm._engine._runner.forward
    next(streams[0])

    def collected(plan: Any) -> Any:
        streams.clear()
        return original(plan)

    monkeypatch.setattr(llm._engine._runner, "forward", collected)
    assert ids_of(llm, "hello", greedy(20)) == expected
    settled(llm)


def test_threads_take_turns(llm: LLM) -> None:
    prompts = [chr(97 + i) * (5 + 3 * i) for i in range(6)]
    expected = [ids_of(llm, prompt, greedy(20)) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(3):
            assert list(pool.map(lambda prompt: ids_of(llm, prompt, greedy(20)), prompts)) == expected
    settled(llm)


# ---- settings and checkpoints


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"seed": "a"}, "--seed must be a whole number, not 'a'"),
        ({"gpu_memory_utilization": "a"}, "--gpu-memory-utilization must be a number, not 'a'"),
        ({"enable_prefix_caching": 3}, "--enable-prefix-caching must be true or false, not 3"),
        ({"tokenizer": 3}, "--tokenizer must be a text, not 3"),
        ({"num_gpu_blocks_override": 10**12}, "--num-gpu-blocks-override 1000000000000 makes a KV cache of"),
        ({"kv_cache_memory_bytes": 10**17}, "--kv-cache-memory-bytes 100000000000000000 makes a KV cache of"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(toy: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        LLM(toy, **wrong)


def test_more_rows_than_blocks_take_no_memory(toy: Path, llm: LLM) -> None:
    many = LLM(toy, **{**SETTINGS, "max_num_seqs": 10**12})
    assert ids_of(many, "hello", greedy()) == ids_of(llm, "hello", greedy())


@pytest.mark.parametrize("fault", [{"eos_token_id": 10**6}, {"temperature": -1}])
def test_what_is_wrong_is_told_before_the_weights_load(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    monkeypatch.setattr(build, "load_weights", lambda *arguments: pytest.fail("weights are loaded"))
    folder = shutil.copytree(toy, tmp_path / "toy")
    with pytest.raises(CheckpointError, match="tokenizer"):
        LLM(folder, **SETTINGS, tokenizer=str(tmp_path))
    (folder / "generation_config.json").write_text(json.dumps(fault))
    with pytest.raises(CheckpointError, match=next(iter(fault))):
        LLM(folder, **SETTINGS)


def test_dummy_weights_need_a_config_alone(toy: Path, tmp_path: Path) -> None:
    shutil.copy(toy / "config.json", tmp_path)
    settings: dict[str, Any] = {**SETTINGS, "load_format": "dummy", "tokenizer": str(toy)}
    first, second, third = (LLM(str(tmp_path), **settings, seed=seed) for seed in (0, 0, 1))
    ids = ids_of(first, "hello", greedy(20))
    assert ids == ids_of(second, "hello", greedy(20))
    assert ids != ids_of(third, "hello", greedy(20))


def test_a_folder_without_a_tokenizer_says_so(toy: Path, tmp_path: Path) -> None:
    shutil.copy(toy / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        LLM(str(tmp_path), load_format="dummy", **SETTINGS)


def test_a_model_without_a_chat_template_completes_and_does_not_chat(toy: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(toy, bare)
    config = (bare / "tokenizer_config.json").read_text()
    (bare / "tokenizer_config.json").write_text(config.replace('"chat_template"', '"unused"'))
    llm = LLM(str(bare), **SETTINGS)
    assert len(ids_of(llm, "hello", greedy(3))) == 3
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat(TURNS, greedy(), use_tqdm=False)
