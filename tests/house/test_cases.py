"""62 ways in which engines of this kind have failed their users in public, and what becomes of each here.

A case is known by its number, which the names of its tests carry: test_A03_stop_string_across_tokens. "tested": what
is built does it right. "refused": the feature is not built, and asking for it is an error that names it. A case that
leaves this table, or whose last test goes, fails here.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

CASES = {
    # text and its ends
    "A01": "tested",  # output cut inside a character
    "A02": "tested",  # a first letter or space lost
    "A03": "tested",  # a stop string across tokens
    "A04": "tested",  # text held back for a stop string that never comes
    "A05": "tested",  # one request's stop tokens end another
    # what the API says
    "A06": "tested",  # the shape of logprobs
    "A07": "tested",  # logprobs off by a factor
    "A08": "refused",  # echo with logprobs of the prompt alone missing: no echo
    "A09": "tested",  # usage in streams
    "A10": "tested",  # finish_reason and object
    "A11": "tested",  # n and best_of: best_of other than n is refused
    # sampling
    "A12": "tested",  # a seed in company
    "A13": "tested",  # penalties by the order of the batch
    "A14": "tested",  # ids outside of the vocabulary
    "A15": "tested",  # min_tokens and every end token
    "A16": "tested",  # parameters that are dropped: honoured, or refused by name
    # prompts
    "A17": "tested",  # the numbers of a context error
    "A18": "tested",  # a long chat cut in silence
    "A19": "tested",  # prompts without tokens
    "A20": "tested",  # BOS twice
    "A21": "tested",  # a template that refuses
    "A22": "tested",  # tool calls without content, parts of content
    "A23": "tested",  # filters and tags of templates
    "A24": "tested",  # continuing the last message
    # tools, reasoning, constraints
    "A25": "refused",  # parallel calls in a stream: no tools
    "A26": "refused",  # malformed tools: no tools
    "A27": "refused",  # a cut think tag: reasoning is not told apart from text
    "A28": "refused",  # a schema that cannot be compiled: no constraints, A28 to A32 and A62
    "A29": "refused",  # a schema that crashes
    "A30": "refused",  # whitespace without end
    "A31": "refused",  # other scripts in a schema
    "A32": "refused",  # a costly regex
    # the engine
    "A33": "tested",  # clients that hang up
    "A34": "tested",  # preemption
    "A35": "tested",  # chunked prefill
    "A36": "tested",  # the prefix cache's key: salts; adapters are refused
    "A37": "tested",  # blocks found before they are computed
    "A38": "tested",  # what a tenant's prompt says to another
    "A39": "refused",  # padded rows of a CUDA graph: no graphs; that a step writes its own slots alone is tested
    "A40": "tested",  # sliding windows
    # checkpoints
    "A41": "tested",  # scalings of RoPE
    "A42": "tested",  # tied embeddings
    "A43": "tested",  # shards that are missing
    "A44": "tested",  # float16 overflows
    "A45": "refused",  # parts of a quantized checkpoint left plain: no GPTQ, AWQ or compressed-tensors
    "A46": "tested",  # the tokenizer of a GGUF file
    "A47": "tested",  # malformed GGUF files
    "A48": "tested",  # a KV cache that is too small
    "A49": "tested",  # an engine that is dead
    "A50": "refused",  # drafts that change the output: no drafts; the scheduler's room for them is tested
    # the outside world
    "A51": "tested",  # huge counts
    "A52": "tested",  # huge requests
    "A53": "tested",  # costly templates; a request's own template is refused
    "A54": "tested",  # templates that run code
    "A55": "tested",  # pickles
    "A56": "tested",  # code in checkpoints
    "A57": "refused",  # images from anywhere: no images
    "A58": "tested",  # comparing API keys
    "A59": "tested",  # control tokens in messages
    "A60": "tested",  # half characters and malformed JSON
    "A61": "tested",  # metrics without bound
    "A62": "refused",  # compiled schemas without bound
}


@pytest.fixture(scope="module")
def named() -> Counter[str]:
    """How many tests carry each number."""
    found: Counter[str] = Counter()
    for file in TESTS.rglob("test_*.py"):
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", file.read_text(), re.MULTILINE):
            found.update(re.findall(r"(?<=_)A\d\d(?=_)", name))
    return found


def test_every_case_is_in_the_table() -> None:
    assert list(CASES) == [f"A{number:02}" for number in range(1, 63)]


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_its_tests(case: str, named: Counter[str]) -> None:
    status, _, reason = CASES[case].partition(": ")
    if status == "not applicable":
        assert reason
    else:
        assert status in ("tested", "refused")
        assert not reason
        assert named[case] > 0, f"no test's name carries {case}"


def test_no_test_carries_a_number_without_a_case(named: Counter[str]) -> None:
    assert set(named) <= set(CASES)
