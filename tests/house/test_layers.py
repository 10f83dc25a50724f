"""The house has floors: imports go down only, and bookkeeping knows no tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "importlinter.ini", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "module",
    ["nanoserve", "nanoserve.cli", "nanoserve.schedule.scheduler", "nanoserve.server.app", "nanoserve.text.load",
     "nanoserve.engine.process", "nanoserve.loading.open", "nanoserve.loading.pull"],
)  # fmt: skip
def test_the_front_and_the_bookkeeping_start_without_torch(module: str) -> None:
    code = f"import sys, {module}; assert 'torch' not in sys.modules, 'torch came along'"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
