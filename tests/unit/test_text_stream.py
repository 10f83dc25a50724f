"""Ids to text as they come: for every way of cutting, the joined text is the whole text, up to the stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.core.params import SamplingParams
from nanoserve.core.request import FinishReason
from nanoserve.text.detokenizer import Detokenizer
from nanoserve.text.stops import StopStrings
from nanoserve.text.stream import TextStream
from toy_tokenizers import byte_level, id_of, sentencepiece

BYTES, PIECES = byte_level(), sentencepiece()
TOKENIZERS = {"bytes": BYTES, "pieces": PIECES}
EMOJI = "👩‍🚀"

texts = st.text(st.sampled_from("ab é€😀 \n<|</s>"), max_size=12)


@st.composite
def id_lists(draw, tokenizer, max_size=12):
    """Ids as a model may draw them, characters whole and in parts, control tokens too."""
    if draw(st.booleans()):
        return tokenizer.encode(draw(texts), add_special=False)
    return draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=max_size))


def cuts(draw, items):
    """The items in pushes of some sizes, empty ones too."""
    pushes, rest = [], list(items)
    while rest:
        size = draw(st.integers(0, len(rest)))
        pushes.append(rest[:size])
        rest = rest[size:]
    return pushes


def one_by_one(tokenizer, ids, sampling=None, prompt=(), finish=FinishReason.LENGTH, stop_id=None):
    stream = TextStream(tokenizer, prompt, sampling or SamplingParams())
    return [stream.push((id,), finish if last else None, stop_id if last else None)
              for id, last in zip(ids, [False] * (len(ids) - 1) + [True], strict=True)]  # fmt: skip


def joined(deltas):
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(st.data())
def test_A01_pushes_of_any_cut_join_to_the_whole_decoding(name, data):
    tokenizer = TOKENIZERS[name]
    prompt, ids = data.draw(id_lists(tokenizer)), data.draw(id_lists(tokenizer))
    skip = data.draw(st.booleans())
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    texts = [detokenizer.push(push) for push in cuts(data.draw, ids)]
    before = Detokenizer(tokenizer, (), skip).push(prompt)  # whole characters of the prompt
    assert before + "".join(texts) + detokenizer.flush() == tokenizer.decode(prompt + ids, skip_special=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100)
@given(st.data())
def test_A01_no_push_ends_in_half_a_character(name, data):
    tokenizer = TOKENIZERS[name]
    text = data.draw(st.text(st.sampled_from("é€😀👩‍🚀ab"), min_size=1, max_size=6))
    detokenizer = Detokenizer(tokenizer, (), True)
    for id in tokenizer.encode(text, add_special=False):
        assert "�" not in detokenizer.push((id,))
    assert detokenizer.flush() == ""


def test_A01_an_emoji_cut_by_the_limit_is_one_replacement_at_the_very_end():
    ids = BYTES.encode(EMOJI, add_special=False)
    assert len(ids) > 4
    deltas = one_by_one(BYTES, ids[:2])
    assert [delta.text for delta in deltas] == ["", "�"]
    assert deltas[-1].finish is FinishReason.LENGTH
    assert sum(len(delta.tokens) for delta in deltas) == 2
    assert joined(one_by_one(BYTES, ids)) == EMOJI
    whole = TextStream(BYTES, (), SamplingParams()).push(ids[:2], FinishReason.LENGTH, None)
    assert whole.text == "�"


def test_A02_first_letters_and_spaces_are_neither_lost_nor_made_up():
    word = [id_of(PIECES, piece) for piece in ("lo", "▁wor", "ld")]
    prompt = [1, id_of(PIECES, "▁Hel")]
    assert joined(one_by_one(PIECES, word, prompt=prompt)) == "lo world"
    assert joined(one_by_one(PIECES, word[1:], prompt=prompt)) == " world"
    assert joined(one_by_one(PIECES, [3 + 0x41, *word[1:]], prompt=prompt)) == "A world"
    # With nothing but BOS before it, the first space is the encoder's own.
    assert joined(one_by_one(PIECES, word[1:], prompt=[1])) == "world"
    assert PIECES.decode(prompt + word, skip_special=True) == "Hello world"


STOP = "a</s"


@pytest.mark.parametrize("pieces", [("al", "pha be", "ta</", "s>x"), tuple("alpha beta</s>x"), ("alpha beta</s>x",)])
@pytest.mark.parametrize(("include", "text"), [(False, "alpha bet"), (True, "alpha beta</s")])
def test_A03_stop_string_across_tokens(pieces, include, text):
    tokenizer = sentencepiece(pieces=tuple(dict.fromkeys(piece.replace(" ", "▁") for piece in pieces)))
    ids = [id_of(tokenizer, piece.replace(" ", "▁")) for piece in pieces]
    sampling = SamplingParams(stop=(STOP,), include_stop_str_in_output=include)
    prompt = [3 + 0x3A]
    for deltas in (
        one_by_one(tokenizer, ids, sampling, prompt),
        [TextStream(tokenizer, prompt, sampling).push(ids, FinishReason.LENGTH, None)],
    ):
        assert joined(deltas) == text
        end = next(delta for delta in deltas if delta.finish)
        assert (end.finish, end.stop) == (FinishReason.STOP, STOP)
        after = deltas[deltas.index(end) + 1 :]
        assert all(delta == ("", None, None, (), ()) for delta in after)
        counted = sum(len(delta.tokens) for delta in deltas)
        assert counted == min(k for k in range(len(ids) + 1) if STOP in "".join(pieces[:k]))


@pytest.mark.parametrize("include", [False, True])
def test_A03_the_text_of_an_end_token(include):
    ids = BYTES.encode("ok", add_special=False)
    end = 2
    skip = SamplingParams(stop_token_ids=(end,), include_stop_str_in_output=include)
    deltas = one_by_one(BYTES, [*ids, end], skip, finish=FinishReason.STOP, stop_id=end)
    assert joined(deltas) == "ok"  # a special token is left out either way
    assert (deltas[-1].finish, deltas[-1].stop, deltas[-1].tokens) == (FinishReason.STOP, end, (end,))
    show = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=False)
    deltas = one_by_one(BYTES, [*ids, end], show, finish=FinishReason.STOP, stop_id=end)
    assert joined(deltas) == ("ok<|im_end|>" if include else "ok")
    plain = id_of(BYTES, "!")
    deltas = one_by_one(BYTES, [*ids, plain], skip, finish=FinishReason.STOP, stop_id=plain)
    assert joined(deltas) == ("ok!" if include else "ok")


def test_A04_only_a_begun_stop_string_is_held_back():
    ids = BYTES.encode("one two three", add_special=False)
    deltas = one_by_one(BYTES, ids, SamplingParams(stop=("ZZZZZZZZZZ",)))
    assert [delta.text for delta in deltas] == [BYTES.token_text(id) for id in ids]
    stops = StopStrings(["three!"], include=False)
    assert stops.push("one two th") == ("one two ", None)
    assert stops.push("ree") == ("", None)
    assert stops.flush() == "three"


def find_and_cut(text, stops, include):
    """The plain reading: the stop that is complete first, of those the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, negative, stop = min(ends)
    return text[: end if include else end + negative], stop


