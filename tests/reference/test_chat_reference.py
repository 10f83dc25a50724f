"""Chat templates, byte for byte against transformers: templates of many styles, each with many conversations."""

from __future__ import annotations

import copy

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from chat_templates import SPECIAL, TEMPLATES
from nanoserve.core.errors import RequestError
from nanoserve.text.chat import ChatTemplate, encode_chat
from toy_tokenizers import byte_level

SYSTEM = {"role": "system", "content": "  You are <b>brief</b> & kind.\n"}
USER = {"role": "user", "content": "What's 2 + 2? Größe, 数, 😀 \t"}
ASSISTANT = {"role": "assistant", "content": " Four. \n"}
THINKING = {"role": "assistant", "content": "<think>\nHm, 2 + 2.\n</think>\n\nFour."}
REASONED = {"role": "assistant", "content": "Four.", "reasoning_content": "Hm.\n"}
TOOL = {"role": "tool", "tool_call_id": "call12345", "name": "add", "content": '{"sum": "é<4>"}'}


def call(**arguments):
    function = {"name": "add", "arguments": arguments}
    return {"id": "call12345", "type": "function", "function": function}


CALLS = {"role": "assistant", "content": None, "tool_calls": [call(a=2, b="<é>")]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds a<b & 'é'",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "z": {"enum": ["ü", None, True]}}},
        },
    }
    for name in ("add", "subtract")
]
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}

CASES = {
    "user": ([USER], {}),
    "system": ([SYSTEM, USER], {}),
    "turns": ([SYSTEM, USER, ASSISTANT, USER], {}),
    "closed": ([USER, ASSISTANT], {"add_generation_prompt": False}),
    "opened": ([USER, ASSISTANT], {}),
    "continued": ([USER, {"role": "assistant", "content": "The answer is"}], CONTINUED),
    "continued after a space": ([USER, {"role": "assistant", "content": "The answer is "}], CONTINUED),
    "two users": ([USER, USER], {}),
    "assistant first": ([ASSISTANT, USER], {}),
    "tools": ([SYSTEM, USER], {"tools": TOOLS}),
    "a call": ([USER, CALLS, TOOL], {"tools": TOOLS}),
    "two calls": ([USER, {**CALLS, "tool_calls": [call(a=1), call(b=[1, {"c": None}])]}, TOOL, TOOL], {"tools": TOOLS}),
    "call with content": ([USER, {**CALLS, "content": "Let me see."}, TOOL, ASSISTANT, USER], {"tools": TOOLS}),
    "thinking": ([USER, THINKING, USER], {}),
    "thinking last": ([USER, THINKING], {"add_generation_prompt": False}),
    "reasoned": ([USER, CALLS, TOOL, REASONED], {"add_generation_prompt": False}),
    "empty": ([{"role": "user", "content": ""}], {}),
    "braces": ([{"role": "user", "content": "{{ x }} {% if %} {# c #} \\n\r\n"}], {}),
}


def both(source, messages, options):
    """What transformers and this package make of it; None where they refuse."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level()._backend, chat_template=source, **SPECIAL)
    options = {"add_generation_prompt": True, **options}
    try:
        expected = theirs.apply_chat_template(copy.deepcopy(messages), tokenize=False, **options)
    except (jinja2.TemplateError, TypeError, ValueError):
        expected = None
    try:
        text = ChatTemplate(source, SPECIAL).render(copy.deepcopy(messages), **options)
    except RequestError:
        text = None
    return expected, text


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_A23_templates_render_as_in_transformers(name, case):
    messages, options = CASES[case]
    expected, text = both(TEMPLATES[name], messages, options)
    if "tools" in options and "tools" not in TEMPLATES[name]:
        assert text is None  # transformers drops them without a word
    else:
        assert text == expected


def test_most_cases_render():
    rendered = [both(source, *case)[1] is not None for source in TEMPLATES.values() for case in CASES.values()]
    assert sum(rendered) > 0.6 * len(rendered)


@pytest.mark.parametrize("options", [{"enable_thinking": False}, {"enable_thinking": True}])
def test_variables_of_the_template(options):
    expected, text = both(TEMPLATES["qwen"], [USER], options)
    assert text == expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["chatml", "qwen", "llama3"])
def test_A59_ids_equal_those_of_transformers(name, case):
    """Where no content looks like a control token, the ids are those of the rendered text."""
    messages, options = CASES[case]
    source = TEMPLATES[name]
    tokenizer = byte_level()
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, chat_template=source)
    expected, _ = both(source, messages, options)
    if expected is None or ("tools" in options and name == "chatml"):
        return
    options = {"add_generation_prompt": True, **options}
    ids = encode_chat(tokenizer, ChatTemplate(source, SPECIAL), messages, **options)
    assert ids == theirs.encode(expected, add_special_tokens=False)
