"""load_tokenizer: the tokenizer in a model's folder, or in its GGUF file. Code that a folder brings is never run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.core.errors import CheckpointError
from nanoserve.loading.files import is_there, read_optional_json, read_text, require_file
from nanoserve.loading.open import find_gguf
from nanoserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises CheckpointError naming the file and the fact."""
    try:
        gguf = None if is_there(path / "tokenizer.json") else find_gguf(path)
    except OSError as error:  # not allowed to read it, for one
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if gguf is not None:
        from nanoserve.loading.gguf import read_gguf
        from nanoserve.text.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(read_gguf(gguf).metadata, gguf)
    if path.is_dir():
        return _from_folder(path)
    raise CheckpointError(f"{path}: no tokenizer there; it must be a folder with a tokenizer.json, or a GGUF file")


def _from_folder(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not is_there(file):
        found = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
        hint = (
            f"; {found[0]} alone is not read: save it as tokenizer.json with the model's own library" if found else ""
        )
        raise CheckpointError(f"{folder} has no tokenizer.json, which the tokenizer is read from{hint}")
    require_file(file)
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from error
    backend.no_padding()
    backend.no_truncation()

    config = read_optional_json(folder / "tokenizer_config.json")
    _add_missing(backend, config.get("added_tokens_decoder"), folder)
    named = _named_tokens({**read_optional_json(folder / "special_tokens_map.json"), **config})
    bos_id, eos_id = (_id(backend, named.get(name)) for name in ("bos_token", "eos_token"))
    prefix, suffix = _frame(backend)
    # A flag that is there overrides the rule in tokenizer.json.
    if (flag := config.get("add_bos_token")) is not None:
        prefix = [bos_id] if flag and bos_id is not None else []
    if (flag := config.get("add_eos_token")) is not None:
        suffix = [eos_id] if flag and eos_id is not None else []
    try:
        return Tokenizer(
            backend,
            prefix=prefix,
            suffix=suffix,
            bos_id=bos_id,
            eos_id=eos_id,
            special_tokens=named,
            chat_template=_chat_template(folder, config.get("chat_template")),
        )
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, as templates are given them."""
    named: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named


def _id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _frame(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    plain: list[int] = backend.encode("a", add_special_tokens=False).ids
    framed: list[int] = backend.encode("a").ids
    for at in range(len(framed) - len(plain) + 1):
        if framed[at : at + len(plain)] == plain:
            return framed[:at], framed[at + len(plain) :]
    return [], []


def _add_missing(backend: tokenizers.Tokenizer, entries: Any, folder: Path) -> None:
    """Tokens that tokenizer_config.json knows and tokenizer.json does not."""
    from tokenizers import AddedToken

    if not isinstance(entries, dict):
        return
    known = backend.get_added_tokens_decoder()
    try:
        missing = sorted((int(id), entry) for id, entry in entries.items() if int(id) not in known)
        for id, entry in missing:
            flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
            normalized = bool(entry.get("normalized", not flags["special"]))
            backend.add_tokens([AddedToken(entry["content"], normalized=normalized, **flags)])
            if backend.token_to_id(entry["content"]) != id:
                raise ValueError(f"{entry['content']!r} cannot have the id {id}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder is wrong: {error}") from error


def _chat_template(folder: Path, configured: Any) -> str | None:
    """A file of its own goes before the configuration; of several named templates, the one named default."""
    file = folder / "chat_template.jinja"
    if is_there(file):
        return read_text(file)
    if configured is None:
        configured = read_optional_json(folder / "chat_template.json").get("chat_template")
    if isinstance(configured, list):
        try:
            configured = {entry["name"]: entry["template"] for entry in configured}.get("default")
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: chat_template is no list of named templates"
            ) from error
    return configured if isinstance(configured, str) else None
