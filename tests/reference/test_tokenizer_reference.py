"""Token ids against tokenizers, transformers and sentencepiece, over a corpus of many scripts and odd strings.

The vocabularies are trained here: GGUF files are written from them and must give the same ids as the original.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from nanoserve.text.load import load_tokenizer

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<tool_call>"

SENTENCES = [
    "The quick brown fox jumps over the lazy dog; it's 12:34 on 2024-05-06, isn't it? They've said we'll see.",
    "Der schnelle braune Fuchs springt über den faulen Hund – größer, süßer, Straße.",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από το τεμπέλικο σκυλί.",
    "敏捷的棕色狐狸跳过懒狗。今天是二〇二四年。",
    "素早い茶色の狐がのろまな犬を飛び越える。カタカナ、ひらがな。",
    "다람쥐 헌 쳇바퀴에 타고파. 빠른 갈색 여우.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول ١٢٣",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है १२३",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "def f(x):\n\treturn {'a': [1, 2, 3], \"b\": x ** 2}  # comment\n\n\nclass A: pass",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\path\\file.txt",
]
# fmt: off
ODD = [
    "", " ", "  ", "   x", "x   ", "\n", "\n\n\n", "\r\n\r\n", "\t\t x", " \n \n x", "\u00a0x\u00a0", "\u3000x",
    "\u200b",
    "12", "1234567890", "1,234.56", "½²Ⅷ①", "x1y22z333", "３４", "👩‍🚀👨‍👩‍👧‍👦", "😀😃", "🇫🇷🇩🇪", "❤️",
    "e\u0301 é", "ﬁ Å Å",
    "I'M HERE'S it'Ll we'Re 'tis", "aaaaaaaaaaaaaaaa", "====----====", "........",
    "HTTPServer camelCase XMLHttpRequest",
    "\x00\x01\x7f", "\ufeffbom", "\U00020000\U0001F9FF", "<|im_end|>", " <|im_start|>user\nhi<|im_end|>\n",
    "<|im_end", "<s></s>",
    "<tool_call> x <tool_call>", "▁x▁▁y", "<0x41>", "Ġx Ċ",
]
# fmt: on


def corpus(seed=0, count=400):
    """Sentences, odd strings, and mixtures of their parts."""
    draw = random.Random(seed)
    parts = [part for text in SENTENCES + ODD for part in (text, text[: len(text) // 2], text[len(text) // 3 :])]
    letters = "".join(SENTENCES + ODD)
    for _ in range(count):
        kind = draw.random()
        if kind < 0.5:
            yield draw.choice(("", " ", "\n")).join(draw.choices(parts, k=draw.randint(1, 4)))
        elif kind < 0.9:
            yield "".join(draw.choices(letters, k=draw.randint(1, 30)))
        else:
            yield "".join(chr(draw.choice((draw.randint(1, 0x2FFF), draw.randint(0xE000, 0x1FFFF)))) for _ in range(8))
    yield from SENTENCES + ODD


CORPUS = list(corpus())

# How the models' own tokenizer.json files spell their pre-tokenizers.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def splitting(pattern):
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )


ORIGINALS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: splitting(LLAMA3),
    "smaug-bpe": lambda: splitting(LLAMA3),
    "qwen2": lambda: splitting(QWEN2),
    "tekken": lambda: splitting(TEKKEN),
}


def train_byte_level(pre, ignore_merges=False):
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = ORIGINALS[pre]()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=CONTROLS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    backend.add_tokens([AddedToken(USER_DEFINED, special=False, normalized=False)])
    return backend


def write_gguf(path: Path, keys) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in keys.items():
        key = f"tokenizer.ggml.{name}"
        match value:
            case list():
                writer.add_array(key, value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_of(path: Path, backend, pre) -> Path:
    state = json.loads(backend.to_str())
    tokens = [backend.id_to_token(id) for id in range(backend.get_vocab_size())]
    types = [3 if token in CONTROLS else 4 if token == USER_DEFINED else 1 for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return write_gguf(path, keys | {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False})


@pytest.mark.parametrize("pre", ORIGINALS)
def test_gguf_byte_level_ids_equal_the_original(tmp_path, pre):
    original = train_byte_level(pre, ignore_merges=pre in ("llama-bpe", "tekken"))
    ours = load_tokenizer(gguf_of(tmp_path / "model.gguf", original, pre))
    assert len(json.loads(original.to_str())["model"]["merges"]) > 300
    for text in CORPUS:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special=True) == original.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == original.decode(ids, skip_special_tokens=False)


def test_gguf_with_digits_in_the_vocabulary_still_splits_them(tmp_path):
    """A file whose merges would join digits: the name of the pre-tokenizer keeps them apart."""
    backend = train_byte_level("gpt-2")
    assert len(backend.encode("2024").ids) < 4
    ours = load_tokenizer(gguf_of(tmp_path / "model.gguf", backend, "smollm"))
    assert [ours.token_text(id) for id in ours.encode("a 2024")] == ["a", " ", "2", "0", "2", "4"]


def test_folder_ids_equal_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    backend = train_byte_level("llama-bpe", ignore_merges=True)
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    theirs.save_pretrained(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == set(theirs.all_special_ids)
    for text in CORPUS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False) == ids
        if not text.startswith("<|im_start|>"):
            assert ours.encode(text) == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """SentencePiece's own BPE, as Llama 2 and Mistral have it."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text").write_text("\n".join(line for text in SENTENCES * 3 for line in text.split("\n") if line))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "model"),
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    return folder / "model.model"


