"""The default model, as transformers computes the same file in float32.

transformers reads back what we wrote: one forward pass over a prompt and our whole output gives its choice after every
prefix of it. If each choice is our next token, then its own greedy loop, a token at a time, writes the same output.
Both sides start from the same ids: transformers' import of this file drops the tokenizer's split of digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.llm import RequestOutput
from server.real_server import RealServer

LENGTH = 128
TIE = 1e-4  # of logits: the rounding of two float32 sides, whose log probabilities differ by up to half of it

PATIENT = (
    "You are a patient and careful assistant in the public library of a small town by the sea. People of every age ask "
    "you about books, about the history of the place, about the tides and the birds, and now and then about their "
    "homework. Rules: 1. Answer in at most three sentences unless you are asked for more. 2. Never make up a title or "
    "an author. 3. When a question has several meanings, say which one you answer. 4. Write numbers below 13 as words. "
    "5. If you do not know, say so, and name a shelf where an answer might be found: history is on shelf A, nature on "
    "shelf B, crafts on shelf C, and novels, by their authors' names, are on shelves D to K. 6. Be kind to children, "
    "who may spell badly. 7. Do not speak of opening hours: they change too often, and hang at the door."
)


def user(text: str, system: str | None = None) -> list[dict[str, str]]:
    head = [] if system is None else [{"role": "system", "content": system}]
    return [*head, {"role": "user", "content": text}]


FRANCE = user("What is the capital of France?")
CHATS: list[list[dict[str, str]]] = [
    FRANCE,
    user("Who wrote 'Pride and Prejudice', and when was it published?"),
    user("Explain in two sentences why the sky is blue."),
    user("Write a Python function that returns the n-th Fibonacci number."),
    user("What does this do?\n\n```c\nint f(int n) {\n\treturn n <= 1 ? 1 : n * f(n - 1);\n}\n```"),
    user("SELECT name, COUNT(*) FROM birds GROUP BY name; -- explain this query"),
    user("Quelle est la capitale de l'Allemagne ? Répondez en français."),
    user("Was ist der Unterschied zwischen Wetter und Klima? Größe, Übung, Straße."),
    user("日本の首都はどこですか?"),
    user("Расскажи коротко о реке Волге."),
    user("ما هي عاصمة مصر؟"),
    user("Where do I find something about herons?", PATIENT),
    user("i need a book abowt piratts pleas", PATIENT),
    [
        *user("My name is Ada and I have three cats."),
        {"role": "assistant", "content": "Hello Ada! Three cats must keep you busy."},
        {"role": "user", "content": "What is my name, and how many cats do I have?"},
    ],
    [
        *user("Let us count. One.", "You count with the user, and say nothing else."),
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three."},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Five."},
    ],
    user("What is 1234567 + 89? Then compute 3.14159 * 2 and 10**12."),
    user("0 1 1 2 3 5 8 13 21 34 55 89 144 233"),
    user("Tell me a story with these: 🐙🎉👩‍🚀 and 🇫🇷!"),
    user("   \n\n\tspaces,   tabs\t\tand\n\n\nlines   "),
    user("Say it."),
]


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> hf.PreTrainedModel:
    return hf.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM(str(smollm2), max_model_len=1024)


class Miss(NamedTuple):
    """A place where transformers takes another token than we do."""

    chat: int
    position: int
    ours: str
    theirs: str
    gap: float  # between their logits of the two


@torch.inference_mode()
def logits_after(model: hf.PreTrainedModel, prompt: list[int], output: list[int]) -> Tensor:
    """[len(output), vocab]: after the prompt, and after each token of the output but the last."""
    ids = torch.tensor([prompt + output[:-1]])
    return model(ids, logits_to_keep=len(output), use_cache=False).logits[0]


def compare(llm: LLM, chat: int, logits: Tensor, result: RequestOutput) -> tuple[list[Miss], float]:
    """Where they differ, and the largest difference of the log probabilities of our tokens."""
    (output,) = result.outputs
    ours = torch.tensor(output.token_ids)
    best = logits.argmax(-1)
    misses = [
        Miss(chat, place, llm.tokenizer.token_text(int(ours[place])), llm.tokenizer.token_text(int(best[place])),
             float(logits[place, best[place]] - logits[place, ours[place]]))
        for place in (ours != best).nonzero().flatten().tolist()
    ]  # fmt: skip
    assert output.logprobs is not None
    logprobs = torch.tensor([entry.logprob for entry in output.logprobs])
    expected = logits.log_softmax(-1).gather(1, ours[:, None]).squeeze(1)
    return misses, float((logprobs - expected).abs().max())


def test_twenty_chats_token_for_token(llm: LLM, theirs: hf.PreTrainedModel) -> None:
    assert len(CHATS) == 20
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=0)
    results = llm.chat(CHATS, params, use_tqdm=False)
    misses, worst = list[Miss](), 0.0
    for chat, result in enumerate(results):
        output = result.outputs[0].token_ids
        assert len(output) == LENGTH
        found, error = compare(llm, chat, logits_after(theirs, result.prompt_token_ids, output), result)
        misses += found
        worst = max(worst, error)
    for miss in misses:
        print(miss)
    print(f"{len(misses)} of {len(CHATS) * LENGTH} tokens differ; log probabilities differ by at most {worst:.1e}")
    assert worst < 1e-3
    real = [miss for miss in misses if miss.gap >= TIE]
    assert not real, f"{len(real)} tokens differ, first {real[0]}"


@pytest.fixture(scope="module")
def france(theirs: hf.PreTrainedModel, llm: LLM) -> tuple[list[int], str]:
    """What transformers' own greedy loop answers, until the model's end token: ids, and their text."""
    prompt = llm.chat(FRANCE, SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
    ids = torch.tensor([prompt])
    out = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64,
                          eos_token_id=list(llm.info.eos_token_ids), pad_token_id=0)  # fmt: skip
    output = out[0, len(prompt) :].tolist()
    text = llm.tokenizer.decode(output, skip_special=True)
    assert "Paris" in text
    return output, text


def test_the_capital_of_france(llm: LLM, france: tuple[list[int], str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=64)
    (output,) = llm.chat(FRANCE, params, use_tqdm=False)[0].outputs
    assert (output.token_ids, output.text) == france
    assert output.finish_reason == "stop"
    assert "".join(delta.text for delta in llm.stream(FRANCE, params)) == output.text


def test_the_capital_of_france_from_the_server(smollm2: Path, france: tuple[list[int], str], tmp_path: Path) -> None:
    server = RealServer(tmp_path, smollm2, "--max-model-len", "1024", "--served-model-name", "smollm2")
    asked: dict[str, Any] = {"model": "smollm2", "messages": FRANCE, "temperature": 0}
    whole = server.client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == france[1]
    assert whole.usage.completion_tokens == len(france[0])
    chunks = server.client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == france[1]
    assert server.stop() == 0
