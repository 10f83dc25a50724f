"""Building, loading, and what is left where that fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from nanoserve.ops.native import library
from nanoserve.ops.native.library import NativeError, build, load
from nanoserve.quant.gguf import Q4_1
from nanoserve.quant.native import BlockMatrix
from nanoserve.quant.weight import Weight


def fake_compiler(folder: Path, script: str) -> str:
    folder.mkdir(exist_ok=True)
    compiler = folder / "c++"
    compiler.write_text(f"#!{sys.executable}\n{script}")
    compiler.chmod(0o755)
    return str(folder)


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeError, match=r"no C\+\+ compiler"):
        load(1, tmp_path / "cache")


def test_a_failed_build_tells_what_the_compiler_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_compiler(tmp_path / "bin", "print('unknown flag'); raise SystemExit(1)"))
    with pytest.raises(NativeError, match="unknown flag"):
        load(1, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_broken_library_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; open(sys.argv[sys.argv.index('-o') + 1], 'w').write('no') if '-o' in sys.argv else None"
    monkeypatch.setenv("PATH", fake_compiler(tmp_path / "bin", script))
    with pytest.raises(NativeError, match="cannot be loaded"):
        load(1, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeError, match="cannot be built"):
        load(1, tmp_path / "file")


def test_processes_that_build_at_once_agree(tmp_path: Path) -> None:
    """The compiler is a stand-in that takes its time; each process must see a whole file."""
    script = (
        "import sys, time\n"
        "if '-o' in sys.argv:\n"
        "    with open(sys.argv[sys.argv.index('-o') + 1], 'w') as file:\n"
        "        for _ in range(20): file.write('x' * 1000); file.flush(); time.sleep(0.01)\n"
    )
    code = f"from pathlib import Path; from nanoserve.ops.native.library import build\n" \
           f"print(build(Path({str(tmp_path / 'cache')!r})).stat().st_size)"  # fmt: skip
    environment = os.environ | {"PATH": fake_compiler(tmp_path / "bin", script)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in started] == ["20000\n"] * 3
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_second_build_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PATH", fake_compiler(tmp_path / "bin", "import sys; '--version' in sys.argv or open(sys.argv[-1], 'w')")
    )
    path = build(tmp_path)
    monkeypatch.setattr(library, "_run_all", lambda commands: pytest.fail("compiled again"))
    assert build(tmp_path) == path
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
    with pytest.raises(pytest.fail.Exception):
        build(tmp_path)


def matrix(threads: int) -> BlockMatrix:
    torch.manual_seed(0)
    weight = torch.randn(200, 64)
    return BlockMatrix(load(threads), [Weight(Q4_1.quantize(weight), (200, 64), Q4_1)])


def test_callers_on_several_threads_take_turns() -> None:
    shared, x = matrix(3), torch.randn(8, 64)
    expected, wrong = shared.matmul(x), []

    def call() -> None:
        wrong.extend(1 for _ in range(100) if not torch.equal(shared.matmul(x), expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_the_pool_wakes_up_after_a_rest() -> None:
    shared, x = matrix(2), torch.randn(2, 64)
    expected = shared.matmul(x)
    for _ in range(20):
        threading.Event().wait(0.003)  # longer than workers spin
        assert torch.equal(shared.matmul(x), expected)


def test_a_forked_child_has_its_own_workers() -> None:
    shared, x = matrix(2), torch.randn(2, 64)
    expected = shared.matmul(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(shared.matmul(x), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(shared.matmul(x), expected)
