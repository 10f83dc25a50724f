"""Library: the C++ kernels, compiled on first use, loaded with ctypes, and the pool of threads they run on.

The compiled file lies in a cache folder under a name made of everything it depends on: sources, flags, compiler and
the CPU's features. Where it cannot be built or loaded, `load` raises NativeError with the reason; the caller says so
and takes plain torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nanoserve.core.cache import cache_folder
from nanoserve.core.errors import NanoserveError

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=fast")
COMPILERS = ("c++", "g++", "clang++")


class NativeError(NanoserveError):
    """The kernels cannot be had on this machine; the text is the reason."""


class Part(ctypes.Structure):
    """Rows of weights in one format; matmul.cpp has the same struct."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("format", ctypes.c_int64),
    )


class Library:
    """Functions take addresses as int. Those of `slow` let other Python threads run meanwhile; those of `quick` take
    a few microseconds, less than handing the interpreter over and back."""

    def __init__(self, path: Path, threads: int):
        p, i, f, n = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
        slow, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self.matmul = _function(slow, "matmul", None, p, p, n, i, p, i, i, p, i)
        self.gather = _function(slow, "gather", n, p, n, i, p, i, p)
        self.attention = _function(slow, "attention", None, p, p, p, p, p, i, p, i, p, i, p, f, i, f)
        self.rms_norm = _function(quick, "rms_norm", None, p, p, p, f, i, i, p)
        self.add_rms_norm = _function(quick, "add_rms_norm", None, p, p, p, p, f, i, i, p, p)
        self.rotate = _function(quick, "rotate", None, p, p, i, i, p, p, i, i, i, i, p)
        self.silu_mul = _function(quick, "silu_mul", None, p, p, i, i, p)
        self.threads = threads
        self.pool: int = _function(quick, "pool_create", p, n)(threads)
        os.register_at_fork(after_in_child=lambda: _function(quick, "pool_after_fork", None, p)(self.pool))


def _function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function


def load(threads: int, cache: Path | None = None) -> Library:
    """Compile if need be (about 20 s, once) and load. `threads` counts the caller. Raises NativeError."""
    path = build(cache or cache_folder())
    try:
        return Library(path, threads)
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error


def build(cache: Path) -> Path:
    """The compiled library in `cache`. Processes that build at the same time do not disturb each other."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeError(f"there is no C++ compiler: none of {', '.join(COMPILERS)} is on the PATH")
    sources = sorted(Path(__file__).parent.glob("*.cpp"))
    try:
        target = cache / f"native-{_key(compiler)}.so"
        if not target.exists():
            cache.mkdir(parents=True, exist_ok=True)
            print("nanoserve: compiling the CPU kernels, once, in about 20 s ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                made = Path(folder) / target.name
                objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
                _run_all([[compiler, *FLAGS, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)])
                _run_all([[compiler, *FLAGS, "-shared", *objects, "-o", str(made)]])
                os.replace(made, target)
    except OSError as error:
        raise NativeError(f"the CPU kernels cannot be built in {cache}: {error}") from error
    return target


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.blake2b(repr((FLAGS, version, platform.machine(), _cpu_features())).encode(), digest_size=12)
    for source in sorted(Path(__file__).parent.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _cpu_features() -> str:
    """What -march=native looks at, so that a cache folder shared by machines serves each its own."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _run_all(commands: list[list[str]]) -> None:
    """Run side by side. Raises NativeError with what the first failing one had to say."""
    started = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    said = [process.communicate()[0] for process in started]
    for process, output in zip(started, said, strict=True):
        if process.returncode:
            raise NativeError(f"{' '.join(process.args)} failed:\n{output[-2000:]}")  # type: ignore[arg-type]