@settings(max_examples=500)
@given(st.data())
def test_A03_stop_strings_equal_find_and_cut_for_every_cut(data):
    text = data.draw(st.text("ab", max_size=24))
    stops = data.draw(st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))
    include = data.draw(st.booleans())
    matcher, got, hit = StopStrings(stops, include), "", None
    for piece in cuts(data.draw, text):
        certain, hit = matcher.push("".join(piece))
        got += certain
        if hit is not None:
            break
        held = len("".join(text)) - len(got)
        assert held >= 0
    else:
        got += matcher.flush()
    assert (got, hit) == find_and_cut(text, stops, include)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200)
@given(st.data())
def test_A03_streams_with_stop_strings_equal_find_and_cut(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(id_lists(tokenizer, max_size=8))
    stops = data.draw(st.lists(st.sampled_from(["a", "é", "😀", "b a", " w", "ld", "<|", "lol", "�"]), max_size=2))
    include = data.draw(st.booleans())
    stream = TextStream(tokenizer, (3 + 0x3A,), SamplingParams(stop=stops, include_stop_str_in_output=include))
    text, tokens, end = "", 0, None
    pushes = [*cuts(data.draw, ids), []]
    for number, push in enumerate(pushes):
        delta = stream.push(push, FinishReason.LENGTH if number == len(pushes) - 1 else None, None)
        text += delta.text
        tokens += len(delta.tokens)
        end = end or (delta.finish and delta)
        assert len(delta.offsets) == len(delta.tokens)
    whole = Detokenizer(tokenizer, (3 + 0x3A,), True)
    expected, stop = find_and_cut(whole.push(ids) + whole.flush(), stops, include)
    assert (text, end.stop) == (expected, stop)
    assert end.finish is (FinishReason.LENGTH if stop is None else FinishReason.STOP)
    if stop is None:
        assert tokens == len(ids)


def test_A15_stop_strings_before_min_tokens_are_text():
    ids = BYTES.encode("aXbXcX", add_special=False)
    deltas = one_by_one(BYTES, ids, SamplingParams(stop=("X",), min_tokens=3))
    assert joined(deltas) == "aXb"
    assert sum(len(delta.tokens) for delta in deltas) == 4
    # One that began before, and is complete after, counts.
    ids = BYTES.encode("aaa", add_special=False)
    assert joined(one_by_one(BYTES, ids, SamplingParams(stop=("aa",), min_tokens=3))) == "a"


def test_of_stops_complete_at_once_the_longest_wins():
    assert StopStrings(["cd", "bcd", "abcdef"], include=False).push("xabcdef") == ("xa", "bcd")


def test_offsets_are_characters_before_each_token():
    ids = BYTES.encode("é€x", add_special=False)
    delta = TextStream(BYTES, (), SamplingParams()).push(ids, FinishReason.LENGTH, None)
    assert (len(ids), delta.offsets) == (5, (0, 1, 1, 1, 2))


def test_a_long_begin_of_a_stop_string_is_held_and_let_go():
    stream = TextStream(BYTES, (), SamplingParams(stop=("a" * 4000 + "b",)))
    a = BYTES.encode("a", add_special=False)
    texts = [stream.push(a, None, None).text for _ in range(20_000)]
    assert "".join(texts) == "a" * 16_000
    assert stream.push((), FinishReason.LENGTH, None).text == "a" * 4000
