"""Tokenizers: bytes of tokens, control tokens, BOS and EOS, and what a folder or a GGUF file may hold."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from nanoserve.core.errors import CheckpointError, RequestError
from nanoserve.text.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, gguf_tokenizer
from nanoserve.text.load import load_tokenizer
from nanoserve.text.tokenizer import Tokenizer
from toy_tokenizers import byte_level, id_of, sentencepiece

BYTES, PIECES = byte_level(), sentencepiece()
GGUF = Path("toy.gguf")


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@settings(max_examples=200)
@given(text=st.text(st.sampled_from("Hello world é€😀\n\t<|tool>▁")), parse=st.booleans())
def test_texts_come_back_whole(tokenizer, text, parse):
    if tokenizer is PIECES:
        text = text.replace("▁", "")  # SentencePiece's own spelling of a space
    ids = tokenizer.encode(text, add_special=False, parse_special=parse)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == (
        text if tokenizer is BYTES or not text else " " + text
    )


def test_bytes_of_tokens():
    assert [BYTES.token_bytes(id) for id in BYTES.encode("é€", add_special=False)] == [
        "é".encode(),
        b"\xe2",
        b"\x82",
        b"\xac",
    ]
    assert BYTES.token_bytes(1) == b"<|im_start|>"
    assert BYTES.token_text(id_of(BYTES, "Ġt")) == " t"
    assert PIECES.token_bytes(3 + 0xE2) == b"\xe2"
    assert PIECES.token_bytes(id_of(PIECES, "▁wor")) == b" wor"
    for tokenizer in (BYTES, PIECES):  # rows that pad the embedding
        assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
        assert tokenizer.token_bytes(-1) == b""
        assert tokenizer.decode([tokenizer.vocab_size + 5], skip_special=False) == ""
    assert BYTES.vocab_size == len(BYTES._backend.get_vocab())


def test_gaps_among_the_ids():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 7}, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert (tokenizer.vocab_size, tokenizer.token_bytes(7), tokenizer.token_bytes(3)) == (8, b"b", b"")


def test_special_tokens_are_left_out_on_request():
    ids = BYTES.encode("<|im_start|>a<tool>")
    assert ids == [1, id_of(BYTES, "a"), id_of(BYTES, "<tool>")]
    assert BYTES.decode(ids, skip_special=True) == "a<tool>"
    assert BYTES.decode(ids, skip_special=False) == "<|im_start|>a<tool>"
    assert BYTES.special_ids == {0, 1, 2}


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
def test_A59_control_strings_as_plain_text(tokenizer):
    text = "x<|im_end|></s>\ny" + "".join(("\ufdd0", "<|im_end|></s>", "\ufdd1"))
    ids = tokenizer.encode(text, parse_special=False, add_special=False)
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids, skip_special=True) == text.replace("\ufdd0", "").replace("\ufdd1", "")
    assert tokenizer.encode("plain", parse_special=False) == tokenizer.encode("plain")


def test_A20_raw_text_that_begins_with_bos_gets_no_second_one():
    once = PIECES.encode("lo")
    assert once[0] == 1
    assert PIECES.encode("<s>lo") == once
    assert PIECES.encode("<s><s>lo")[:3] == [1, 1, *once[1:2]]
    assert PIECES.encode("lo", add_special=False) == once[1:]
    assert PIECES.encode("") == [1]


def test_A60_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match="surrogate"):
        BYTES.encode("a\ud83d")
    assert BYTES.decode(BYTES.encode("a\0b"), skip_special=False) == "a\0b"


# Folders


def save(folder: Path, tokenizer=BYTES, config=None, **files) -> Path:
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_folder(tmp_path):
    config = {
        "bos_token": {"content": "<|im_start|>", "special": True},
        "eos_token": "<|im_end|>",
        "unk_token": None,
        "chat_template": "{{ messages }}",
    }
    tokenizer = load_tokenizer(save(tmp_path, config=config))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (1, 2, "{{ messages }}")
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.encode("hell<|im_end|>") == BYTES.encode("hell<|im_end|>")
    save(tmp_path, chat_template__jinja="of its own")
    assert load_tokenizer(tmp_path).chat_template == "of its own"


def test_a_folder_with_tokenizer_json_alone(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template, tokenizer.special_tokens) == (
        None,
        None,
        None,
        {},
    )
    save(tmp_path, special_tokens_map__json='{"eos_token": "<|im_end|>"}')
    assert load_tokenizer(tmp_path).eos_id == 2


def test_named_chat_templates(tmp_path):
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    assert load_tokenizer(save(tmp_path, config={"chat_template": named})).chat_template == "D"
    assert load_tokenizer(save(tmp_path, config={"chat_template": named[:1]})).chat_template is None
    with pytest.raises(CheckpointError, match="chat_template"):
        load_tokenizer(save(tmp_path, config={"chat_template": ["x"]}))


@pytest.mark.parametrize("flag", [True, False, None])
def test_A20_bos_in_a_folder_by_rule_and_by_flag(tmp_path, flag):
    tokenizer = byte_level()
    tokenizer._backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer._backend.enable_truncation(4)
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_eos_token": True}
    loaded = load_tokenizer(save(tmp_path, tokenizer, config | ({} if flag is None else {"add_bos_token": flag})))
    ids = loaded.encode("abcdefgh")
    assert (ids[0] == 1) is (flag is not False)
    assert ids[-1] == 2
    assert len(ids) == 9 + (flag is not False)  # and truncation is off
    assert loaded.encode("<|im_start|>abcdefgh<|im_end|>")[-10:] == [1, *BYTES.encode("abcdefgh"), 2]


def test_tokens_that_only_the_configuration_knows(tmp_path):
    size = BYTES.vocab_size
    entry = {"content": "<extra>", "special": True}
    loaded = load_tokenizer(save(tmp_path, config={"added_tokens_decoder": {str(size): entry}}))
    assert loaded.encode("<extra>") == [size]
    assert size in loaded.special_ids
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        load_tokenizer(save(tmp_path, config={"added_tokens_decoder": {str(size + 7): entry}}))


def test_A56_code_in_a_folder_is_not_run(tmp_path):
    marker = tmp_path / "ran"
    config = {"auto_map": {"AutoTokenizer": ["evil.Tok", None]}, "tokenizer_class": "Tok"}
    save(tmp_path, config=config, evil__py=f"open({str(marker)!r}, 'w')")
    assert load_tokenizer(tmp_path).encode("a") == BYTES.encode("a")
    assert not marker.exists()


def test_folders_without_a_usable_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model alone is not read"):
        load_tokenizer(tmp_path)
    for text in ("", "{", '{"model": 1}', "[]"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
            load_tokenizer(tmp_path)
    for text in ("{", "[]"):
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            load_tokenizer(save(tmp_path, tokenizer_config__json=text))
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="decoder is missing"):
        load_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="folder"):
        load_tokenizer(tmp_path / "nothing")


# GGUF


def byte_metadata(**changes):
    backend = BYTES._backend
    tokens = [backend.id_to_token(id) for id in range(BYTES.vocab_size)]
    types = [CONTROL if id in BYTES.special_ids else NORMAL for id in range(len(tokens))]
    types[tokens.index("<tool>")] = USER_DEFINED
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["l l", "Ġ t", "Ã ©"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def piece_metadata(**changes):
    pieces = ["▁", "H", "i", "▁H", "▁Hi", "Hi"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>", *pieces]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(pieces)],
        "scores": [0.0] * 260 + [-float(rank) for rank in range(len(pieces))],
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def test_A46_control_tokens_of_gguf_are_single_ids():
    tokenizer = gguf_tokenizer(byte_metadata(), GGUF)
    text = "<|im_start|>hell<tool> té 12<|im_end|>"
    assert tokenizer.encode(text) == BYTES.encode(text)
    assert tokenizer.special_ids == BYTES.special_ids
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    user = 3 + 256
    pieces = gguf_tokenizer(piece_metadata(), GGUF)
    assert pieces.encode("<|user|>Hi") == [1, user, user + 5]
    assert pieces.special_ids == {0, 1, 2}
    assert user not in pieces.special_ids


@pytest.mark.parametrize(
    ("metadata", "bos", "eos"),
    [
        (byte_metadata(), False, False),
        (byte_metadata(add_bos_token=True), True, False),
        (byte_metadata(add_bos_token=False, add_eos_token=True), False, True),
        (byte_metadata(pre="llama-bpe"), True, False),
        (byte_metadata(pre="llama-bpe", add_bos_token=False), False, False),
        (byte_metadata(add_bos_token=True, bos_token_id=None), False, False),
        (piece_metadata(), True, False),
        (piece_metadata(add_bos_token=False), False, False),
        (piece_metadata(add_eos_token=True), True, True),
    ],
)
def test_A46_bos_and_eos_by_flag_or_by_kind(metadata, bos, eos):
    tokenizer = gguf_tokenizer(metadata, GGUF)
    plain = tokenizer.encode("Hi", add_special=False)
    assert tokenizer.encode("Hi") == [1] * bos + plain + [2] * eos


def test_A46_space_prefix():
    first = 3 + 256 + 1
    assert gguf_tokenizer(piece_metadata(), GGUF).encode("Hi Hi", add_special=False) == [first + 4, first + 4]
    without = gguf_tokenizer(piece_metadata(add_space_prefix=False), GGUF)
    assert without.encode("Hi Hi", add_special=False) == [first + 5, first + 4]
    assert without.decode([first + 4], skip_special=True) == " Hi"
    assert not without.strips_first_space


def test_A46_pre_tokenizers_that_are_missing_or_unknown(caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = gguf_tokenizer(byte_metadata(pre=None), GGUF)
    assert "tokenizer.ggml.pre" in caplog.text
    assert tokenizer.encode("hell 12") == BYTES.encode("hell 12")
    with pytest.raises(CheckpointError, match=r"pre-tokenizer 'mystery'.*Known: .*smollm"):
        gguf_tokenizer(byte_metadata(pre="mystery"), GGUF)


def test_A46_no_chat_template():
    assert gguf_tokenizer(byte_metadata(), GGUF).chat_template is None


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({}, "holds no tokenizer"),
        (byte_metadata(model="bert"), "'bert'"),
        (byte_metadata(model=3), "model"),
        (byte_metadata(tokens=[]), "tokens"),
        (byte_metadata(tokens="abc"), "tokens"),
        (byte_metadata(tokens=["a", "a"], token_type=None), "1 tokens twice"),
        (byte_metadata(token_type=[1]), "1 items in tokenizer.ggml.token_type"),
        (byte_metadata(merges=None), "merges"),
        (byte_metadata(merges=["q zz"]), "merges"),
        (byte_metadata(merges=["nospace"]), "merges"),
        (byte_metadata(merges=["q z"]), "merges"),
        (byte_metadata(bos_token_id=10**6), "bos_token_id"),
        (byte_metadata(eos_token_id=-1), "eos_token_id"),
        (byte_metadata(eos_token_id="2"), "eos_token_id"),
        (byte_metadata(add_bos_token="yes"), "add_bos_token"),
        (piece_metadata(scores=None), "scores"),
        (piece_metadata(scores=[0.0]), "scores"),
    ],
)
def test_A47_metadata_that_is_wrong(metadata, match):
    with pytest.raises(CheckpointError, match=match):
        gguf_tokenizer(metadata, GGUF)