def gguf_of_pieces(path: Path, model: Path, **keys) -> Path:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ids = range(processor.vocab_size())
    kinds = [
        2 if processor.is_unknown(id) else 3 if processor.is_control(id) else 6 if processor.is_byte(id) else 1
        for id in ids
    ]
    tokens = [processor.id_to_piece(id) for id in ids]
    scores = [processor.get_score(id) for id in ids]
    keys = {"model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": kinds, **keys}
    return write_gguf(path, keys | {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0})


def holds_control(text):
    return any(name in text for name in ("<s>", "</s>", "<unk>"))


def test_gguf_pieces_equal_sentencepiece(tmp_path, pieces):
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    ours = load_tokenizer(gguf_of_pieces(tmp_path / "model.gguf", pieces))
    assert any(theirs.is_byte(id) for text in CORPUS for id in theirs.encode(text))
    for text in CORPUS:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special=False, parse_special=False) == ids, text
        if "\x00" not in text:  # sentencepiece ends a text there
            assert ours.decode(ids, skip_special=True) == theirs.decode(ids), text
        if not holds_control(text):
            assert ours.encode(text) == [1, *ids]


def test_folder_of_pieces_equals_transformers(tmp_path, pieces):
    """With the decoder and the prefix space as transformers writes them, which are not SentencePiece's everywhere."""
    from transformers import LlamaTokenizer

    from_gguf = load_tokenizer(gguf_of_pieces(tmp_path / "model.gguf", pieces))
    merges = [tuple(merge) for merge in json.loads(from_gguf._backend.to_str())["model"]["merges"]]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    vocab = {processor.id_to_piece(id): id for id in range(processor.vocab_size())}
    theirs = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (1, 2)
    for text in CORPUS:
        ids = theirs.encode(text)
        if not text.startswith("<s>"):
            assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True), text


SMOLLM2_IDS = {
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "12": [33, 34],
    "\n": [198],
    "<|im_start|>user\n": [1, 4093, 198],
}


def test_the_default_model(smollm2):
    """Ids as llama.cpp gives them: transformers' import of this file joins the digits of "12"."""
    tokenizer = load_tokenizer(smollm2)
    for text, ids in SMOLLM2_IDS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special=False) == text
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (49152, 1, 2)
    for text in CORPUS:
        ids = tokenizer.encode(text)
        kept = tokenizer.decode(ids, skip_special=False)
        whole = {byte for id in ids for byte in tokenizer.token_bytes(id)} >= set(text.encode())
        assert kept == text or not whole  # the vocabulary lacks some bytes
