"""Format, lint and types are part of the tests: what is green here is green everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments",
    [["ruff", "format", "--check", "src", "tests"], ["ruff", "check", "src", "tests"], ["mypy"]],
    ids=["format", "lint", "types"],
)
def test_checker_is_content(arguments: list[str]) -> None:
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
