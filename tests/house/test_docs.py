"""Docs that name files name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]
NAMED = re.compile(r"`((?:src/nanoserve/|tests/|docs/|bench/)?[\w./-]+\.(?:py|md|ini|toml|json))`")


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    places = [ROOT, ROOT / "src" / "nanoserve", ROOT / "docs", ROOT / "tests"]
    outside = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "model.safetensors.index.json", "special_tokens_map.json", "BENCH.json"}  # fmt: skip
    missing = [
        name for name in NAMED.findall(text) if name not in outside and not any((p / name).exists() for p in places)
    ]
    assert not missing, f"{page} names files that do not exist: {missing}"
