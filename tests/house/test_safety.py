"""Nothing that comes from outside becomes code, and no refusal hangs on an assert."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE_FROM_DATA = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "torch.jit.load"}


def uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield module.partition(".")[0]
            case ast.Call(ast.Name() | ast.Attribute() as function):
                yield ast.unparse(function)


def test_A55_A56_the_package_makes_no_code_of_data() -> None:
    for file in (ROOT / "src").rglob("*.py"):
        found = set(uses(ast.parse(file.read_text())))
        assert not found & (CODE_FROM_DATA | CALLS), file
        assert "import transformers" not in file.read_text(), "it could be told to run a checkpoint's code"


def test_A56_refusals_hold_without_asserts(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONOPTIMIZE": "1", "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/refusals.py"), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == ["20"]
